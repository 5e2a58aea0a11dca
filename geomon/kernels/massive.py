"""Rows of massive norm: how to find them, and the share of the variance that they carry.

A few tokens (the first of a sequence, delimiters) can have norms tens of times as large as others,
and one such token in a hundred then dominates every second moment: 16 rows of norm 1000 among 2,032
of norm 28 raise the anisotropy from 0.003 to 0.911.
"""

import numpy as np
import torch
from torch import Tensor

from geomon.kernels._blocks import in_blocks, require_rows

# At this multiple of the median distance, 1 % of the rows carry half of the variance. A massive
# activation of Sun et al. (2402.17762), a coordinate of 1,000 times the median magnitude, gives a
# multiple of 10.5 at width 4,096 and more at smaller widths.
FACTOR = 10.0

# Massive rows are few. A twentieth allows for one in a sequence of 20 tokens; more rows than that
# are part of the distribution.
LARGEST_SHARE = 0.05

# The centre is computed from at least this many rows, if there are as many.
_CENTRAL_ROWS = 1024


def ordinary_rows(hidden: Tensor) -> Tensor:
    """Mark ordinary rows as True, and the few rows of massive norm as False.

    A row is massive if its distance from the centre is more than 10 times the median distance. The
    centre is the coordinatewise median (of evenly spread rows if there are more than 2,048). If
    more than 5 % of the rows are beyond half of that limit, no row is massive: this is a heavy tail
    or a wide cluster, which the limit would cut arbitrarily. Neither centre nor scale depends on
    the massive rows themselves, and a common shift or scaling of all rows changes nothing.

    No Gaussian or uniform row is massive, at any width. Among 4,096 rows with Student t(5) entries
    at width 64, none is (150 samples); with multivariate t(5) rows, which are large as a whole, one
    or two are in one sample of twelve.

    Args:
        hidden: Rows, [tokens, width].

    Returns:
        [tokens], bool; all True if at least half of the rows are equal.

    Raises:
        ValueError: If `hidden` is not a floating-point matrix with at least one row.

    Example:
        >>> import torch
        >>> hidden = torch.arange(40.0)[:, None]
        >>> hidden[7] = 5000
        >>> (~ordinary_rows(hidden)).nonzero().squeeze(1).tolist()
        [7]
    """
    rows = require_rows(hidden)
    # Any centre in the bulk will do.
    middle = _median(rows[:: max(1, len(rows) // _CENTRAL_ROWS)])
    distance = torch.cat([block.sub_(middle).norm(dim=1) for block in in_blocks(rows)])
    scale = distance.median()
    few = (distance > FACTOR / 2 * scale).sum() <= LARGEST_SHARE * len(rows)
    return ~((distance > FACTOR * scale) & few & (scale > 0))


def _median(rows: Tensor) -> Tensor:
    """Return the median of each column (the lower of two middle values), [width], float64."""
    if rows.device.type == "cpu" and rows.sum().isfinite():
        # Numpy takes half the time, but only torch propagates NaN to the median.
        wide = rows.float() if rows.element_size() < 4 else rows
        middle = (len(rows) - 1) // 2
        columns = np.ascontiguousarray(wide.detach().numpy().T)
        return torch.from_numpy(np.partition(columns, middle, axis=1)[:, middle].astype(np.float64))
    # Transposed first: the median down the columns of a row-major matrix is several times slower.
    return rows.double().T.contiguous().median(dim=1).values


def share_beyond(squares: Tensor, ordinary: Tensor) -> Tensor:
    """Compute the share of the variance that the rows of massive norm carry.

    It is the sum of |x_i - mean x|^2 over massive rows, divided by the sum over all rows, where the
    mean is over all rows. Range [0, 1]; 0 if no row is massive (`ordinary_rows`).

    Args:
        squares: Squared distance of each row from the mean of all, [tokens].
        ordinary: True for rows that are not massive, bool, [tokens].

    Returns:
        A scalar; NaN if all rows are equal.

    Example:
        >>> import torch
        >>> share_beyond(torch.tensor([1.0, 1.0, 0.0]), torch.tensor([True, False, True])).item()
        0.5
    """
    return (squares * ~ordinary).sum() / squares.sum()
