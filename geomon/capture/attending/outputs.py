"""Keep the size of each head's output at the sampled queries of one attention call."""

import torch
from torch import Tensor

from geomon.capture.storage import send
from geomon.capture.tap import HeadColumns
from geomon.capture.tokens.sampling import copy_rows


class OutputSizes:
    """Sizes of the outputs of the heads of one attention call.

    Args:
        shape: Number of sequences and length of the whole batch.
        heads: Number of query heads.
        sequences: Indices of the sampled sequences, [sequences].
        places: Position of each sampled query in its sequence, [sequences, queries].

    Attributes:
        sizes: Number of sequences, heads and queries of the whole batch.
        squares: Squared norm of each output, [rows, heads], float32; None until they are projected.
        known: Index of each row among the sampled queries.
    """

    def __init__(
        self, shape: tuple[int, int], heads: int, sequences: Tensor, places: Tensor
    ) -> None:
        self.sizes = shape[0], heads, shape[1]
        self._queries = (sequences[:, None] * shape[1] + places).flatten()
        self.squares: Tensor | None = None
        self.known: Tensor | None = None

    @torch.no_grad()
    def take(self, rows: Tensor, where: HeadColumns) -> None:
        """Take the sizes from the input of the output projection, [rows, width]."""
        wanted, known = self._queries, None
        if where.rows is not None:
            wanted = where.rows[wanted]
            known = (wanted >= 0).nonzero().squeeze(1)
            wanted = wanted[known]
        columns = where.columns
        if isinstance(columns, Tensor):
            columns = send(columns, rows.device)
        own = copy_rows(rows, wanted)[:, columns].unflatten(1, (self.sizes[1], -1))
        self.squares, self.known = torch.linalg.vector_norm(own, dim=2).square(), known

    def sums(self, valid: Tensor | None) -> Tensor | None:
        """Return the sum of squares and the number of rows, [heads, 2]; None if not projected.

        Args:
            valid: Which sampled queries are tokens, [sequences, queries]; None for all.
        """
        if self.squares is None:
            return None
        squares = self.squares.cpu().double()
        if valid is not None:
            valid = valid.cpu().flatten()
            squares = squares[valid if self.known is None else valid[self.known]]
        counts = torch.full_like(squares[:1].sum(dim=0), len(squares))
        return torch.stack([squares.sum(dim=0), counts], dim=1)
