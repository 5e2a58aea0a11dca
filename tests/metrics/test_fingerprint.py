"""Readings of the same rows have one fingerprint, and means without each group of sequences."""

import pytest
import torch

from geomon import Memory, Monitor
from geomon.analysis.curves import measured
from geomon.analysis.phase import change_between
from support import definitions as by_book
from support.models import PlainDecoder, batch

IDS = batch(16, 12)
# The last one reads token ids, by which readings are paired.
METRICS = ["anisotropy", "twonn_distinct"]


def readings(probe, **options):
    """Two readings of a model on a probe; its weights change in between."""
    torch.manual_seed(0)
    model, memory = PlainDecoder(layers=2, heads=2), Memory()
    given = {"metrics": METRICS, "schedule": 1, "budget": None, "probe": probe}
    with Monitor(model, sinks=[memory], **given | {"tokens": 128, "splits": 1} | options) as watch:
        for step in range(2):
            watch.probe(step)
            for parameter in model.parameters():
                parameter.data += 0.02 * torch.randn_like(parameter)
    return memory.readings


def test_equal_tokens_have_one_fingerprint_and_others_another():
    first, again = readings(IDS)
    other, _ = readings(IDS.roll(1))
    assert first.fingerprint == again.fingerprint != other.fingerprint != ""


@pytest.mark.parametrize(
    "option", [{"tokens": 64}, {"queries": 32}, {"splits": 2, "tokens": 64}, {"seed": 1}]
)
def test_other_rows_of_equal_tokens_have_another_fingerprint(option):
    assert readings(IDS)[0].fingerprint != readings(IDS, **option)[0].fingerprint


def test_means_without_each_group_give_the_margin_of_the_mean_and_of_a_difference():
    one, other = readings(IDS)
    columns = [reading.column("anisotropy") for reading in (one, other)]
    for column in columns:
        assert len(column.mean_without) == 8
        assert column.mean_margin == pytest.approx(by_book.margin(column.mean_without))
    change = change_between(*(measured(each, "anisotropy") for each in (one, other)))
    apart = [b - a for a, b in zip(*(column.mean_without for column in columns), strict=True)]
    assert change.value == pytest.approx(columns[1].mean - columns[0].mean)
    assert change.margin == pytest.approx(by_book.margin(apart))


def test_rows_of_unknown_tokens_are_not_taken_for_the_same():
    """The model gets numbers instead of token ids."""
    torch.manual_seed(0)
    model = PlainDecoder(layers=2, heads=2, embed=lambda model, rows: rows)
    options = {"metrics": ["anisotropy"], "schedule": 1, "budget": None, "checks": None}
    with Monitor(model, sinks=[memory := Memory()], **options) as watch:
        for step in range(2):
            with watch(step), torch.no_grad():
                model(torch.ones(16, 12, 32))
    assert [reading.fingerprint for reading in memory.readings] == ["", ""]
