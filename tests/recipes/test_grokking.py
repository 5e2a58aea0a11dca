"""The recipe grokking: its data, its rule against controls, and the command on a tiny table."""

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from geomon import read
from recipes.grokking.__main__ import app
from recipes.grokking.claims import claims
from recipes.grokking.data import split, table
from recipes.grokking.figure import draw
from recipes.grokking.leads import CURVES, Course, alarm, false_alarms, leads
from recipes.study import load_claims

TINY = [
    "--seeds", "2", "--modulus", "23", "--steps", "4", "--interval", "2", "--batch", "32",
    "--processes", "1",
]  # fmt: skip


def course(values, held_out=0.0, memorised_from=0):
    """A training whose two curves are the same, read every 100 steps."""
    steps = [100 * number for number in range(len(values))]
    accuracies = held_out if isinstance(held_out, list) else [held_out] * len(values)
    learnt = [float(step >= memorised_from) for step in steps]
    return Course(steps, learnt, accuracies, dict.fromkeys(CURVES, values))


@settings(deadline=None, max_examples=20)
@given(modulus=st.integers(2, 30), fraction=st.floats(0.1, 0.9), seed=st.integers(0, 99))
def test_a_split_shares_out_the_whole_table(modulus, fraction, seed):
    pairs = table(modulus)
    train, held_out = split(pairs, fraction, seed)
    assert len(train.answers) == round(fraction * modulus**2)
    both = torch.cat([train.tokens, held_out.tokens])
    assert len(both.unique(dim=0)) == modulus**2
    for part in (train, held_out):
        a, b = part.tokens[:, 0], part.tokens[:, 2]
        assert torch.equal((part.answers + b) % modulus, a)


def test_the_alarm_comes_at_the_first_value_below_all_of_the_controls_so_far():
    controls = [course([9.0, 8.0, 6.0, 7.0, 7.0]), course([9.0, 9.0, 8.0, 7.0, 3.0])]
    run = course([9.0, 8.5, 6.0, 5.9, 5.0])
    assert alarm(run, controls, "local_dimension", 0.0) == 300  # not below 6.0 at step 200
    assert alarm(run, controls, "local_dimension", 0.1) is None  # 5.4, then 2.7


def test_values_before_memorisation_count_neither_for_the_run_nor_for_a_control():
    control = course([1.0, 8.0, 8.0, 8.0], memorised_from=100)
    early = course([9.0, 7.0, 9.0, 7.9], memorised_from=200)
    assert alarm(early, [control], "local_dimension", 0.0) == 300
    never = course([9.0, 7.0, 9.0, 7.9], memorised_from=10_000)
    assert alarm(never, [control], "local_dimension", 0.0) is None
    assert alarm(early, [never], "local_dimension", 0.0) is None  # nothing to be below


def test_a_lead_ends_where_half_of_the_pairs_are_answered():
    control = course([5.0] * 5)
    run = course([9.0, 4.0, 4.0, 4.0, 4.0], held_out=[math.nan, 0.0, 0.2, 0.5, 0.9])
    silent = course([9.0] * 5, held_out=[math.nan, 0.0, 0.2, 0.5, 0.9])
    unsolved = course([4.0] * 5)
    assert leads([run, silent, unsolved], [control], "local_dimension", 0.0) == [200, -100]


@settings(deadline=None, max_examples=30)
@given(levels=st.lists(st.floats(1, 100), min_size=2, max_size=6, unique=True))
def test_of_controls_that_stay_where_they_are_the_lowest_raises_the_alarm(levels):
    """Without a margin no number of controls makes the rule free of false alarms."""
    wrong = false_alarms([course([level] * 3) for level in levels], "local_dimension", 0.0)
    assert wrong == [level == min(levels) for level in levels]


def test_a_fall_is_measured_before_generalisation():
    run = course([4.0, 8.0, 6.0, 1.0], held_out=[math.nan, 0.0, 0.05, 0.8])
    assert run.fall("local_dimension") == pytest.approx(6 / 8)
    assert course([4.0, 8.0, 2.0]).fall("local_dimension") == pytest.approx(2 / 8)


def test_claims_are_decided_by_the_curves():
    solved = [math.nan, 0.0, 0.05, 0.8]
    runs = [course([9.0, 9.0, 4.0 + d, 3.0], held_out=solved) for d in (0.0, 0.1)]
    controls = [course([9.0, 9.0, 8.9 + d, 8.9 - d]) for d in (0.0, 0.1)]
    verdicts = {claim.name: claim.verdict for claim in claims(runs, controls, differs="")}
    for name in CURVES:
        assert verdicts[f"{name}_falls_before_generalisation"] == "agrees"
        assert verdicts[f"{name}_stays_without_generalisation"] == "agrees"
        assert verdicts[f"{name}_leads_against_control"] in ("agrees", "undecided")
        assert verdicts[f"{name}_raises_no_false_alarm"] != "agrees"  # of two one is the lowest
    found = {claim.name: claim for claim in claims(runs, controls, differs="")}
    rate = found["local_dimension_raises_no_false_alarm"]
    # Each is once below the other; two of two leave rates from .16 on.
    assert (rate.repeated, rate.measured.so, rate.measured.count) == ("control", 2, 2)
    assert rate.measured.low == pytest.approx(0.158, abs=1e-3)
    falling = [course([9.0, 9.0, 4.0, 3.0]), course([9.0, 9.0, 4.0, 3.1])]
    verdicts = {claim.name: claim.verdict for claim in claims(runs, falling, differs="")}
    assert verdicts["local_dimension_stays_without_generalisation"] == "disagrees"


@pytest.mark.parametrize(
    ("runs", "controls", "words"),
    [
        (1, 1, "one seed of each kind"),
        (2, 2, "2 seeds of each kind (thin), means with 95 % intervals"),
        (1, 3, "one run and 3 controls (thin), means with 95 % intervals"),
    ],
)
def test_the_legend_counts_both_kinds(runs, controls, words):
    solved = course([9.0, 9.0, 4.0, 3.0], held_out=[math.nan, 0.0, 0.05, 0.8])
    others = [course([9.0, 9.0, 8.0, 8.0])] * controls
    figure = draw([solved] * runs, others, fraction=0.5, control_fraction=0.1)
    assert figure.axes[0].get_legend().get_title().get_text() == words


@pytest.mark.filterwarnings("ignore:effective_rank_last. 64 sequences")  # of a tiny table
def test_the_command_leaves_records_figure_and_nothing_twice(tmp_path):
    result = CliRunner().invoke(app, [*TINY, "--controls", "3", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "false alarms in 0 of 3 controls (0.00 to 0.71)" in result.output
    for kind, count in (("generalises", 2), ("control", 3)):
        assert len(list((tmp_path / kind).glob("seed_*/readings.jsonl"))) == count
    assert (tmp_path / "grokking.png").stat().st_size > 20_000
    record = tmp_path / "generalises" / "seed_1" / "readings.jsonl"
    readings = read(record.parent)
    assert [reading.step for reading in readings] == [0, 2, 4]
    last = readings[2].values
    assert 0 <= last["training/held_out_accuracy"] <= 1
    assert last["local_dimension/layer_02"] > 0
    assert last["effective_rank_last/layer_02"] > 1
    assert (record.parent / "held_out" / "readings.jsonl").is_file()
    before = record.read_bytes()
    again = CliRunner().invoke(app, [*TINY, "--out", str(tmp_path)])
    assert again.exit_code == 0, again.output
    assert record.read_bytes() == before
    other = CliRunner().invoke(app, [*TINY, "--out", str(tmp_path), "--batch", "16"])
    assert other.exit_code == 2
    assert "another batch" in other.stderr
    assert other.stderr.count("\n") == 1
    assert not (tmp_path / "claims.json").exists()  # nothing was generalised in four steps
    with pytest.raises(FileNotFoundError):
        load_claims(tmp_path)
    json.loads((record.parent / "finished.json").read_text())
