"""Rows of massive norm: how they are found, and the share of the variance that they carry.

A few tokens (the first of a sequence, delimiters) can have norms tens of times the others', and one
of them in a hundred then decides every second moment: 16 rows of norm 1000 among 2,032 of norm 28
take the anisotropy from 0.003 to 0.911.
"""

import numpy as np
import torch
from torch import Tensor

from geomon.kernels._blocks import in_blocks, require_rows

# At this multiple of the median distance 1 % of the rows carries half of the variance. A coordinate
# of 1,000 times the median magnitude, by which Sun et al. (2402.17762) know a massive activation,
# makes a multiple of 10.5 at width 4,096 and of more below.
FACTOR = 10.0

# Massive rows are few. A twentieth allows for one in a sequence of 20 tokens; more rows than that
# are a part of the distribution.
LARGEST_SHARE = 0.05

# Smallest number of rows from which the centre is computed, where there are more.
_CENTRAL_ROWS = 1024


def ordinary_rows(hidden: Tensor) -> Tensor:
    """Mark the rows that are not of massive norm: False for the few far beyond the others.

    A row is massive if its distance from the centre, the coordinatewise median (of evenly spread
    rows where there are more than 2,048), is more than 10 times the median of these
    distances. Where more than a twentieth of the rows are beyond half of that, no row is massive:
    that is a heavy tail or a wide cluster, of which the limit would cut off an arbitrary part.
    Neither the centre nor the scale moves with the massive rows themselves, and a shift or a change
    of scale of all rows changes nothing.

    No Gaussian or uniform row is massive, at any width. Of 4,096 rows whose entries are Student's
    t(5), none is at width 64 (150 samples); of multivariate t(5), where a row is large as a whole,
    one or two are in one sample of twelve.

    Args:
        hidden: Rows, [tokens, width].

    Returns:
        [tokens], bool; all True where at least half of the rows are equal.

    Raises:
        ValueError: `hidden` is not a floating-point matrix with at least one row.

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
    """Take the median of each column, the lower one in the middle, [width], float64."""
    if rows.device.type == "cpu" and rows.sum().isfinite():
        # By numpy in half the time; where a number is none, all medians of torch say so.
        wide = rows.float() if rows.element_size() < 4 else rows
        middle = (len(rows) - 1) // 2
        columns = np.ascontiguousarray(wide.detach().numpy().T)
        return torch.from_numpy(np.partition(columns, middle, axis=1)[:, middle].astype(np.float64))
    # Transposed first: the median down the columns of a row-major matrix is several times slower.
    return rows.double().T.contiguous().median(dim=1).values


def share_beyond(squares: Tensor, ordinary: Tensor) -> Tensor:
    """Compute the share of the variance that the rows of massive norm carry.

    sum over massive rows of |x_i - mean x|^2, over the sum over all rows; the mean is that of all
    rows. Range [0, 1]; 0 where no row is massive (`ordinary_rows`).

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
