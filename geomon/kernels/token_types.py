"""Token types as clusters: variance within and between types, and norms against variances.

For n_t rows of type t, with M_t = |mean of type t|^2 and V_t the variance about that mean, M_t +
V_t = Q_t holds for every type as M + V = Q does for all rows, and V = V_W + V_B: the variance
within types and the variance between their means (Yamagiwa and Shimodaira, 2409.11253).
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from geomon.kernels._blocks import column_blocks, require_rows
from geomon.kernels.groups import GROUPS

# Fewest and most rows of a token type in the fit of norms and variances, as in the paper.
_FEWEST_ROWS, _MOST_ROWS = 10, 100_000


class NormVarianceFit(NamedTuple):
    """A straight line through the token types, V_t over M_t; scalars, float64.

    Attributes:
        slope: Change of V_t per unit of M_t; -1 if Q_t is equal for all types.
        r_squared: Share of the variance of V_t over types that the line explains.
        types: Number of types in the fit.
        coverage: Share of the tokens that belong to them.
        q_variation: Coefficient of variation of Q_t over these types (standard deviation over
            mean). If it is 0, the slope is -1 by identity.
    """

    slope: Tensor
    r_squared: Tensor
    types: Tensor
    coverage: Tensor
    q_variation: Tensor


@dataclass(frozen=True, slots=True)
class TokenTypes:
    """Moments of the rows of each token type, in ascending order of id, float64.

    Attributes:
        rows: Number of rows of each type, n_t, [types]; 0 if all are in a group left out.
        m: Squared norm of the mean of each type, M_t = |mean x|^2, [types].
        scatter: Sum of squared distances of the rows from the mean of their type, [types].
        others: The moments without each group of sequences, [groups, types] each; None if no groups
            were given.
    """

    rows: Tensor
    m: Tensor
    scatter: Tensor
    others: "TokenTypes | None" = None

    def without(self, group: int) -> "TokenTypes":
        """Return the moments of the rows of all other groups; a type may have 0 rows there.

        Args:
            group: Index of a group.

        Raises:
            ValueError: If the moments are not known by group.
        """
        others = self.without_each()
        return TokenTypes(others.rows[group], others.m[group], others.scatter[group])

    def without_each(self) -> "TokenTypes":
        """Return the moments without each group, [groups, types].

        Raises:
            ValueError: If the moments are not known by group.
        """
        if self.others is None:
            raise ValueError("the moments of token types are not known by group: pass groups")
        return self.others

    @property
    def within_variance(self) -> Tensor:
        """Variance within token types: V_W = sum_t sum_(i in t) |x_i - mean_t|^2 / (n - K).

        K is the number of types in the sample. The plain form, sum n_t V_t / n, is too low by the
        factor 1 - K/n, because every type's mean is fitted to its own rows: 40 % for natural text
        at n = 2,048. Range [0, inf), in squared units of the rows; NaN if no type occurs twice.

        Example:
            >>> hidden = torch.tensor([[1.0], [3.0], [10.0], [12.0]])
            >>> token_types(hidden, torch.tensor([5, 5, 8, 8])).within_variance.item()
            2.0
        """
        return self.scatter.sum(-1) / (self.rows.sum(-1) - (self.rows > 0).sum(-1))

    def norm_variance_slope(self) -> NormVarianceFit:
        """Fit a line of V_t over M_t to token types: how variance falls as the mean grows.

        Least squares with an intercept, every type counting once, over types with 10 to 100,000
        rows (the authors' limits). V_t uses 1/(n_t - 1), and V_t/n_t is subtracted from M_t. M_t +
        V_t = Q_t still holds, and a rare type does not seem to have less variance and a longer mean
        than a frequent one, which would produce a slope on its own.

        Returns:
            The line. `slope` and `r_squared` are NaN with fewer than 3 types or if M_t is equal for
            all, and `r_squared` also if V_t is. `q_variation` is NaN without types.

        Example:
            >>> centre = torch.tensor([1.0, 2.0, 3.0]).repeat_interleave(10)
            >>> spread = torch.tensor([3.0, 2.0, 1.0]).repeat_interleave(10)
            >>> hidden = centre + spread * (-1.0) ** torch.arange(30)
            >>> types = token_types(hidden[:, None], torch.arange(30) // 10)
            >>> fit = types.norm_variance_slope()
            >>> fit.types.item(), fit.coverage.item(), fit.slope.item() < 0
            (3.0, 1.0, True)
        """
        chosen = (self.rows >= _FEWEST_ROWS) & (self.rows <= _MOST_ROWS)
        number = chosen.sum(-1).double()

        def about_mean(values: Tensor) -> Tensor:
            """Differences from the mean over the chosen types; 0 for the others."""
            mean = torch.where(chosen, values, 0).sum(-1) / number
            return torch.where(chosen, values - mean[..., None], 0)

        # Types are never indexed by a mask: on a device, the host would wait for their number.
        spread = self.scatter / (self.rows - 1)
        # Norms and spreads are already squares, so they are divided by powers of two, which changes
        # no digit, before they are multiplied.
        x, along = _scaled(about_mean(self.m - spread / self.rows))
        y, across = _scaled(about_mean(spread))
        q = torch.where(chosen, self.m + self.scatter / self.rows, 0)
        ratios = q / q.amax(-1, keepdim=True)
        xx, xy, yy = x.square().sum(-1), (x * y).sum(-1), y.square().sum(-1)
        fits = (number >= 3) & (xx > 0)
        return NormVarianceFit(
            slope=torch.where(fits, torch.ldexp(xy / xx, across - along), torch.nan),
            r_squared=torch.where(fits, xy.square() / (xx * yy), torch.nan),
            types=number,
            coverage=torch.where(chosen, self.rows, 0).sum(-1) / self.rows.sum(-1),
            q_variation=(number * about_mean(ratios).square().sum(-1)).sqrt() / ratios.sum(-1),
        )


def _scaled(values: Tensor) -> tuple[Tensor, Tensor]:
    """Divide values by a power of two that brings the largest to about 1; return the exponent."""
    exponent = torch.frexp(values.abs().amax(-1)).exponent
    return torch.ldexp(values, -exponent[..., None]), exponent


def require_token_ids(token_ids: Tensor, rows: int) -> None:
    """Raise a `ValueError` unless there is at least one row, and a token id for each.

    Args:
        token_ids: Type of each row, integers, [tokens].
        rows: Number of rows.
    """
    if token_ids.shape != (rows,) or rows == 0 or token_ids.is_floating_point():
        raise ValueError(
            f"expected a token id for each of {max(rows, 1)} rows, integers [tokens], got "
            f"{token_ids.dtype} {list(token_ids.shape)}"
        )


def token_types(hidden: Tensor, token_ids: Tensor, group: Tensor | None = None) -> TokenTypes:
    """Compute the count, the norm of the mean, and the scatter of the rows of every token type.

    Args:
        hidden: Rows, [tokens, width].
        token_ids: Type of each row, integers, [tokens].
        group: Group of sequences of each row, int64, [tokens]. Defaults to None, for no sums by
            group.

    Returns:
        The moments of each type.

    Raises:
        ValueError: If `hidden` is not a floating-point matrix with at least one row, or `token_ids`
            does not give a type for each row.

    Example:
        >>> hidden = torch.tensor([[1.0], [3.0], [10.0]])
        >>> types = token_types(hidden, torch.tensor([5, 5, 8]))
        >>> types.rows.tolist(), types.m.tolist(), types.scatter.tolist()
        ([2.0, 1.0], [4.0, 100.0], [2.0, 0.0])
    """
    rows = require_rows(hidden)
    require_token_ids(token_ids, len(rows))
    _, kind, count = torch.unique(token_ids, return_inverse=True, return_counts=True)
    size = count.double()
    order = torch.arange(len(rows), dtype=torch.int64, device=rows.device)
    first = torch.zeros_like(count).scatter_reduce(0, kind, order, "amin", include_self=False)
    groups = 1 if group is None else GROUPS
    place = kind if group is None else kind * groups + group
    cells, cell = torch.unique(place, return_inverse=True)
    m = torch.zeros_like(size)
    squares, square_of_sum, along = (size.new_zeros(len(cells)) for _ in range(3))
    # By columns, because with as many types as rows the means take as much memory as the rows.
    for columns in column_blocks(rows):
        # A row of each type is subtracted from the type first, so that nothing cancels far from the
        # origin, and the mean of equal rows is exactly that row.
        block = columns.to(torch.float64, copy=True)  # rows may already be float64
        mean = block[first]
        centred = block.sub_(mean[kind])
        shift = torch.zeros_like(mean).index_add_(0, kind, centred).div_(size[:, None])
        centred.sub_(shift[kind])
        mean += shift
        m += mean.square().sum(dim=1)
        squares.index_add_(0, cell, torch.linalg.vector_norm(centred, dim=1).square_())
        if group is not None:
            sums = mean.new_zeros(len(cells), mean.shape[1]).index_add_(0, cell, centred)
            square_of_sum += sums.square().sum(dim=1)
            along += (sums * mean[cells // groups]).sum(dim=1)
    known = torch.bincount(place, minlength=len(count) * groups).double()
    parts = [size.new_zeros(len(count) * groups) for _ in range(3)]
    for part, values in zip(parts, (squares, square_of_sum, along), strict=True):
        part[cells] = values
    own, squares, square_of_sum, along = (part.view(-1, groups).mT for part in (known, *parts))
    scatter = squares.sum(dim=0)
    if group is None:
        return TokenTypes(size, m, scatter)
    # If S is the sum of a group's rows about the mean of their type, the mean without them moves by
    # -S / (number of rows that stay).
    rest = size - own
    left = rest.clamp(min=1)
    others = TokenTypes(
        rest,
        (m - 2 * along / left + square_of_sum / left.square()).clamp(min=0),
        (scatter - squares - square_of_sum / left).clamp(min=0),
    )
    return TokenTypes(size, m, scatter, others)
