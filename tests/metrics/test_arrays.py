from dataclasses import replace

import definitions as by_book
import numpy as np
import pytest
import torch
from measuring import Layer, tagged
from whole_layer import ROWS, normal, whole_layer

from geomon.metrics import METRICS, Evaluator, select

NAMES = ["mean_query", "mean_key", "queries", "keys", "eigenvalues", "type_ids", "type_rows",
         "type_square_of_mean", "type_scatter"]  # fmt: skip


def arrays_with(metrics, one=None, **options):
    evaluator = Evaluator(metrics, 1, strict=True, keeps_arrays=True, **options)
    return by_tag(evaluator.evaluate([one or whole_layer()], ROWS).arrays)


def by_tag(arrays):
    return {f"{place.name}/layer_{place.layer:02d}": array for place, array in arrays.items()}


def test_arrays_hold_what_their_names_say():
    seen = whole_layer()
    found = arrays_with(METRICS, seen)
    assert list(found) == [f"{name}/layer_01" for name in NAMES]
    rows = {name: seen.captured[name].numpy() for name in ("projected_query", "projected_key")}
    for mean, single, view in (
        ("mean_query", "queries", "projected_query"), ("mean_key", "keys", "projected_key"),
    ):  # fmt: skip
        np.testing.assert_allclose(found[f"{mean}/layer_01"], rows[view].mean(0), atol=1e-6)
        np.testing.assert_allclose(found[f"{single}/layer_01"], rows[view][::8], atol=2e-3)
    hidden, ids = seen.captured["hidden"].double().numpy(), seen.captured["token_ids"].numpy()
    expected = by_book.eigenvalues(hidden)
    np.testing.assert_allclose(found["eigenvalues/layer_01"], expected, rtol=1e-5)
    assert found["type_ids/layer_01"].tolist() == sorted(set(ids.tolist()))
    count, mean, spread = by_book.by_type(hidden, ids)
    for name, wanted in (("rows", count), ("square_of_mean", mean), ("scatter", count * spread)):
        np.testing.assert_allclose(found[f"type_{name}/layer_01"], wanted, rtol=1e-5)


def test_no_view_is_computed_and_none_captured_for_arrays():
    bare = Layer(1, "block", {"hidden": whole_layer().captured["hidden"]})
    assert arrays_with(select("drift_norm"), bare) == {}
    assert list(arrays_with(select("qk_cosine"))) == [
        f"{name}/layer_01" for name in ("mean_query", "mean_key", "queries", "keys")
    ]
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
    assert found["queries/layer_01"].dtype == dtype
    assert np.isfinite(found["queries/layer_01"]).all()
    assert found["mean_query/layer_01"].dtype == np.float32


def test_a_reading_that_is_too_large_has_fewer_single_rows_and_all_the_rest(monkeypatch):
    whole = {tag.split("/")[0]: array for tag, array in arrays_with(METRICS).items()}
    others = sum(a.nbytes for name, a in whole.items() if name not in ("queries", "keys"))
    layers = [replace(whole_layer(), index=index) for index in range(3)]
    for wanted in (32, 5, 1, 0):
        most = 3 * (others + wanted * (whole["queries"][0].nbytes + whole["keys"][0].nbytes))
        monkeypatch.setattr("geomon.metrics.arrays.MOST_BYTES", most)
        found = by_tag(Evaluator(METRICS, 1, keeps_arrays=True).evaluate(layers, ROWS).arrays)
        assert sum(array.nbytes for array in found.values()) <= most
        assert len(found.get("queries/layer_02", ())) == wanted
        assert len(found.get("keys/layer_02", ())) == wanted
        np.testing.assert_array_equal(found["mean_query/layer_00"], whole["mean_query"])


def test_a_layer_has_so_many_eigenvalues_and_types():
    one = whole_layer()
    one.captured["hidden"] = normal(600, 300)
    one.captured["token_ids"] = torch.arange(600) % 300
    found = arrays_with(select("anisotropy", "within_variance"), one)
    sizes = {tag.partition("/")[0]: len(array) for tag, array in found.items()}
    assert {sizes[name] for name in ("eigenvalues", "type_ids", "type_rows")} == {256}


def test_the_most_frequent_types_are_kept(monkeypatch):
    monkeypatch.setattr("geomon.metrics.arrays.TYPES", 3)
    seen = whole_layer()
    found = arrays_with(METRICS, seen)
    counts = np.bincount(seen.captured["token_ids"].numpy())
    assert sorted(found["type_rows/layer_01"]) == sorted(counts)[-3:]
    np.testing.assert_array_equal(counts[found["type_ids/layer_01"]], found["type_rows/layer_01"])


@pytest.mark.parametrize("error", [ZeroDivisionError("by design"), torch.OutOfMemoryError()])
def test_arrays_that_cannot_be_taken_cost_nothing_but_themselves(error, monkeypatch):
    def broken(views):
        raise error

    monkeypatch.setattr("geomon.metrics.evaluate.arrays_of", broken)
    with pytest.raises(type(error)):
        arrays_with(METRICS)
    evaluator = Evaluator(METRICS, 1, keeps_arrays=True)
    if isinstance(error, torch.OutOfMemoryError):  # elsewhere there is memory
        with pytest.raises(torch.OutOfMemoryError):
            evaluator.evaluate([whole_layer()], ROWS)
        return
    result = evaluator.evaluate([whole_layer()], ROWS)
    assert result.arrays == {}
    assert np.isfinite(tagged(result.stacks)["anisotropy/layer_01"])
    assert [n.words() for n in result.notes if "by design" in n.words()] == [
        "arrays for figures, layer 1: by design"
    ]
