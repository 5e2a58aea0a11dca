"""Keep the size of each head's output at the sampled queries of one attention call."""

from collections.abc import Sequence

import torch
from torch import Tensor

from geomon.capture.storage import send
from geomon.capture.tap import HeadColumns


class OutputSizes:
    """Sizes of the outputs of the heads of one attention call.

    Args:
        sizes: Number of sequences, heads and queries of the whole batch.
        queries: Index of each sampled query among all of them, ascending; None if all are sampled.

    Attributes:
        sizes: The argument.
        norms: Norm of each output, [rows, heads], float32; None until they are projected.
        known: Index of each row among the sampled queries; None if each has a row.
    """

    def __init__(self, sizes: tuple[int, int, int], queries: Tensor | None) -> None:
        self.sizes, self._queries = sizes, queries
        self.norms: Tensor | None = None
        self.known: Tensor | None = None

    @torch.no_grad()
    def take(self, rows: Tensor, where: HeadColumns) -> None:
        """Take the sizes from the input of the output projection, [..., width]."""
        wanted = self._queries
        if where.rows is not None:
            wanted = where.rows if wanted is None else where.rows[wanted]
            self.known = (wanted >= 0).nonzero().squeeze(1)
            wanted = wanted[self.known]
        columns = where.columns
        if isinstance(columns, Tensor):
            columns = send(columns, rows.device)
        own = rows.reshape(-1, rows.shape[-1])
        own = own if wanted is None else own.index_select(0, send(wanted, rows.device))
        heads = own[:, columns].view(len(own), self.sizes[1], -1)
        wide = torch.promote_types(heads.dtype, torch.float32)
        self.norms = torch.linalg.vector_norm(heads, dim=2, dtype=wide).float()


def sums_of_squares(norms: Sequence[Tensor], counted: Tensor | None) -> list[Tensor]:
    """Sum the squares of norms over rows, and count the rows: [heads, 2] for each attention.

    Args:
        norms: Norms of several attentions, [rows, heads], all of one shape and on one device.
        counted: Whether each row counts, [rows]; None if all do.
    """
    every = torch.stack([*norms]).cpu().double()
    every = every if counted is None else every[:, counted]
    counts = every.new_full((every.shape[0], every.shape[2]), every.shape[1])
    return [*torch.stack([every.square().sum(dim=1), counts], dim=2)]
