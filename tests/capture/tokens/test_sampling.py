import pytest
import torch
from torch import nn

from geomon.capture.tokens.sampling import (
    ATTENTION_QUERIES,
    MemoryLimit,
    RowSampler,
    move_width_last,
)


def limited(megabytes, rows=1000, layers=5, blocks=4, width=64, **more):
    sampler = RowSampler(rows, seed=0)
    limit = MemoryLimit(megabytes, sampler, layers=layers, blocks=blocks, **more)
    limit.fit_rows(width)
    return limit, sampler


def test_rows_and_what_is_kept_of_them_take_half_of_the_memory():
    _, sampler = limited(1.0)
    # 5 hidden states, and 4 times queries and keys as projected and as attended, of 256 bytes each.
    assert sampler.max_rows == int(0.5e6 / (256 * (5 + 16)))
    _, bare = limited(1.0, blocks=0)
    assert bare.max_rows == int(0.5e6 / (256 * 5))
    _, shared = limited(3.0, share=3)
    assert shared.max_rows == sampler.max_rows


@pytest.mark.parametrize("megabytes", [None, 100.0])
def test_more_memory_than_is_asked_for_limits_nothing(megabytes):
    wide, sampler = limited(megabytes)
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


@pytest.mark.parametrize("valid", [None, torch.arange(20).view(4, 5) % 2 == 0])
def test_rows_are_numbered_in_the_order_in_which_they_are_sampled(valid):
    sampler = RowSampler(6, seed=0)
    rows = sampler.sample_rows(torch.Size((4, 5)), valid)
    numbers = sampler.number_rows(20)[rows]
    assert len(rows.unique()) == 6
    assert (numbers.diff() > 0).all()
    assert (numbers[-1] == 5) == (valid is None)
    assert valid is None or valid.flatten()[rows].all()


@pytest.mark.parametrize(
    ("shape", "parts", "moved"),
    [
        ((2, 8, 5, 5), [nn.Conv2d(8, 8, 3)], True),
        ((2, 8, 8, 8), [nn.Conv2d(8, 8, 3), nn.Linear(8, 8)], True),
        ((2, 5, 5, 8), [nn.Conv2d(8, 8, 3)], False),
        ((2, 5, 5, 8), [nn.Linear(8, 8)], False),
        ((2, 8, 7), [nn.Conv1d(8, 8, 3)], True),
        ((2, 7, 8), [nn.Conv1d(7, 7, 3), nn.LayerNorm(8)], False),
        ((2, 7, 8), [nn.Linear(8, 8)], False),
        ((7, 8), [nn.Conv1d(7, 7, 3)], False),
    ],
)
def test_the_width_is_found_among_the_dimensions(shape, parts, moved):
    """What leaves a block has the channels that it makes, what enters may have those it takes."""
    rows = torch.randn(shape)
    for block, entering in ((nn.Sequential(*parts), False), (nn.Conv1d(shape[1], 9, 1), True)):
        found = move_width_last(rows, block, entering=entering)
        assert torch.equal(found, rows.movedim(1, -1) if moved or entering else rows)
    assert move_width_last(rows, nn.Conv1d(shape[1], 9, 1), entering=False) is rows


@pytest.mark.parametrize(
    ("sequences", "length", "shifts"),
    [
        (ATTENTION_QUERIES // 4, 256, ATTENTION_QUERIES // 32),
        (16, ATTENTION_QUERIES, 2),
        (8, ATTENTION_QUERIES, 1),
        (3, 10, 1),
    ],
)
def test_each_eighth_of_the_sequences_asks_at_the_same_positions(sequences, length, shifts):
    chosen, places = RowSampler(10**8, 0).sample_queries(sequences, length)
    assert chosen.tolist() == list(range(sequences))
    assert places.shape == (sequences, min(length, ATTENTION_QUERIES // sequences))
    assert len(torch.unique(places, dim=0)) == shifts
    for first in range(0, sequences - shifts + 1, shifts):  # together they ask at even distances
        asked = places[first : first + shifts].flatten().sort().values
        assert torch.equal(asked, (2 * torch.arange(len(asked)) + 1) * length // (2 * len(asked)))


def test_some_sequences_are_taken_where_not_all_rows_fit():
    chosen, places = RowSampler(200, 3).sample_queries(50, 40)
    assert chosen.tolist() == sorted(set(chosen.tolist()))
    assert places.shape == (5, 40)
    assert torch.equal(RowSampler(200, 3).sample_queries(50, 40)[0], chosen)
    assert not torch.equal(RowSampler(200, 4).sample_queries(50, 40)[0], chosen)
    assert len(RowSampler(20, 0).sample_queries(9, 40)[0]) == 1  # one at least
    fewer = RowSampler(10**6, 0)
    fewer.limit(80)
    chosen, places = fewer.sample_queries(50, 40)
    assert (len(chosen), places.shape) == (2, (2, 40))
