from dataclasses import replace

import numpy as np
import pytest
import torch

from geomon.metrics import METRICS, Evaluator, select
from support import definitions as by_book
from support.measuring import Layer, tagged
from support.whole_layer import ROWS, normal, whole_layer

NAMES = ["mean_query", "mean_key", "queries", "keys", "eigenvalues", "type_ids", "type_rows",
         "type_square_of_mean", "type_scatter"]  # fmt: skip


def by_name(arrays):
    return {place.name: array for place, array in arrays.items()}


def arrays_with(metrics, one=None, **options):
    evaluator = Evaluator(metrics, 1, strict=True, keeps_arrays=True, **options)
    return by_name(evaluator.evaluate([one or whole_layer()], ROWS).arrays)


def test_arrays_hold_what_their_names_say():
    seen = whole_layer().captured
    found = arrays_with(METRICS)
    assert list(found) == NAMES
    for mean, single, view in (
        ("mean_query", "queries", "projected_query"), ("mean_key", "keys", "projected_key"),
    ):  # fmt: skip
        np.testing.assert_allclose(found[mean], seen[view].mean(0), atol=1e-6)
        np.testing.assert_allclose(found[single], seen[view][::8], atol=2e-3)
    hidden, ids = seen["hidden"].double().numpy(), seen["token_ids"].numpy()
    count, mean, spread = by_book.by_type(hidden, ids)
    wanted = {
        "eigenvalues": by_book.eigenvalues(hidden), "type_ids": np.unique(ids),
        "type_rows": count, "type_square_of_mean": mean, "type_scatter": count * spread,
    }  # fmt: skip
    for name, array in wanted.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-5, err_msg=name)


def test_no_view_is_computed_and_none_captured_for_arrays():
    bare = Layer(1, "block", {"hidden": whole_layer().captured["hidden"]})
    assert arrays_with(select("drift_norm"), bare) == {}
    assert list(arrays_with(select("qk_cosine"))) == ["mean_query", "mean_key", "queries", "keys"]
    metrics = select("anisotropy", "within_variance")
    assert Evaluator(metrics, 1, keeps_arrays=True).views == Evaluator(metrics, 1).views


def test_arrays_are_copies_of_their_own():
    seen = whole_layer()
    found = arrays_with(METRICS, seen)
    for view in ("hidden", "projected_query", "projected_key", "token_ids"):
        seen.captured[view].zero_()
    again = arrays_with(METRICS)
    for tag, array in found.items():
        np.testing.assert_array_equal(array, again[tag])
        assert array.base is None


@pytest.mark.parametrize(("largest", "dtype"), [(65504.0, np.float16), (65505.0, np.float32)])
def test_single_rows_are_short_where_their_range_allows(largest, dtype):
    one = whole_layer()
    one.captured["projected_query"][0, 0, 0] = largest
    found = arrays_with(METRICS, one)
    assert (found["queries"].dtype, found["mean_query"].dtype) == (dtype, np.float32)
    assert np.isfinite(found["queries"]).all()


@pytest.mark.parametrize("wanted", [32, 5, 1, 0])
def test_a_reading_that_is_too_large_has_fewer_single_rows_and_all_the_rest(wanted, monkeypatch):
    whole = arrays_with(METRICS)
    rows = {name: wanted * whole[name][0].nbytes for name in ("queries", "keys")}
    most = 3 * sum(rows.get(name, array.nbytes) for name, array in whole.items())
    monkeypatch.setattr("geomon.metrics.arrays.MOST_BYTES", most)
    layers = [replace(whole_layer(), index=index) for index in range(3)]
    arrays = Evaluator(METRICS, 1, keeps_arrays=True).evaluate(layers, ROWS).arrays
    assert sum(array.nbytes for array in arrays.values()) <= most
    found = by_name(arrays)
    assert [len(found.get(name, ())) for name in rows] == [wanted] * 2
    np.testing.assert_array_equal(found["mean_query"], whole["mean_query"])


def test_a_layer_has_so_many_eigenvalues_and_types():
    one = whole_layer()
    one.captured.update(hidden=normal(600, 300), token_ids=torch.arange(600) % 300)
    found = arrays_with(select("anisotropy", "within_variance"), one)
    assert {len(found[name]) for name in ("eigenvalues", "type_ids", "type_rows")} == {256}


def test_the_most_frequent_types_are_kept(monkeypatch):
    monkeypatch.setattr("geomon.metrics.arrays.TYPES", 3)
    found = arrays_with(METRICS)
    counts = np.bincount(whole_layer().captured["token_ids"].numpy())
    assert sorted(found["type_rows"]) == sorted(counts)[-3:]
    np.testing.assert_array_equal(counts[found["type_ids"]], found["type_rows"])


def break_arrays(error, monkeypatch):
    def broken(views):
        raise error

    monkeypatch.setattr("geomon.metrics.evaluate.arrays_of", broken)


def test_arrays_that_cannot_be_taken_cost_nothing_but_themselves(monkeypatch):
    break_arrays(ZeroDivisionError("by design"), monkeypatch)
    result = Evaluator(METRICS, 1, keeps_arrays=True).evaluate([whole_layer()], ROWS)
    assert result.arrays == {}
    assert np.isfinite(tagged(result.stacks)["anisotropy/layer_01"])
    said = [note.words() for note in result.notes]
    assert [words for words in said if "by design" in words] == [
        "arrays for figures, layer 1: ZeroDivisionError: by design"
    ]


@pytest.mark.parametrize(
    ("error", "strict"),
    [(ZeroDivisionError, True), (torch.OutOfMemoryError, True), (torch.OutOfMemoryError, False)],
)
def test_an_error_in_arrays_is_raised_if_strict_or_if_elsewhere_there_is_memory(
    error, strict, monkeypatch
):
    break_arrays(error(), monkeypatch)
    with pytest.raises(error):
        Evaluator(METRICS, 1, strict=strict, keeps_arrays=True).evaluate([whole_layer()], ROWS)
