import pytest
from tagged import stacks_of

from geomon.capture.snapshot import group_by_layer
from geomon.metrics import METRICS
from geomon.metrics.cautions import cautions, explain_not_finite


def columns(values):
    return stacks_of(values).get("", {})


def cautions_of(values):
    return cautions(columns(values))


def kinds(values):
    return [note.kind for note in cautions_of(values)]




def test_duplicates_name_their_layers_and_the_largest_share():
    found = cautions_of(
        {
            "twonn/layer_00/duplicates": 0.2,
            "twonn/layer_01/duplicates": 0.0,
            "twonn/layer_03/duplicates": 0.08,
        }
    )
    assert len(found) == 1
    assert found[0].words().startswith("twonn, layer 0, 3: up to 20% of the rows are exact copies")


@pytest.mark.parametrize(("one", "other"), [(2.4, 28.7), (28.7, 2.4)])
def test_disagreement_is_said_either_way(one, other):
    found = cautions_of({"twonn/mean": one, "twonn_distinct/mean": other})
    assert f"twonn is {one}" in found[0].words()


def test_scales_that_bend_and_sinks_and_rounding():
    assert kinds({"gride/mean/k1": 4.0, "gride/mean/k32": 9.0}) == ["gride changes with the scale"]
    assert "anisotropy_no_sinks" in cautions_of({"sink_share/layer_02": 0.9})[0].words()
    assert "rounding" in cautions_of({"twonn/layer_02/rounding": 0.3})[0].words()




def test_too_few_rows_for_a_dimension_are_named():
    found = cautions_of({"twonn/layer_01/n": 2.0, "twonn/layer_02/n": 3.0, "gride/layer_01/n": 1.0})
    assert [note.words() for note in found] == [
        "twonn, layer 1: fewer than 3 rows differ from one another, so that there is no dimension"
    ]


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("values", "explained", "texts"),
    [
        ({"twonn/layer_01": 3.0, "twonn/mean": 3.0}, [], []),
        ({"cosine/layer_01": NAN}, [("cosine", 1), ("cosine", None)], []),
        (
            {"anisotropy/layer_01": NAN, "anisotropy/layer_02": NAN, "anisotropy/mean": NAN},
            [],
            ["anisotropy, layer 1, 2: NaN: all rows are equal"],
        ),
        (
            {"anisotropy/layer_01": NAN, "effective_rank/layer_01": NAN},
            [],
            ["anisotropy, effective_rank, layer 1: NaN: all rows are equal"],
        ),
        (
            {"mine/layer_01": NAN, "mine/layer_01/head_0": NAN, "mine/mean": NAN},
            [],
            ["mine, layer 1: NaN: the metric returned it"],
        ),
        (
            {"mine/layer_01": 1.0, "mine/layer_01/head_0": INF, "mine/mean": 1.0},
            [],
            ["mine, layer 1: infinite: too large for float64"],
        ),
        (
            {"twonn/layer_01": 3.0, "twonn/mean": 3.0, "twonn/layer_01/std": NAN},
            [],
            ["twonn/std, layer 1: NaN: there is no value in one of the splits"],
        ),
        (  # `cautions` has a note
            {
                f"twonn/{at}{part}": value
                for at in ("layer_01", "mean")
                for part, value in (("", NAN), ("/n", 2.0), ("/k1", NAN))
            },
            [],
            [],
        ),
    ],
)
def test_what_is_not_finite_is_named_once_with_its_reason(values, explained, texts):
    assert [
        note.words() for note in explain_not_finite(columns(values), explained, METRICS)
    ] == texts


def test_infinite_dimensions_are_not_compared():
    assert cautions_of({"twonn/mean": INF, "twonn_distinct/mean": 3.0}) == []
    assert cautions_of({"gride/mean/k1": INF, "gride/mean/k2": 3.0}) == []
