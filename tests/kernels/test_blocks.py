"""What every kernel asks of its rows, and how rows are cut into blocks."""

import torch

from geomon.capture.snapshot import HOST
from geomon.kernels._blocks import row_blocks, rows_in_block


def test_blocks_hold_as_many_whole_rows_as_fit(cut_blocks):
    cut_blocks(10)
    assert [rows_in_block(width, HOST) for width in (1, 3, 5, 10, 11, 99)] == [10, 3, 2, 1, 1, 1]
    rows = torch.arange(21.0).reshape(7, 3)
    assert [len(block) for block in row_blocks(rows)] == [3, 3, 1]
    assert torch.equal(torch.cat(row_blocks(rows)), rows)
