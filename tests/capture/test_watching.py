"""Small parts of a window: what it wants, which calls it watches, its guard and its remarks."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from torch import nn

from geomon.capture import find_anatomy
from geomon.capture.guard import Guard
from geomon.capture.remarks import HIDDEN, LayerRemarks
from geomon.capture.tap import DepartedError
from geomon.capture.tokens.sampling import RowSampler
from geomon.capture.wanted import Wanted
from geomon.capture.watched_calls import WatchedCalls
from geomon.note_kinds import NoteKind
from support.models import PlainDecoder

# -- what is wanted --------------------------------------------------------------------------------

# A view, and which of `last`, `tokens`, `attention` and `operators` it needs.
NEEDS = {
    "hidden": "", "weight_norms": "", "weight_moves": "", "sequences": "",
    "token_ids": "tokens operators", "positions": "tokens operators",
    "last_hidden": "last tokens operators",
    "query": "attention operators", "max_logits": "attention operators",
    "projected_key": "attention operators", "expert_counts": "attention operators",
}  # fmt: skip


@pytest.mark.parametrize("view", NEEDS)
def test_a_view_needs_its_own_calls_and_no_others(view):
    wanted = Wanted({view}, ())
    needs = [n for n in ("last", "tokens", "attention", "operators") if getattr(wanted, n)]
    assert " ".join(needs) == NEEDS[view]
    assert not wanted.final_norm


def test_further_layers_are_wanted_with_hidden_states_alone():
    wanted = Wanted({"hidden", "query"}, ["embedding", "final_norm"])
    assert wanted.extra_layers == ("embedding", "final_norm")
    assert wanted.sources == {"hidden", "attention"}
    assert wanted.final_norm
    assert wanted.tokens  # tables are found by the ids that they receive
    assert not Wanted({"hidden"}, ["final_norm", "unembedding"]).tokens
    without = Wanted({"query"}, ["embedding", "final_norm"])
    assert (without.extra_layers, without.final_norm, without.tokens) == ((), False, False)


@pytest.mark.parametrize(
    ("views", "extra", "layers", "blocks"),
    [
        ({"hidden"}, (), 4, 0),
        ({"hidden"}, ("final_norm", "embedding"), 5, 0),
        ({"hidden", "last_hidden"}, (), 8, 0),
        ({"hidden", "query"}, (), 4, 3),
    ],
)
def test_memory_is_shared_by_what_is_kept_of_each_row(views, extra, layers, blocks):
    anatomy = find_anatomy(PlainDecoder())
    sampler = RowSampler(1000, 0)
    limit = Wanted(views, extra).memory_limit(anatomy, 1.0)(sampler)
    limit.fit_rows(250)
    assert sampler.max_rows == 500_000 // (4 * 250 * (layers + 4 * blocks))


# -- calls -----------------------------------------------------------------------------------------


def test_calls_have_their_actions_in_the_order_in_which_they_were_added():
    calls, module, other = WatchedCalls(), nn.Linear(1, 1), nn.Linear(1, 1)
    assert calls.is_empty
    calls.add(module, "one", "two")
    calls.add(module, "three", None)
    calls.add(other, None, "four")
    assert not calls.is_empty
    assert [calls.before(module), calls.after(module)] == [["one", "three"], ["two"]]
    assert [calls.before(other), calls.after(other)] == [(), ["four"]]
    assert calls.has(module)
    assert calls.has(other)
    assert not calls.has(nn.Linear(1, 1))
    calls.forget()
    assert calls.is_empty
    assert not calls.has(module)
    assert not calls.has(other)


def test_modules_that_only_project_are_watched_while_their_calls_are_asked_for():
    calls, projects, attends = WatchedCalls(), nn.Linear(1, 1), nn.Linear(1, 1)
    calls.add(attends, "before", "after")
    for module in (projects, attends):
        calls.add_projecting(module, "given", "made")
    assert calls.before(attends) == ["before", "given"]
    assert [calls.has(projects), calls.has(attends)] == [True, True]
    calls.sees_projecting = False
    assert [calls.has(projects), calls.has(attends)] == [False, True]


# -- time and errors -------------------------------------------------------------------------------


def test_a_guard_keeps_errors_in_words_and_leaves_those_out_that_have_a_note(failures):
    entered = []

    @contextmanager
    def charge():
        entered.append("in")
        yield
        entered.append("out")

    guard = Guard(charge)
    with guard.guarded(), guard.guarded():
        raise ZeroDivisionError("by design")
    with guard.guarded():
        raise DepartedError("said elsewhere")
    assert guard.errors == ["ZeroDivisionError: by design"]
    assert entered == ["in", "in", "out", "out", "in", "out"]
    with pytest.raises(KeyboardInterrupt), guard.guarded():
        raise KeyboardInterrupt
    failures.clear()


def test_pieces_of_work_in_one_another_take_their_time_once(monkeypatch):
    clock = iter(range(0, 100, 7))
    monkeypatch.setattr("geomon.capture.guard.time", SimpleNamespace(perf_counter=clock.__next__))
    guard = Guard(contextmanager(lambda: (yield)))
    with guard.timed(), guard.timed():
        pass
    assert guard.seconds == 21  # four looks at the clock
    with guard.timed():
        pass
    assert guard.seconds == 28


# -- remarks ---------------------------------------------------------------------------------------


def test_a_remark_is_said_once_for_all_its_layers():
    remarks = LayerRemarks("decoder")
    for depth in (3, 1, 3):
        remarks.add(NoteKind.SIDE_BY_SIDE, "spread", depth, "it is odd")
    remarks.add(NoteKind.SIDE_BY_SIDE, "spread", 3, "it is even")
    remarks.add(NoteKind.SIDE_BY_SIDE, "spread", 2, "it is odd", "decoder.cross")
    remarks.add(NoteKind.SIDE_BY_SIDE, "spread", 0, "it is odd", "")
    assert [note.words() for note in remarks.notes()] == [
        "decoder: spread, layer 3, 1: it is odd",
        "decoder: spread, layer 3: it is even",
        "decoder.cross: spread, layer 2: it is odd",
        "spread, layer 0: it is odd",
    ]


@pytest.mark.parametrize(("other", "words"), [(3, "3 of 9"), (2, "up to 3 of 9")])
def test_rows_that_are_not_finite_are_counted_at_the_worst_layer(other, words):
    remarks = LayerRemarks("")
    remarks.lose(HIDDEN, 1, 3, 9)
    remarks.lose(HIDDEN, 2, other, 9)
    remarks.lose("Q and K", 4, 1, 5)
    hidden, queries = remarks.notes()
    assert hidden.words() == (
        f"hidden states, layer 1, 2: {words} rows are not finite and were left out"
    )
    assert queries.words() == "Q and K, layer 4: 1 of 5 rows are not finite and were left out"
    assert (hidden.about, queries.about) == ("", "Q and K")
    assert hidden.kind == queries.kind == NoteKind.ROWS_NOT_FINITE
