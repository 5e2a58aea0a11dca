import pytest
import torch

from geomon.capture.attention import SoftmaxCall
from geomon.capture.room import Room
from geomon.capture.sampling import RowDraw


def room(megabytes, rows=1000, layers=5, blocks=4, width=64):
    draw = RowDraw(rows, seed=0)
    made = Room(megabytes, draw, layers=layers, blocks=blocks)
    made.limit(width)
    return made, draw


def call(heads, queries, keys):
    nothing = torch.zeros(0, dtype=torch.int64)
    return SoftmaxCall(torch.zeros(1, heads, queries, keys), nothing, nothing[None], (1, queries))


def test_without_a_limit_nothing_is_refused():
    free, draw = room(None)
    assert draw.budget == 1000
    assert free.refusal(call(8, 1000, 1000)) is None
    assert free.notes() == []


def test_rows_and_what_is_kept_of_them_take_half_of_the_room():
    _, draw = room(1.0)
    # 5 hidden states, and 4 times queries and keys as projected and as attended, of 256 bytes each.
    assert draw.budget == int(0.5e6 / (256 * (5 + 16)))
    _, bare = room(1.0, blocks=0)
    assert bare.budget == int(0.5e6 / (256 * 5))


def test_more_room_than_is_asked_for_thins_nothing():
    wide, draw = room(100.0)
    assert draw.budget == 1000
    assert wide.notes() == []


def test_thinned_rows_are_said():
    tight, draw = room(0.5)
    (note,) = tight.notes()
    assert note.text == (
        f"at most {draw.budget} rows instead of 1000 are kept: a window may hold 0.5 MB "
        "(max_capture_mb)"
    )


def test_some_rows_are_kept_whatever_the_limit():
    _, draw = room(1e-6)
    assert draw.budget == 16


@pytest.mark.parametrize("megabytes", [0.5, 2.0, 20.0])
def test_all_attentions_that_are_kept_fit_beside_the_rows(megabytes):
    tight, draw = room(megabytes)
    rows = 4 * 64 * (5 + 2 * 4) * draw.budget  # hidden states, queries and keys as projected
    largest = 0
    for keys in range(8, 4096, 8):
        if tight.refusal(call(4, 16, keys)) is None:
            largest = 4 * 4 * 16 * keys
    assert largest > 0
    assert rows + 4 * largest <= megabytes * 1e6
    reason = tight.refusal(call(4, 1024, 100_000))
    assert reason is not None
    assert reason.startswith("of each attention 1,638 MB would be kept")
