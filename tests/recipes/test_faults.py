"""Faults do what their words say and nothing else; odds are those of closed forms and of scipy."""

import copy
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from geomon import Monitor
from recipes.enwik8.text import characters
from recipes.faults.detectors import DETECTORS, OF_MARGINS, Scores, score_all
from recipes.faults.kinds import FAULTS
from recipes.faults.odds import (
    Alarm,
    Rate,
    alarms,
    area_under_curve,
    choose_limit,
    false_alarms,
    first_alarm,
)
from recipes.faults.page import Verified, write
from recipes.faults.results import Scored, evaluate
from recipes.faults.spectra import UpdateEntropy, near_unit_modes, stable_ranks
from recipes.faults.subject import Parts, draw_settings
from recipes.faults.track import Place, Track
from recipes.faults.training import fault_step, new_subject

CORPUS = characters(("the geometry of representations while a model trains. " * 400).encode(), "a")


def subject_of(block):
    settings = replace(draw_settings("narrow", 0, block=block), batch=2, layers=3)
    return new_subject(settings, CORPUS)[0]


def train(subject, steps, each_step=lambda since: None, first=60):
    generator = torch.Generator().manual_seed(0)
    losses = []
    for since in range(steps):
        each_step(since)
        loss = subject.loss(subject.model, subject.draw(generator))
        subject.optimizer.zero_grad()
        loss.backward()
        for group in subject.optimizer.param_groups:
            group["lr"] = 1e-3 * subject.rate(first + since)
        subject.optimizer.step()
        losses.append(loss.item())
    return losses


def weights_of(subject):
    return {name: each.detach().clone() for name, each in subject.model.named_parameters()}


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def trained(request):
    subject = subject_of(request.param)
    train(subject, 2)
    return subject


def test_a_copy_of_a_training_goes_on_as_the_training_does(trained):
    one, other = copy.deepcopy(trained), copy.deepcopy(trained)
    assert train(one, 3) == train(other, 3)
    ends = weights_of(one), weights_of(other)
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    assert not all(torch.equal(ends[0][n], w) for n, w in weights_of(trained).items())


@pytest.mark.parametrize("name", [name for name, fault in FAULTS.items() if not fault.block])
def test_a_fault_changes_a_training_and_only_the_block_that_it_names(trained, name):
    subject, before = copy.deepcopy(trained), weights_of(trained)
    planted = FAULTS[name].plant(subject, random.Random(1))
    planted.each_step(0)
    planted.each_step(30)
    if planted.block is not None:
        prefix = f"{'transformer.h' if hasattr(subject.model, 'transformer') else 'model.layers'}."
        changed = {n for n, w in weights_of(subject).items() if not torch.equal(w, before[n])}
        assert {n.removeprefix(prefix).split(".")[0] for n in changed} <= {str(planted.block)}
    healthy = copy.deepcopy(trained)
    # Late steps: late gradients need more than eight steps, batches repeat from the fifth on.
    one, other = train(healthy, 12), train(subject, 12, planted.each_step)
    assert one != other or not all(
        torch.equal(w, weights_of(healthy)[n]) for n, w in weights_of(subject).items()
    )


def test_a_frozen_block_stays_and_an_expert_that_is_lost_gets_nothing(trained):
    subject = copy.deepcopy(trained)
    block = FAULTS["frozen_block"].plant(subject, random.Random(0)).block
    frozen = [each.detach().clone() for each in Parts(subject.model).blocks[block].parameters()]
    train(subject, 2)
    for one, other in zip(frozen, Parts(subject.model).blocks[block].parameters(), strict=True):
        assert torch.equal(one, other)
    experts = subject_of("mixtral")
    watched = Monitor(experts.model, directory=None, metrics=["expert_load"], schedule=1, sinks=())
    train(experts, 1)
    block = FAULTS["expert_lost"].plant(experts, random.Random(0)).block
    with watched(0):
        train(experts, 1)
    watched.close()
    loads = watched.latest.columns["expert_load"].by_layer()
    # A lost one of four experts counts as 0.01 of the mean load.
    assert [layer - 1 for layer, load in loads.items() if load < 0.4] == [block]


def test_spectra_are_those_of_plain_linear_algebra(trained):
    subject = copy.deepcopy(trained)
    parts = Parts(subject.model)
    entropy = UpdateEntropy(subject.model)
    assert entropy() == {}
    query, key = (w.clone() for w in (parts.query(0), parts.key(0)))
    train(subject, 1)
    width = parts.width // parts.heads
    head = slice(width, 2 * width)
    new = parts.query(0)[:, head], parts.key(0)[:, head]
    update = (new[0] - query[:, head]) @ new[1].T + new[0] @ (new[1] - key[:, head]).T
    share = np.linalg.svd(update.numpy(), compute_uv=False)
    share = share / share.sum()
    assert entropy()["update_entropy/1/1"] == pytest.approx(stats.entropy(share), rel=1e-3)
    values = np.linalg.svd(parts.value(1).numpy(), compute_uv=False)
    expected = (values**2).sum() / values[0] ** 2
    assert stable_ranks(subject.model)["stable_rank/2/value"] == pytest.approx(expected, rel=1e-4)
    windows = subject.draw(torch.Generator().manual_seed(0))[:, :-1]
    modes = near_unit_modes(subject.model, windows)
    assert len(modes) == len(parts.blocks)
    assert all(0 <= share <= 1 for share in modes.values())


def test_steps_of_faults_are_drawn_and_repeat():
    drawn = [fault_step(draw_settings("narrow", n), FAULTS["gain_zero"]) for n in range(50)]
    assert drawn == [fault_step(draw_settings("narrow", n), FAULTS["gain_zero"]) for n in range(50)]
    assert 600 <= min(drawn) < 630 < 750 < max(drawn) <= 780


VARIANCE = Place("variance", 2)


def scores(values, start=0):
    steps = np.arange(start, start + len(values))
    return Scores(steps, np.array(values, dtype=float), [VARIANCE] * len(values))


def test_alarms_that_follow_each_other_closely_are_one():
    found = scores([0, 2, 2, 0, 2] + [0] * 12 + [2, np.nan])
    assert alarms(found, 1.0) == [Alarm(1, VARIANCE), Alarm(17, VARIANCE)]
    assert alarms(found, 2.0) == []
    assert first_alarm(found, 1.0, 2, 4) == Alarm(2, VARIANCE)
    assert first_alarm(found, 1.0, 5, 17) is None


def test_a_limit_holds_the_rate_on_the_trainings_that_it_was_chosen_with():
    healthy = [scores(np.random.default_rng(n).standard_normal(2_000)) for n in range(10)]
    for rate in (1e-3, 1e-4):
        limit = choose_limit(healthy, rate)
        found = false_alarms(healthy, limit)
        assert found.count <= rate * found.trials == rate * 20_000
        # The next lower score as the limit would be one alarm too many.
        known = np.sort(np.concatenate([each.scores for each in healthy]))
        lower = known[np.searchsorted(known, limit) - 1]
        assert false_alarms(healthy, lower).count > rate * found.trials


def test_intervals_of_rates_are_exact():
    rate = Rate(3, 60_000)
    low, high = (60_000 * each for each in (rate.low, rate.high))
    assert stats.poisson.sf(2, low) == pytest.approx(0.025)
    assert stats.poisson.cdf(3, high) == pytest.approx(0.025)
    assert (Rate(0, 100).low, Rate(0, 100).high) == (0.0, pytest.approx(-np.log(0.025) / 100))


def test_the_area_is_that_of_the_rank_test():
    random_numbers = np.random.default_rng(0)
    one, other = random_numbers.integers(0, 9, 40), random_numbers.integers(3, 12, 30)
    expected = stats.mannwhitneyu(other, one).statistic / (40 * 30)
    assert area_under_curve(one.tolist(), other.tolist()) == pytest.approx(expected)


def track_of(number, fault="", shift=0.0, steps=360):
    """Numbers that wander little, of which one block's variance jumps at step 1,300."""
    chance, at = np.random.default_rng(number), np.arange(1_100, 1_100 + steps)
    names = ("loss", "gradient_norm", "kurtosis", "effective_rank")
    values = {Place(name): np.exp(0.02 * chance.standard_normal(steps)) for name in names}
    for layer in (1, 2, 3):
        for metric in ("variance", "within_variance", "mean_square_norm"):
            values[Place(metric, layer)] = np.exp(0.02 * chance.standard_normal(steps))
        for metric in ("max_logit", "attention_entropy_normalised", "qk_dot"):
            values[Place(metric, layer, "0")] = 0.5 + 0.01 * chance.standard_normal(steps)
    values[Place("variance", 2)][at >= 1_300] *= np.exp(shift)
    step = 1_300 if fault else None
    return Track(f"narrow_{number:03d}", fault, step, 1 if fault else None, at, values)


def scored(track, names):
    return Scored(track, dict(score_all(track, names)))


@pytest.fixture(scope="module")
def trainings():
    names = ["loss", "gradient_norm", "variance", "max_logit", "departure", "geometry"]
    healthy = [track_of(number) for number in (0, 1, 100, 101)]
    faulty = [track_of(number, "mlp_scaled", 1.0) for number in range(3)]
    return [scored(track, names) for track in (*healthy, *faulty)]


def test_a_jump_of_one_block_is_noticed_at_the_next_reading_and_named_and_the_loss_says_nothing(
    trainings,
):
    alert = evaluate(trainings, "geometry", 1e-4, limit=1.0)
    assert [(each.delay, each.located) for each in alert.outcomes] == [(1, True)] * 3
    assert alert.noticed(["mlp_scaled"]) == 1.0
    assert alert.area(["mlp_scaled"]) == 1.0
    assert alert.rate.count == 0
    loss = evaluate(trainings, "loss", 1e-3)
    assert loss.noticed(["mlp_scaled"]) < 1.0
    other = evaluate(trainings, "max_logit", 1e-3)
    assert other.noticed(["mlp_scaled"]) < 1.0


def test_what_is_known_at_every_fifth_step_is_compared_with_itself_five_steps_before():
    track, place = track_of(0), Place("stable_rank", 1, "query")
    values = np.full(len(track.steps), np.nan)
    known = np.flatnonzero(track.steps % 5 == 0)
    values[known] = 10 + 0.01 * np.random.default_rng(0).standard_normal(len(known))
    values[known[-3:]] += 5
    ((_, found),) = score_all(
        replace(track, values={**track.values, place: values}), ["stable_rank"]
    )
    assert list(np.flatnonzero(found.scores > 1)) == [known[-2]]
    assert np.isnan(found.scores[track.steps % 5 != 0]).all()


def test_limits_are_chosen_with_one_half_of_the_healthy_trainings_alone(trainings):
    first = evaluate(trainings, "variance", 1e-3)
    changed = copy.deepcopy(trainings)
    for training in changed:
        if not training.calibrates:
            training.scores["variance"].scores[:] = 0.0
    assert evaluate(changed, "variance", 1e-3).limit == first.limit


def test_the_page_says_what_was_noticed_and_how_often_that_is_false(trainings):
    alert = evaluate(trainings, "geometry", 1e-4, limit=1.0)
    compared = {"loss": alert, "gradient_norm": alert, "geometry": alert}
    every = dict.fromkeys(DETECTORS, alert)
    verified = Verified(60_000, 50, Counter(left_band=3), [("wide models", 20_000, 3)])
    text = write(
        compared, every, {"each step": compared}, dict.fromkeys(OF_MARGINS, alert), compared,
        verified,
    )  # fmt: skip
    assert "Each fault was put into 3 trainings. In 50 healthy trainings with 60,000 steps" in text
    assert "read 3 alerts came: 0.5 (95 % interval 0.1 to 1.5) in 10,000 steps." in text
    assert "| silent | output of one block's MLP × 6 | 100 % | 100 % | 100 % | 1 | 3 of 3 |" in text
    assert "| silent | 100 % | 100 % | 100 % | 1 | 3 of 3 | 0 | 0 |" in text
    assert "| silent | 100 % | 100 % | 100 % | 3 of 3 |" in text  # on another text
    assert "By chance an alert fell into 0 of " in text
    assert "| wide models | 20,000 | 3 | 1.5 (0.3 to 4.4) |" in text
    for detector in DETECTORS.values():
        assert f"| {detector.words} | - | 100 % | - |" in text
