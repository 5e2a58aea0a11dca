"""A view is added by one entry: margins, merging over ranks, splits and docs follow from it."""

import pytest
import torch

from geomon.distributed import merge_layers
from geomon.metrics import Evaluator, check_metrics
from support.doc_tables import of_views
from support.measuring import (
    CAPTURED,
    DERIVED,
    SOURCES,
    CapturedView,
    Layer,
    Part,
    derived,
    margin,
    sliced,
)
from support.samples import normal

SEQUENCES, LENGTH = 16, 10
ROWS = SEQUENCES * LENGTH
ENTRY = {
    "source": "hidden", "rows": "tokens", "heads": "", "merge": "rows", "without": "sliced",
    "text": "loss of each token, [tokens]",
}  # fmt: skip


@pytest.fixture
def losses(monkeypatch):
    """A captured view, the loss of each token, and one that is derived of it."""
    monkeypatch.setitem(CAPTURED, "token_losses", CapturedView(**ENTRY))
    ranks = derived("rank of each loss, [tokens]", sliced("groups"), _ranks)
    monkeypatch.setitem(DERIVED, "loss_ranks", ranks)


def _ranks(token_losses):
    return token_losses.argsort().argsort().double()


def layer(first=0, count=SEQUENCES):
    number = torch.arange(count).repeat_interleave(LENGTH)
    rows = slice(first * LENGTH, (first + count) * LENGTH)
    loss = normal(ROWS) + normal(SEQUENCES, seed=1).repeat_interleave(LENGTH)
    captured = {"hidden": normal(ROWS, 4, seed=2), "token_losses": loss}
    captured = {name: view[rows] for name, view in captured.items()}
    return Layer(1, "block", captured | {"sequences": number, "precision": 1e-7})


METRICS = {
    "loss": lambda token_losses: token_losses.mean(),
    "ranks": lambda loss_ranks: loss_ranks.square().mean(),
}


def column(name, *parts, rows=ROWS, splits=1):
    evaluator = Evaluator(check_metrics({name: METRICS[name]}), splits, strict=True)
    return evaluator.evaluate([merge_layers(parts)], rows).stacks[""][name]


@pytest.mark.usefixtures("losses")
@pytest.mark.parametrize("name", METRICS)
def test_its_margin_is_that_of_the_values_without_each_group(name):
    loss = layer().captured["token_losses"]
    each = {"loss": loss, "ranks": _ranks(loss).square()}[name]
    groups = each.view(8, -1)  # two sequences each
    without = [groups[[g for g in range(8) if g != group]].mean().item() for group in range(8)]
    found = column(name, layer())
    assert found.at(1) == pytest.approx(each.mean().item())
    assert found.margin_at(1) == pytest.approx(margin(without))
    assert found.margin_at(1) > 0


@pytest.mark.usefixtures("losses")
@pytest.mark.parametrize("name", METRICS)
def test_the_parts_of_two_ranks_are_those_of_one_process(name):
    whole, merged = column(name, layer()), column(name, layer(0, 6), layer(6, 10))
    assert merged.at(1) == pytest.approx(whole.at(1))
    assert merged.margin_at(1) == pytest.approx(whole.margin_at(1))


@pytest.mark.usefixtures("losses")
def test_docs_have_a_line_of_each():
    lines = of_views()
    assert "- `token_losses`: loss of each token, [tokens]" in lines
    assert "- `loss_ranks`: rank of each loss, [tokens]" in lines


@pytest.mark.parametrize("field", ENTRY)
def test_an_entry_that_lacks_a_field_fails_when_it_is_made(field):
    with pytest.raises(TypeError, match=field):
        CapturedView(**{name: value for name, value in ENTRY.items() if name != field})


@pytest.mark.parametrize("name", SOURCES)
def test_a_source_names_views_of_its_own_and_how_its_rows_are_numbered(name):
    source, views = SOURCES[name], [v for v, view in CAPTURED.items() if view.source == name]
    assert {source.shown_by, source.queries, source.keys} - {""} <= set(views)
    assert bool(source.shown_by) == bool(source.text)
    shared = {"rows": bool(source.number), "heads": bool(source.queries and source.keys)}
    assert shared.get(source.shared, True)
    assert not source.number or hasattr(Part(), source.number)


def test_a_derived_view_has_to_say_how_it_is_had_without_a_group():
    with pytest.raises(TypeError, match="without"):
        derived("rank of each loss, [tokens]", way=_ranks)
