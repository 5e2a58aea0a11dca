import pytest

from geomon.metrics import METRICS
from support.measuring import cautions, explain_not_finite
from support.readings import stacks_of


def columns(values):
    return stacks_of(values).get("", {})


def cautions_of(values):
    return cautions(columns(values))


# Values with a note, values just short of it, and words of the note.
LIMITS = [
    ({"twonn/layer_01/duplicates": 0.051}, {"twonn/layer_01/duplicates": 0.05},
     "twonn, layer 1: up to 5 % of the rows are exact copies"),
    ({"twonn/layer_02/rounding": 0.11}, {"twonn/layer_02/rounding": 0.1},
     "twonn, layer 2: up to 11 % of the median nearest distance comes from rounding"),
    ({"massive_share/layer_02": 0.51}, {"massive_share/layer_02": 0.5},
     "up to 51 % of the variance is carried by a few rows of massive norm: read"),
    ({"twonn/mean": 3.0, "twonn_distinct/mean": 2.0},
     {"twonn/mean": 2.9, "twonn_distinct/mean": 2.0}, "twonn is 3.0, but 2.0 with each token"),
    ({"twonn/mean": 2.0, "twonn_distinct/mean": 3.0},
     {"twonn/mean": 2.0, "twonn_distinct/mean": 2.9}, "twonn is 2.0, but 3.0 with each token"),
    ({"twonn/mean": 0.9, "twonn_distinct/mean": 0.5},
     {"twonn/mean": 0.0, "twonn_distinct/mean": 0.5}, "twonn is 0.9, but 0.5 with each token"),
    ({"gride/mean/k1": 0.4, "gride/mean/k2": 0.9},
     {"gride/mean/k1": 0.0, "gride/mean/k2": 0.9}, "gride is 0.9 at k2 and 0.4 at k1"),
    ({"gride/mean/k1": 4.0, "gride/mean/k4": 5.0, "gride/mean/k32": 8.0},
     {"gride/mean/k1": 4.0, "gride/mean/k32": 7.9, "gride/mean/n": 64.0},
     "gride is 8.0 at k32 and 4.0 at k1"),
    ({"twonn/layer_01/n": 2.0, "gride/layer_01/n": 1.0}, {"twonn/layer_01/n": 3.0},
     "twonn, layer 1: fewer than 3 rows differ from one another, so there is no dimension"),
]  # fmt: skip


@pytest.mark.parametrize(("beyond", "within", "words"), LIMITS)
def test_a_caution_begins_at_its_limit(beyond, within, words):
    (note,) = cautions_of(beyond)
    assert words in note.words()
    assert cautions_of(within) == []


def test_duplicates_name_their_layers_and_the_largest_share():
    shares = {0: 0.2, 1: 0.0, 3: 0.08}
    (note,) = cautions_of({f"twonn/layer_0{n}/duplicates": share for n, share in shares.items()})
    assert note.words().startswith("twonn, layer 0, 3: up to 20 % of the rows are exact copies")


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ({"twonn/layer_01": 3.0, "twonn/mean": 3.0}, []),
        ({"cosine/layer_01": NAN}, []),  # another note explains it
        ({"anisotropy/layer_01": NAN, "anisotropy/layer_02": NAN, "anisotropy/mean": NAN},
         ["anisotropy, layer 1, 2: NaN: all rows are equal"]),
        ({"anisotropy/layer_01": NAN, "effective_rank/layer_01": NAN},
         ["anisotropy, effective_rank, layer 1: NaN: all rows are equal"]),
        ({"mine/layer_01": NAN, "mine/layer_01/head_0": NAN, "mine/mean": NAN},
         ["mine, layer 1: NaN: the metric returned it"]),
        ({"mine/layer_01": NAN, "mine/layer_01/share": NAN, "mine/mean": NAN, "mine/total": NAN},
         ["mine, layer 1: NaN: the metric returned it",
          "mine/total: NaN: the metric returned it"]),
        ({"mine/layer_01": 1.0, "mine/layer_01/head_0": INF, "mine/layer_01/head_1": INF,
          "mine/mean": 1.0},
         ["mine, layer 1: infinite: too large for float64"]),
        ({"twonn/layer_01": 3.0, "twonn/mean": 3.0, "twonn/layer_01/std": NAN},
         ["twonn/std, layer 1: NaN: one of the splits has no value"]),
        ({"twonn/layer_01": NAN, "twonn/layer_01/n": 2.0, "twonn/layer_01/k1": NAN,
          "twonn/mean": NAN, "twonn/mean/n": 2.0}, []),  # `cautions` has a note
    ],
)  # fmt: skip
def test_a_value_that_is_not_finite_is_named_once_with_its_reason(values, texts):
    explained = [("cosine", 1), ("cosine", None)]
    found = explain_not_finite(columns(values), explained, METRICS, {})
    assert [note.words() for note in found] == texts


def test_infinite_dimensions_are_not_compared():
    assert cautions_of({"twonn/mean": INF, "twonn_distinct/mean": 3.0}) == []
    assert cautions_of({"gride/mean/k1": INF, "gride/mean/k2": 3.0}) == []
