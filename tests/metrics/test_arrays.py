import definitions as by_book
import numpy as np
import pytest
import torch
from whole_layer import ROWS, whole_layer

from geomon.capture.snapshot import Layer
from geomon.kernels.token_types import TokenTypes
from geomon.metrics import METRICS, Evaluator, arrays, select
from geomon.metrics.arrays import ARRAYS, join_arrays
from geomon.metrics.views import DERIVED, Reader, reader
from geomon.record.columns import tagged
from geomon.record.tags import in_stack, layer_tag


def arrays_with(metrics, one=None, **options):
    evaluator = Evaluator(metrics, 1, strict=True, keeps_arrays=True, **options)
    return by_tag(evaluator.evaluate([one or whole_layer()], ROWS).arrays)


def by_tag(arrays):
    return {
        in_stack(layer_tag(place.name, place.layer), place.stack): array
        for place, array in arrays.items()
    }


def test_arrays_hold_what_their_names_say():
    seen = whole_layer()
    found = arrays_with(METRICS, seen)
    assert list(found) == [f"{name}/layer_01" for name in ARRAYS]
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


def test_no_view_is_computed_and_none_captured_for_arrays(monkeypatch):
    bare = Layer(1, "block", {"hidden": whole_layer().captured["hidden"]})
    assert arrays_with(select("drift_norm"), bare) == {}
    assert list(arrays_with(select("qk_cosine"))) == [
        f"{name}/layer_01" for name in ("mean_query", "mean_key", "queries", "keys")
    ]
    metrics = select("anisotropy", "within_variance")
    kept = Evaluator(metrics, 1, keeps_arrays=True)
    assert kept.views == Evaluator(metrics, 1).views
    counted = []
    for name in ("spectrum", "token_types"):
        function, reads = DERIVED[name].ways[-1]

        def once(*views, _name=name, _function=function):
            counted.append(_name)
            return _function(*views)

        view = DERIVED[name]._replace(ways=(Reader(once, reads),))
        monkeypatch.setitem(DERIVED, name, view)
    arrays_with(metrics)
    assert sorted(counted) == ["spectrum", "token_types"]


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
    one = arrays_with(METRICS)
    whole = {tag.split("/")[0]: array for tag, array in one.items()}
    others = sum(a.nbytes for name, a in whole.items() if name not in ("queries", "keys"))
    for wanted in (32, 5, 1, 0):
        row = whole["queries"][0].nbytes + whole["keys"][0].nbytes
        monkeypatch.setattr(arrays, "MOST_BYTES", 3 * (others + wanted * row))
        found = by_tag(join_arrays(("", index, whole) for index in range(3)))
        assert sum(array.nbytes for array in found.values()) <= arrays.MOST_BYTES
        assert len(found.get("queries/layer_02", ())) == wanted
        assert len(found.get("keys/layer_02", ())) == wanted
        np.testing.assert_array_equal(found["mean_query/layer_00"], whole["mean_query"])


def test_a_reading_has_a_mebibyte_and_a_layer_so_many_eigenvalues_and_types():
    ((_, rows),) = join_arrays([("", 0, {"queries": np.ones((32, 2**14), "f4")})]).items()
    assert len(rows) == 16
    assert len(ARRAYS["eigenvalues"].function(torch.ones(300))) == 256
    assert len(ARRAYS["type_rows"].function(TokenTypes(*[torch.arange(300.0)] * 3))) == 256


def test_the_most_frequent_types_are_kept(monkeypatch):
    monkeypatch.setattr(arrays, "TYPES", 3)
    seen = whole_layer()
    found = arrays_with(METRICS, seen)
    counts = np.bincount(seen.captured["token_ids"].numpy())
    assert sorted(found["type_rows/layer_01"]) == sorted(counts)[-3:]
    np.testing.assert_array_equal(counts[found["type_ids/layer_01"]], found["type_rows/layer_01"])


def test_arrays_that_cannot_be_taken_cost_nothing_but_themselves(monkeypatch):
    def broken(spectrum):
        raise ZeroDivisionError("by design")

    monkeypatch.setitem(ARRAYS, "eigenvalues", reader(broken))
    result = Evaluator(METRICS, 1, keeps_arrays=True).evaluate([whole_layer()], ROWS)
    assert result.arrays == {}
    assert np.isfinite(tagged(result.stacks)["anisotropy/layer_01"])
    assert [n.words() for n in result.notes if "by design" in n.words()] == [
        "arrays for figures, layer 1: by design"
    ]
    with pytest.raises(ZeroDivisionError):
        arrays_with(METRICS)

    def without_memory(spectrum):
        raise torch.OutOfMemoryError

    monkeypatch.setitem(ARRAYS, "eigenvalues", reader(without_memory))
    with pytest.raises(torch.OutOfMemoryError):  # elsewhere there is memory
        Evaluator(METRICS, 1, keeps_arrays=True).evaluate([whole_layer()], ROWS)
