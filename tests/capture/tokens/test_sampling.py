import pytest
import torch
from torch import nn

from geomon.capture.tokens.sampling import MemoryLimit, RowSampler, move_width_last


def limited(megabytes, rows=1000, layers=5, blocks=4, width=64):
    sampler = RowSampler(rows, seed=0)
    limit = MemoryLimit(megabytes, sampler, layers=layers, blocks=blocks)
    limit.fit_rows(width)
    return limit, sampler


def test_without_a_limit_no_rows_are_left_out():
    free, sampler = limited(None)
    assert sampler.max_rows == 1000
    assert free.notes() == []


def test_rows_and_what_is_kept_of_them_take_half_of_the_memory():
    _, sampler = limited(1.0)
    # 5 hidden states, and 4 times queries and keys as projected and as attended, of 256 bytes each.
    assert sampler.max_rows == int(0.5e6 / (256 * (5 + 16)))
    _, bare = limited(1.0, blocks=0)
    assert bare.max_rows == int(0.5e6 / (256 * 5))


def test_more_memory_than_is_asked_for_limits_nothing():
    wide, sampler = limited(100.0)
    assert sampler.max_rows == 1000
    assert wide.notes() == []


def test_fewer_rows_are_noted():
    tight, sampler = limited(0.5)
    (note,) = tight.notes()
    assert note.words() == (
        f"at most {sampler.max_rows} rows instead of 1000 are kept: a window may hold 0.5 MB "
        "(max_capture_mb)"
    )


def test_some_rows_are_kept_whatever_the_limit():
    _, sampler = limited(1e-6)
    assert sampler.max_rows == 16


@pytest.mark.parametrize(
    ("shape", "block", "expected"),
    [
        ((2, 8, 5, 5), nn.Sequential(nn.Conv2d(8, 8, 3)), (2, 5, 5, 8)),
        ((2, 5, 5, 8), nn.Sequential(nn.Conv2d(8, 8, 3)), (2, 5, 5, 8)),
        ((2, 5, 5, 8), nn.Sequential(nn.Linear(8, 8)), (2, 5, 5, 8)),
        ((2, 8, 7), nn.Sequential(nn.Conv1d(8, 8, 3)), (2, 7, 8)),
        ((2, 7, 8), nn.Sequential(nn.Conv1d(7, 7, 3), nn.LayerNorm(8)), (2, 7, 8)),
        ((2, 7, 8), nn.Sequential(nn.Linear(8, 8)), (2, 7, 8)),
        ((7, 8), nn.Sequential(nn.Conv1d(7, 7, 3)), (7, 8)),
    ],
)
def test_the_width_is_found_among_the_dimensions(shape, block, expected):
    assert move_width_last(torch.randn(shape), block, entering=False).shape == expected
