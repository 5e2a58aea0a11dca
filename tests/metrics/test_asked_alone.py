"""A metric alone has the values that it has among others, and searches no more than it reads."""

import pytest
import torch

from geomon import METRICS, MORE_METRICS, select
from geomon.metrics import Evaluator, check_metrics
from support.kernels import nearest, row_additions
from support.measuring import Layer, seen
from support.whole_layer import WIDTH, normal, whole_layer

OWN = {
    "own_nearest": lambda nearest: nearest.distances.mean() + nearest.indices.double().mean(),
    "own_neighbours": lambda neighbours, queries: neighbours.sum(),
    "own_members": lambda members, far_neighbours: members.double().std() + far_neighbours.sum(),
    "own_far": lambda far_nearest: far_nearest.indices.double().mean(),
}
ALL = METRICS | MORE_METRICS | OWN
ROWS, LENGTH = 640, 20


def layer(kind):
    """A whole layer of more rows than are far ones, some of them repeated, with known sequences."""
    number = torch.arange(ROWS) // LENGTH
    hidden = normal(ROWS, WIDTH) * torch.linspace(0.1, 1, WIDTH) + 3
    hidden[40:60] = hidden[100:120]
    ids = torch.randint(0, 6, (ROWS,), generator=torch.Generator().manual_seed(1))
    if kind == "clusters":  # of more rows than a short list has places, many at equal distances
        hidden[120:480] = hidden[:6].repeat(60, 1) + normal(360, WIDTH, seed=1).round() / 1024
    captured = whole_layer().captured | {
        "hidden": hidden, "token_ids": ids, "positions": torch.arange(ROWS) % LENGTH,
        "sequences": number % 6 if kind == "6 sequences" else number,
        "additions": row_additions(hidden - normal(ROWS, WIDTH, seed=2), hidden),
    }  # fmt: skip
    if kind == "no sequences":
        del captured["sequences"]
    return Layer(1, "block", captured)


def values(metrics, of):
    evaluator = Evaluator(check_metrics(metrics), 1, strict=True)
    return seen(evaluator.evaluate([of], ROWS)).values


@pytest.fixture(scope="module", params=["sequences", "6 sequences", "no sequences", "clusters"])
def among_all(request):
    of = layer(request.param)
    return of, values(ALL, of)


@pytest.mark.parametrize("name", ALL)
def test_a_metric_alone_has_the_values_and_margins_that_it_has_among_all(name, among_all):
    of, every = among_all
    alone = values({name: ALL[name]}, of)
    expected = {tag: value for tag, value in every.items() if tag.partition("/")[0] == name}
    assert alone.keys() == expected.keys()
    assert alone
    # Nulls are of the rows without copies, which only `twonn` counts.
    for tag in (each for each in alone if "/null" not in each):
        torch.testing.assert_close(
            alone[tag], expected[tag], rtol=0, atol=0, equal_nan=True, msg=tag
        )


@pytest.mark.parametrize(
    ("names", "kind", "counts"),
    [
        (["anisotropy"], "sequences", set()),
        (["twonn"], "sequences", {2}),
        (["gride"], "no sequences", {64, 16}),
        (["gride"], "6 sequences", {64, 16}),  # too few for margins
        (["gride"], "sequences", {96, 24}),
        (["twonn", "gride"], "sequences", {96, 24}),
        (["twonn", "local_dimension"], "no sequences", {64, 2}),
    ],
)
def test_no_more_neighbours_are_searched_than_the_metrics_read(names, kind, counts, monkeypatch):
    searched = []

    def counted(hidden, k, **which):
        searched.append(k)
        return nearest(hidden, k, **which)

    monkeypatch.setattr("geomon.metrics.views.find_nearest", counted)
    values(select(*names), layer(kind))
    assert {*searched} == counts


@pytest.mark.parametrize("view", ["near_search", "far_search", "near_listed", "far_listed"])
def test_no_metric_can_read_a_search_whose_length_depends_on_other_metrics(view):
    metric = eval(f"lambda {view}: 0.0")
    with pytest.raises(ValueError, match=f"'{view}', which is not a view") as raised:
        check_metrics({"own": metric})
    assert view not in str(raised.value).partition("there are")[2]
