"""Faults do what their words say and nothing else; odds equal closed forms and scipy."""

import copy
import logging
import random
import re

import numpy as np
import pytest
import torch
from scipy import stats

from geomon.record.tags import layer_tag
from recipes.enwik8.text import characters
from recipes.faults.__main__ import plan as plan_jobs
from recipes.faults.detectors import (
    Rate,
    Run,
    Scores,
    alarms,
    choose_limit,
    evaluate,
    evaluate_alerts,
    read_run,
    score,
)
from recipes.faults.kinds import FAULTS
from recipes.faults.page import draw, write
from recipes.faults.training import AFTER, BATCHES, EACH_STEP, Job, new_subject, plan, run
from recipes.study.training import update
from support.readings import reading_of

CORPUS = characters(("the geometry of representations while a model trains. " * 400).encode(), "a")
GPT2, LLAMA = Job(1000), Job(1003)


def train(subject, steps, each_step=lambda since: None, first=60):
    """Train, and yield the loss of each step when its update is made."""
    generator = torch.Generator().manual_seed(0)
    for since in range(steps):
        each_step(since)
        loss = subject.loss(subject.draw(generator))
        update(subject.model, subject.optimizer, loss, subject.rate(first + since))
        yield loss.item()


def weights_of(subject):
    return torch.cat([each.detach().flatten() for each in subject.model.parameters()])


@pytest.fixture(scope="module", params=[GPT2, LLAMA], ids=lambda job: job.block)
def trained(request):
    """A subject after two steps, and the losses and weights of twelve healthy steps more."""
    subject = new_subject(request.param, CORPUS)
    list(train(subject, 2))
    healthy = copy.deepcopy(subject)
    return subject, list(train(healthy, 12)), weights_of(healthy)


@pytest.mark.parametrize("name", [name for name, fault in FAULTS.items() if not fault.block])
def test_a_fault_changes_a_training_and_only_the_block_that_it_is_put_into(trained, name):
    before, losses, weights = trained
    fault, subject = FAULTS[name], copy.deepcopy(before)
    each_step = fault.plant(subject, 1, random.Random(1))
    each_step(0)
    each_step(30)
    own = {*subject.blocks()[1].parameters()} if fault.local else {*subject.model.parameters()}
    for part, old in zip(subject.model.parameters(), before.model.parameters(), strict=True):
        assert part in own or torch.equal(part, old)
    # Until a loss differs: late gradients need more than eight steps, repeated batches come from
    # the fifth step on.
    found = zip(losses, train(subject, 12, each_step), strict=True)
    assert any(a != b for a, b in found) or not torch.equal(weights, weights_of(subject))
    blocks = (each.blocks()[1].parameters() for each in (subject, before))
    assert all(map(torch.equal, *blocks)) == (name == "frozen_block")


def test_an_expert_that_is_lost_gets_nothing():
    experts, chosen = new_subject(Job(1000, "expert_lost"), CORPUS), []
    FAULTS["expert_lost"].plant(experts, 1, random.Random(0))
    for block in (0, 1):
        router = experts.part(block, "router")
        router.register_forward_hook(lambda module, inputs, outputs: chosen.append(outputs[2]))
    list(train(experts, 1))
    lost = random.Random(0).randrange(4)
    assert [lost in each for each in chosen] == [True, False]


def test_runs_of_one_number_differ_in_their_fault_alone_and_faults_come_at_many_steps(monkeypatch):
    # The text of every third number, in place of Python's whole reference.
    monkeypatch.setattr("recipes.faults.training.carried_text", lambda: bytes(range(97, 123)) * 400)
    healthy, *others = (
        weights_of(new_subject(Job(1001, fault), CORPUS))
        for fault in ("", "gain_zero", "mlp_scaled")
    )
    assert all(torch.equal(healthy, other) for other in others)
    drawn = [Job(number, "gain_zero").fault_step for number in range(50)]
    assert drawn == [Job(number, "gain_zero").fault_step for number in range(50)]
    assert 600 <= min(drawn) < 630 < 750 < max(drawn) <= 780
    small = [FAULTS[job.fault].kind if job.fault else "" for job in plan_jobs(1, small=True)]
    assert {*small} == {"", "loud", "silent", "creeping"}
    assert small.count("") == 2  # one to choose limits with, one to test them


def test_plans_are_those_of_a_monitor_and_cheaper_steps_get_fewer_checks():
    cheap, dear = (plan(costs, 1_500) for costs in BATCHES.values())
    for read_at, checked_at in (cheap, dear):
        assert {0, 1_499} <= read_at
        assert any(48 <= step <= 80 for step in read_at)
        assert not read_at & checked_at
    assert len(cheap[1]) > 4 * len(dear[1])


# -- odds ------------------------------------------------------------------------------------------


def scores(values, start=0):
    steps = np.arange(start, start + len(values))
    return Scores(steps, np.array(values, dtype=float), np.full(len(values), 2))


def test_alarms_that_follow_each_other_closely_are_one():
    found = scores([0, 2, 2, 0, 2] + [0] * 12 + [2, np.nan])
    assert alarms(found, 1.0) == [(1, 2), (17, 2)]
    assert alarms(found, 2.0) == []


def test_a_limit_holds_the_rate_on_the_runs_that_it_was_chosen_with():
    healthy = [scores(np.random.default_rng(n).standard_normal(2_000)) for n in range(10)]
    known = np.sort(np.concatenate([each.scores for each in healthy]))
    for rate in (1e-3, 1e-4):
        limit = choose_limit(healthy, rate)
        assert sum(len(alarms(each, limit)) for each in healthy) <= rate * 20_000
        # The next lower score as the limit would be one alarm too many.
        lower = known[np.searchsorted(known, limit) - 1]
        assert sum(len(alarms(each, lower)) for each in healthy) > rate * 20_000


def test_intervals_of_rates_are_exact():
    rate = Rate(3, 60_000)
    low, high = (60_000 * each for each in (rate.low, rate.high))
    assert stats.poisson.sf(2, low) == pytest.approx(0.025)
    assert stats.poisson.cdf(3, high) == pytest.approx(0.025)
    assert (Rate(0, 100).low, Rate(0, 100).high) == (0.0, pytest.approx(-np.log(0.025) / 100))


def run_of(job, shift=0.0):
    """A run whose numbers wander little, but for one block's variance from the fault on."""
    chance, first, readings = np.random.default_rng(job.number), job.fault_step, []

    def around(middle, scatter=0.01):
        return middle * np.exp(scatter * chance.standard_normal())

    for step in range(first - 250, first + AFTER):
        values = {"training/loss": around(2.0), "training/gradient_norm": around(1.0)}
        for layer in (1, 2, 3, 4):
            moved = shift if layer == job.fault_block + 1 and step >= first else 0.0
            values[layer_tag("variance", layer)] = around(5.0) * np.exp(moved)
            values[layer_tag("anisotropy", layer)] = around(0.2)
        readings.append(reading_of(values, step))
    alerts = [(first + 1, job.fault_block + 1)] if shift else []
    return Run(job, score(readings), dict.fromkeys((EACH_STEP, *BATCHES), alerts))


@pytest.fixture(scope="module")
def runs():
    healthy = [run_of(Job(number)) for number in (1, 2, 3, 4)]
    return [*healthy, *(run_of(Job(number, "mlp_scaled"), 1.0) for number in (1, 2, 3))]


def test_a_jump_of_one_block_is_noticed_and_named_and_the_loss_says_nothing(runs):
    found, alerts = evaluate(runs, "variance", 1e-3), evaluate_alerts(runs, EACH_STEP)
    for each in (found, alerts):
        assert [(one.delay, one.located) for one in each.outcomes] == [(1, True)] * 3
    assert found.rate.trials > 400
    assert alerts.rate == Rate(0, 4 * 450)
    delays = [
        [one.delay for one in evaluate(runs, *of).outcomes]
        for of in (("anisotropy", 1e-4), ("loss", 1e-3))
    ]
    assert delays[0] == [None] * 3
    assert None in delays[1]


def test_limits_are_chosen_with_one_half_of_the_healthy_runs_alone(runs):
    first = evaluate(runs, "variance", 1e-3)
    changed = copy.deepcopy(runs)
    changed[1].scores["variance"].scores[200] = changed[3].scores["variance"].scores[200] = 9.0
    found = evaluate(changed, "variance", 1e-3)
    assert found.outcomes == first.outcomes
    assert found.rate.count == first.rate.count + 2


def test_the_page_says_what_was_noticed_and_how_often_that_is_false(runs):
    text = write(runs)
    for words in (
        r"3 runs with a fault, and 4 healthy ones with 1,800 steps read, in which 0 alerts",
        r"\| silent \| output of one block's MLP × 6 \| .* \| 100 % \| 1 \| .* \| 3 of 3 \|",
        r"\| 8 x 64 tokens \| silent \| 100 % \| 100 % \| 1 \| 3 of 3 \| 0\.0 \(0\.0 to 20\.5\) \|",
        r"\| variance \| - \| 100 % \| - \| 3 of 3 \| ",
    ):
        assert re.search(words, text), words
    titles = [panel.get_title("left") for panel in draw(runs).axes if panel.axison]
    assert titles == ["silent: output of one block's MLP\n× 6"]


def test_a_run_leaves_records_that_are_read_and_nothing_is_repeated(tmp_path, monkeypatch):
    short = {"FIRST_READ": 3, "AFTER": 4, "EARLIEST": 6, "LATEST": 6}
    for name, steps in short.items():
        monkeypatch.setattr(f"recipes.faults.training.{name}", steps)
    job = Job(1000, "mlp_scaled")
    level = logging.getLogger("geomon").level
    run(job, CORPUS, tmp_path)
    assert logging.getLogger("geomon").level == level
    found, finished = read_run(job, tmp_path), tmp_path / job.folder / "finished.json"
    assert found.scores["loss"].steps.tolist() == [0, *range(3, 10)]
    assert found.alerts.keys() == {EACH_STEP, *BATCHES}
    before = finished.stat().st_mtime_ns
    run(job, CORPUS, tmp_path)
    assert finished.stat().st_mtime_ns == before
