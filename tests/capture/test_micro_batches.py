"""A pipeline runs a batch in micro-batches: each is a pass of its own, and they share the rows."""

import pytest
import torch

from geomon.capture import Window, find_anatomy
from support.models import PlainDecoder, batch
from support.referee import check_same


def look_at(model, batches, count, *, rows=1000) -> Window:
    """Call the model on some batches; `count` says how many micro-batches a batch has."""
    views = {"hidden", "token_ids", "positions"}
    window = Window(find_anatomy(model), views, rows=rows, seed=0, micro_batches=[count])
    with torch.no_grad(), window:
        for ids in batches:
            model(ids)
    return window


def check_batches(window, batches) -> None:
    """Check that each snapshot has the token ids of one of the batches, in order."""
    snapshots = window.snapshots()
    assert len(snapshots) == len(batches)
    for snapshot, ids in zip(snapshots, batches, strict=True):
        for layer in snapshot.layers:
            places = layer.captured["sequences"], layer.captured["positions"]
            assert torch.equal(layer.captured["token_ids"], ids[places])


def different_batches(count):
    return [batch(2, 8, seed=seed) for seed in range(count)]


def test_each_micro_batch_has_a_snapshot():
    batches = different_batches(3)
    check_batches(look_at(PlainDecoder(), batches, lambda: 3), batches)


def test_calls_beyond_the_number_of_micro_batches_are_not_kept():
    batches = different_batches(5)
    check_batches(look_at(PlainDecoder(), batches, lambda: 3), batches[:3])


def test_micro_batches_share_the_rows():
    seen = look_at(PlainDecoder(), different_batches(3), lambda: 3, rows=11)
    assert [snapshot.info.tokens for snapshot in seen.snapshots()] == [4, 4, 3]


def test_micro_batches_are_sampled_by_seeds_of_their_own():
    same = [batch(2, 8)] * 2
    first, second = look_at(PlainDecoder(), same, lambda: 2, rows=8).snapshots()
    rows = [each.layers[0].captured["positions"] for each in (first, second)]
    assert not torch.equal(*rows)


def test_calls_before_the_number_is_known_only_infer_shapes():
    batches, model, calls = different_batches(3), PlainDecoder(), []
    model.register_forward_hook(lambda *call: calls.append(1))
    check_batches(look_at(model, batches, lambda: 2 if calls else 0), batches[1:])


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_first_of_one_call_more_than_micro_batches_only_infers_shapes(count):
    batches = different_batches(count + 1)
    check_batches(look_at(PlainDecoder(), batches, lambda: count), batches[1:])
    check_batches(look_at(PlainDecoder(), batches[1:], lambda: count), batches[1:])


def test_the_first_micro_batch_has_its_share_though_the_number_was_unknown_as_the_window_opened():
    model, ids, counts = PlainDecoder(), different_batches(2), [0]
    window = Window(
        find_anatomy(model), {"hidden"}, rows=9, seed=0, micro_batches=[lambda: counts[0]]
    )
    counts[0] = 2
    with torch.no_grad(), window:
        for each in ids:
            model(each)
    assert [snapshot.info.tokens for snapshot in window.snapshots()] == [5, 4]


def test_the_first_micro_batch_has_the_rows_of_a_batch_that_is_not_divided():
    model, ids, found = PlainDecoder(), batch(2, 8), []
    for counts in ([], [lambda: 1]):
        window = Window(find_anatomy(model), {"hidden"}, rows=9, seed=3, micro_batches=counts)
        with torch.no_grad(), window:
            model(ids)
        found.append(window.snapshot())
    check_same(*found)


def test_micro_batches_of_a_pass_with_gradients_replace_those_without():
    batches, model = different_batches(4), PlainDecoder()
    views = {"hidden", "token_ids", "positions"}
    window = Window(find_anatomy(model), views, rows=99, seed=0, micro_batches=[lambda: 2])
    with window:
        for place, ids in enumerate(batches):
            with torch.set_grad_enabled(place > 1):
                model(ids)
    check_batches(window, batches[2:])
