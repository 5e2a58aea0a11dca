"""Token types as clusters: variance within and between them, and their norm against their variance.

With n_t rows of type t, M_t = |mean of type t|^2 and V_t the variance about that mean, M_t + V_t =
Q_t holds for every type as M + V = Q does for all rows, and V = V_W + V_B: what is within types and
what is between their means (Yamagiwa and Shimodaira, 2409.11253).
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from geomon.kernels._blocks import column_blocks, mean_row, require_rows
from geomon.kernels.moments import mean_square_norm, variance


class VarianceShares(NamedTuple):
    """Where the mean square norm goes; `mean` + `between` + `within` = 1. Scalars, float64.

    Attributes:
        mean: M / Q, the common mean.
        between: V_B / Q, differences between types.
        within: V_W / Q, contexts of one type.
        within_of_variance: V_W / V.
    """

    mean: Tensor
    between: Tensor
    within: Tensor
    within_of_variance: Tensor


class NormVarianceFit(NamedTuple):
    """A straight line through the token types, V_t on M_t. Scalars, float64.

    Attributes:
        slope: Change of V_t for each unit of M_t; -1 where Q_t is the same for all types.
        r_squared: Share of the variance of V_t over types that the line explains.
        types: Number of types in the fit.
        coverage: Share of the tokens that belong to them.
    """

    slope: Tensor
    r_squared: Tensor
    types: Tensor
    coverage: Tensor


@dataclass(frozen=True, slots=True)
class TokenTypes:
    """What the rows of each token type leave behind, in ascending order of id, float64.

    Attributes:
        rows: n_t, number of rows of the type, [types].
        m: Squared norm of their mean: M_t = |mean x|^2, [types].
        scatter: Sum of their squared distances from it, [types].
    """

    rows: Tensor
    m: Tensor
    scatter: Tensor

    @property
    def within_variance(self) -> Tensor:
        """As the function of that name; NaN where no type comes twice."""
        return self.scatter.sum() / (self.rows.sum() - len(self.rows))

    def norm_variance_slope(self, smallest: int = 10, largest: int = 100_000) -> NormVarianceFit:
        """As the function of that name; arguments and what is raised as there."""
        if not 2 <= smallest <= largest:
            raise ValueError(
                "expected limits 2 <= smallest <= largest on the rows of a type, got "
                f"{smallest} and {largest}: one row has no variance"
            )
        chosen = (self.rows >= smallest) & (self.rows <= largest)
        count = self.rows[chosen]
        spread = self.scatter[chosen] / (count - 1)
        norm = self.m[chosen] - spread / count
        number = chosen.sum().double()
        x, y = norm - norm.mean(), spread - spread.mean()
        xx, xy, yy = x.square().sum(), (x * y).sum(), y.square().sum()
        fits = (number >= 3) & (xx > 0)
        nan = torch.full_like(xx, torch.nan)
        return NormVarianceFit(
            slope=torch.where(fits, xy / xx, nan),
            r_squared=torch.where(fits, xy.square() / (xx * yy), nan),
            types=number,
            coverage=count.sum() / self.rows.sum(),
        )


def token_types(hidden: Tensor, token_ids: Tensor) -> TokenTypes:
    """Count, squared norm of the mean, and scatter of every token type.

    Args:
        hidden: Rows, [tokens, width].
        token_ids: Type of each row, integers, [tokens].

    Raises:
        ValueError: `hidden` is not a floating-point matrix with at least one row, or `token_ids`
            does not name a type for each.

    Example:
        >>> hidden = torch.tensor([[1.0], [3.0], [10.0]])
        >>> types = token_types(hidden, torch.tensor([5, 5, 8]))
        >>> types.rows.tolist(), types.m.tolist(), types.scatter.tolist()
        ([2.0, 1.0], [4.0, 100.0], [2.0, 0.0])
    """
    rows = require_rows(hidden)
    if token_ids.shape != rows.shape[:1] or token_ids.is_floating_point():
        raise ValueError(
            f"expected a token id for each of {len(rows)} rows, integers [tokens], got "
            f"{token_ids.dtype} {list(token_ids.shape)}"
        )
    _, group, count = torch.unique(token_ids, return_inverse=True, return_counts=True)
    size = count.double()
    order = torch.arange(len(rows), device=rows.device)
    first = torch.zeros_like(count).scatter_reduce(0, group, order, "amin", include_self=False)
    m, scatter = torch.zeros_like(size), torch.zeros_like(size)
    # By columns: with as many types as rows, a mean of each would be larger than the rows.
    for columns in column_blocks(rows):
        # A row of its own is taken off every type first: far from the origin nothing cancels, and
        # the mean of equal rows is that row.
        block = columns.double()
        origin = block[first]
        centred = block - origin[group]
        shift = torch.zeros_like(origin).index_add_(0, group, centred).div_(size[:, None])
        squares = centred.sub_(shift[group]).square_().sum(dim=1)
        scatter.index_add_(0, group, squares)
        m += origin.add_(shift).square_().sum(dim=1)
    return TokenTypes(size, m, scatter)


def within_variance(hidden: Tensor, token_ids: Tensor) -> Tensor:
    """Variance within token types: V_W = sum_t sum_(i in t) |x_i - mean_t|^2 / (n - K).

    K is the number of types in the sample. sum n_t V_t / n, the plain form, is low by the factor
    1 - K/n, since every type's mean is fitted to its own rows: 40 % for natural text at n = 2,048.
    Range [0, inf), in squared units of `hidden`.

    Args:
        hidden: Rows, [tokens, width].
        token_ids: Type of each row, integers, [tokens].

    Returns:
        A scalar; NaN where no type comes twice.

    Raises:
        ValueError: `hidden` is not a floating-point matrix with at least one row, or `token_ids`
            does not name a type for each.

    Example:
        >>> hidden = torch.tensor([[1.0], [3.0], [10.0], [12.0]])
        >>> within_variance(hidden, torch.tensor([5, 5, 8, 8])).item()
        2.0
    """
    return token_types(hidden, token_ids).within_variance


def between_variance(hidden: Tensor, token_ids: Tensor) -> Tensor:
    """Variance between the means of token types: V_B = V - V_W.

    V is `variance` (with 1/n) and V_W is `within_variance` (with 1/(n - K)), so that V_W + V_B = V
    and the noise of the fitted means does not count as a difference between types. Range
    [-V_W K/n, inf): where types do not differ it scatters about 0 and can come out below. In
    squared units of `hidden`.

    Args:
        hidden: Rows, [tokens, width].
        token_ids: Type of each row, integers, [tokens].

    Returns:
        A scalar; NaN where no type comes twice.

    Raises:
        ValueError: `hidden` is not a floating-point matrix with at least one row, or `token_ids`
            does not name a type for each.

    Example:
        >>> hidden = torch.tensor([[1.0], [3.0], [10.0], [12.0]])
        >>> between_variance(hidden, torch.tensor([5, 5, 8, 8])).item()
        19.25
    """
    return variance(hidden) - within_variance(hidden, token_ids)


def variance_shares(hidden: Tensor, token_ids: Tensor) -> VarianceShares:
    """Shares of the mean square norm: M / Q, V_B / Q and V_W / Q, and V_W / V.

    As layers deepen, the share of the mean grows, and within V that of V_W (2409.11253). V_W and
    V_B are `within_variance` and `between_variance`.

    Args:
        hidden: Rows, [tokens, width].
        token_ids: Type of each row, integers, [tokens].

    Returns:
        Scalars; NaN where what they are a share of is 0, or where no type comes twice.

    Raises:
        ValueError: `hidden` is not a floating-point matrix with at least one row, or `token_ids`
            does not name a type for each.

    Example:
        >>> hidden = torch.tensor([[1.0], [3.0], [10.0], [12.0]])
        >>> shares = variance_shares(hidden, torch.tensor([5, 5, 8, 8]))
        >>> [round(share.item(), 3) for share in shares]
        [0.665, 0.303, 0.031, 0.094]
    """
    within = within_variance(hidden, token_ids)
    total, square = variance(hidden), mean_square_norm(hidden)
    return VarianceShares(
        mean=mean_row(hidden).square().sum() / square,
        between=(total - within) / square,
        within=within / square,
        within_of_variance=within / total,
    )


def norm_variance_slope(
    hidden: Tensor, token_ids: Tensor, smallest: int = 10, largest: int = 100_000
) -> NormVarianceFit:
    """How a token type's variance falls as its mean grows: the line of V_t on M_t over types.

    Least squares with an intercept, every type counting once, over types with `smallest` <= n_t <=
    `largest` (the authors' limits). V_t has 1/(n_t - 1), and V_t/n_t is taken off M_t: M_t + V_t =
    Q_t still holds, and a rare type does not look as if it had less variance and a longer mean than
    a frequent one, which alone would make a slope.

    Args:
        hidden: Rows, [tokens, width].
        token_ids: Type of each row, integers, [tokens].
        smallest: Fewest rows of a type in the fit, at least 2.
        largest: Most rows of a type in the fit.

    Returns:
        `slope` and `r_squared` are NaN with fewer than 3 types, or where M_t is the same for all;
        `r_squared` also where V_t is.

    Raises:
        ValueError: `hidden` is not a floating-point matrix with at least one row, `token_ids` does
            not name a type for each, or the limits leave no n_t.

    Example:
        >>> centre = torch.tensor([1.0, 2.0, 3.0]).repeat_interleave(2)
        >>> hidden = centre + torch.tensor([3.0, -3.0, 2.0, -2.0, 1.0, -1.0])
        >>> fit = norm_variance_slope(hidden[:, None], torch.arange(6) // 2, smallest=2)
        >>> fit.types.item(), fit.coverage.item(), fit.slope.item() < 0
        (3.0, 1.0, True)
    """
    return token_types(hidden, token_ids).norm_variance_slope(smallest, largest)
