import inspect

import numpy as np
import pytest
import torch

from geomon.capture.snapshot import Layer
from geomon.metrics import METRICS, Evaluator, arrays, select
from geomon.metrics.arrays import ARRAYS, join_arrays
from geomon.metrics.views import DERIVED, alternatives
from geomon.record.columns import tagged
from geomon.record.tags import in_stack, layer_tag

ROWS, HEADS, KEY_HEADS, WIDTH = 96, 4, 2, 8


def layer(index=1, scale=1.0) -> Layer:
    generator = torch.Generator().manual_seed(index)

    def drawn(*shape):
        return scale * torch.randn(*shape, generator=generator)

    ids = torch.randint(0, 7, (ROWS,), generator=generator)
    captured = {
        "hidden": drawn(ROWS, 16), "token_ids": ids, "positions": torch.arange(ROWS),
        "sequences": torch.arange(ROWS) // 8, "precision": 1e-7,
        "projected_query": drawn(ROWS, HEADS, WIDTH),
        "projected_key": drawn(ROWS, KEY_HEADS, WIDTH),
        "query_sequences": torch.arange(ROWS) // 8, "key_sequences": torch.arange(ROWS) // 8,
    }  # fmt: skip
    return Layer(index, "block", captured)


def arrays_with(metrics, one=None, **options):
    evaluator = Evaluator(metrics, 1, strict=True, keeps_arrays=True, **options)
    return by_tag(evaluator.evaluate([one or layer()], ROWS).arrays)


def by_tag(arrays):
    return {
        in_stack(layer_tag(place.name, place.layer), place.stack): array
        for place, array in arrays.items()
    }


def test_arrays_hold_what_their_names_say():
    seen = layer()
    found = arrays_with(METRICS, seen)
    assert list(found) == [f"{name}/layer_01" for name in ARRAYS]
    rows = {name: seen.captured[name].numpy() for name in ("projected_query", "projected_key")}
    for mean, single, view in (
        ("mean_query", "queries", "projected_query"), ("mean_key", "keys", "projected_key"),
    ):  # fmt: skip
        np.testing.assert_allclose(found[f"{mean}/layer_01"], rows[view].mean(0), atol=1e-6)
        np.testing.assert_allclose(found[f"{single}/layer_01"], rows[view][::3], atol=2e-3)
    hidden, ids = seen.captured["hidden"].double().numpy(), seen.captured["token_ids"].numpy()
    covariance = np.cov(hidden.T, bias=True)
    expected = np.linalg.eigvalsh(covariance)[::-1]
    np.testing.assert_allclose(found["eigenvalues/layer_01"], expected, rtol=1e-5)
    types = found["type_ids/layer_01"]
    assert types.tolist() == sorted(set(ids.tolist()))
    for place, number in enumerate(types):
        own = hidden[ids == number]
        assert found["type_rows/layer_01"][place] == len(own)
        square = found["type_square_of_mean/layer_01"][place]
        scatter = found["type_scatter/layer_01"][place]
        assert square == pytest.approx((own.mean(0) ** 2).sum(), rel=1e-5)
        assert scatter == pytest.approx(((own - own.mean(0)) ** 2).sum(), rel=1e-5)


def test_no_view_is_computed_and_none_captured_for_arrays(monkeypatch):
    bare = Layer(1, "block", {"hidden": layer().captured["hidden"]})
    assert arrays_with(select("drift_norm"), bare) == {}
    assert list(arrays_with(select("qk_cosine"))) == [
        f"{name}/layer_01" for name in ("mean_query", "mean_key", "queries", "keys")
    ]
    metrics = select("anisotropy", "within_variance")
    kept = Evaluator(metrics, 1, keeps_arrays=True)
    assert kept.views == Evaluator(metrics, 1).views
    counted = []
    for name in ("spectrum", "token_types"):
        function = alternatives(name)[-1]

        def once(*views, _name=name, _function=function):
            counted.append(_name)
            return _function(*views)

        once.__signature__ = inspect.signature(function)
        monkeypatch.setitem(DERIVED, name, once)
    arrays_with(metrics)
    assert sorted(counted) == ["spectrum", "token_types"]


def test_arrays_are_copies_of_their_own():
    seen = layer()
    found = arrays_with(METRICS, seen)
    for view in ("hidden", "projected_query", "projected_key", "token_ids"):
        seen.captured[view].zero_()
    again = arrays_with(METRICS)
    for tag, array in found.items():
        np.testing.assert_array_equal(array, again[tag])
        assert array.base is None


@pytest.mark.parametrize(("scale", "dtype"), [(1.0, np.float16), (1e6, np.float32)])
def test_single_rows_are_short_where_their_range_allows(scale, dtype):
    found = arrays_with(METRICS, layer(scale=scale))
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


def test_the_most_frequent_types_are_kept(monkeypatch):
    monkeypatch.setattr(arrays, "TYPES", 3)
    seen = layer()
    found = arrays_with(METRICS, seen)
    counts = np.bincount(seen.captured["token_ids"].numpy())
    assert sorted(found["type_rows/layer_01"]) == sorted(counts)[-3:]
    np.testing.assert_array_equal(counts[found["type_ids/layer_01"]], found["type_rows/layer_01"])


def test_arrays_that_cannot_be_taken_cost_nothing_but_themselves(monkeypatch):
    def broken(spectrum):
        raise ZeroDivisionError("by design")

    monkeypatch.setitem(ARRAYS, "eigenvalues", broken)
    result = Evaluator(METRICS, 1, keeps_arrays=True).evaluate([layer()], ROWS)
    assert result.arrays == {}
    assert np.isfinite(tagged(result.stacks)["anisotropy/layer_01"])
    assert [n.words() for n in result.notes if "by design" in n.words()] == [
        "arrays for figures, layer 1: by design"
    ]
    with pytest.raises(ZeroDivisionError):
        arrays_with(METRICS)
