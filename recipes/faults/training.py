"""Healthy trainings, and branches of them into which a fault is put; each leaves two records."""

import contextlib
import copy
import json
import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from geomon import Metric, MetricText, Monitor, log_spaced, select
from geomon.analysis.bands import FIRST, WATCHED
from recipes.enwik8.text import Text
from recipes.enwik8.train import adamw, cosine_rate
from recipes.faults.kinds import FAULTS, Fault, Planted
from recipes.faults.spectra import UpdateEntropy, near_unit_modes, stable_ranks
from recipes.faults.subject import (
    SIZES,
    Settings,
    Subject,
    build_model,
    load_text,
    next_character_loss,
)
from recipes.study.text import random_windows
from recipes.study.training import begin_training, finish_training, update

# Names of the records of a training: one of a few cheap metrics at every step, and one of metrics
# with their margins at the steps of the default schedule and every so many steps.
EACH_STEP, FULL = "each_step", "full"
FULL_INTERVAL = 20
# What is computed from weights every so many steps.
_WEIGHTS_INTERVAL = 5

# From this step on every step is read: the model has learned something. The others are read by the
# default schedule.
FIRST_READ = 500
_WARM_UP, _WHOLE_RUN = 50, 4_000
# Steps at which a fault may come.
EARLIEST, LATEST = 600, 780

_CHEAP = (
    "anisotropy", "effective_rank", "variance", "mean_square_norm", "within_variance", "qk_cosine",
    "qk_dot", "attention_entropy_normalised", "attention_sink", "max_logit", "weight_norm",
    "expert_load",
)  # fmt: skip
# All that alerts look at.
_OF_ALERTS = (*WATCHED, "effective_rank", "massive_share")
# What is compared by its margins.
_BY_MARGINS = ("twonn", "twonn_distinct", "anisotropy")


def kurtosis(hidden: Tensor) -> Tensor:
    """Mean fourth power of the numbers of a layer over their mean square, squared.

    Args:
        hidden: Rows, [tokens, width].
    """
    square = hidden.square()
    return square.square().mean() / square.mean().square()


def without_margins(*names: str) -> dict[str, Metric]:
    """Select metrics without their margins: a curve read at every step has its own scatter."""
    found = {}
    for name, metric in select(*names).items():
        assert isinstance(metric, Metric)
        found[name] = replace(metric, has_margin=False)
    return found


def fault_step(settings: Settings, fault: Fault) -> int:
    """Draw the step at which a fault comes."""
    return random.Random(f"{settings.name} {fault.name}").randint(EARLIEST, LATEST)


@dataclass(frozen=True)
class Job:
    """A healthy training with the faults that branch off.

    Attributes:
        settings: Settings of the training.
        steps: Number of updates.
        faults: Names of the faults.
        verifies: Whether alerts are raised as in any run, and nothing else is recorded.
    """

    settings: Settings
    steps: int
    faults: tuple[str, ...] = ()
    verifies: bool = False


def run_job(job: Job, given: Text, folder: Path) -> None:
    """Make a healthy training and its branches; what is complete in the folder is kept."""
    logging.getLogger("geomon").setLevel(logging.ERROR)  # what notes say of faults is no news
    settings, place = job.settings, folder / job.settings.name
    corpus = load_text(settings.text, given)
    description = asdict(settings) | {"steps": job.steps, "sha256": corpus.sha256()}
    if job.verifies:
        description["verifies"] = True
    began = time.process_time()
    healthy = begin_training(place / "healthy", description)
    due: dict[int, list[Fault]] = {}
    for name in job.faults:
        if begin_training(place / name, description | {"fault": name}):
            due.setdefault(fault_step(settings, FAULTS[name]), []).append(FAULTS[name])
    last = job.steps if healthy else max(due, default=0)
    if not last:
        return
    subject, generator = new_subject(settings, corpus)

    def branch(fault: Fault, step: int) -> None:
        start, own, copied = time.process_time(), place / fault.name, copy.deepcopy(subject)
        planted = plant(fault, copied, settings)
        train(
            copied, generator.clone_state(), range(step, step + fault.steps),
            monitors_of(copied.model, own, settings), measures=True,
            before=lambda at: planted.each_step(at - step),
        )  # fmt: skip
        (own / "fault.json").write_text(
            json.dumps({"fault": fault.name, "step": step, "block": planted.block}) + "\n"
        )
        finish_training(own, description | {"fault": fault.name}, start)

    def branch_off(step: int) -> None:
        for fault in due.get(step, ()):
            branch(fault, step)

    default, each = log_spaced(), FIRST if job.verifies else FIRST_READ
    train(
        subject, generator, range(last + 1),
        monitors_of(subject.model, place / "healthy", settings, verifies=job.verifies)
        if healthy else [],
        before=branch_off, reads=lambda step: step >= each or default(step), logs=True,
        measures=not job.verifies,
    )  # fmt: skip
    if healthy:
        finish_training(place / "healthy", description, began)


def plant(fault: Fault, subject: Subject, settings: Settings) -> Planted:
    """Put a fault into a training, at a place that its settings draw."""
    return fault.plant(subject, random.Random(f"{settings.name} {fault.name} where"))


def new_subject(settings: Settings, corpus: Text) -> tuple[Subject, torch.Generator]:
    """Build a training from its seed, and the source of its batches."""
    torch.manual_seed(settings.number)
    model = build_model(settings, corpus.vocabulary)
    subject = Subject(
        model, adamw(model, settings.learning_rate),
        random_windows(corpus.train, SIZES[settings.size].context + 1, settings.batch),
        next_character_loss, settings.learning_rate, cosine_rate(_WARM_UP, _WHOLE_RUN),
    )  # fmt: skip
    return subject, torch.Generator().manual_seed(settings.number)


def train(
    subject: Subject,
    generator: torch.Generator,
    steps: range,
    monitors: Sequence[Monitor],
    *,
    before: Callable[[int], None],
    reads: Callable[[int], bool] = lambda step: True,
    logs: bool = True,
    measures: bool = False,
) -> None:
    """Train, and record what monitors read in the training forward."""
    model, entropy = subject.model, UpdateEntropy(subject.model)
    for step in steps:
        before(step)
        windows = subject.draw(generator)
        watched = monitors if reads(step) else ()
        with contextlib.ExitStack() as stack:
            for monitor in watched:
                stack.enter_context(monitor(step))
            loss = subject.loss(model, windows)
        values = entropy() if watched and measures else {}
        if step % _WEIGHTS_INTERVAL == 0 and watched and measures:
            values |= stable_ranks(model) | near_unit_modes(model, windows[:, :-1])
        norm = update(model, subject.optimizer, loss, subject.learning_rate * subject.rate(step))
        if logs:
            for monitor in watched:
                monitor.log(step, loss=float(loss.detach()), gradient_norm=float(norm), **values)
    for monitor in monitors:
        monitor.close()


def monitors_of(
    model: nn.Module, folder: Path, settings: Settings, *, verifies: bool = False
) -> list[Monitor]:
    """Attach the monitors of a training."""
    logged = ("loss", "gradient_norm")
    if verifies:
        return [
            Monitor(
                model, metrics=without_margins(*_OF_ALERTS), schedule=1, log=logged, arrays=False,
                directory=folder / EACH_STEP, seed=settings.number,
            )
        ]  # fmt: skip
    text = MetricText("Kurtosis", meaning="Of the numbers of a layer.")
    of_each_step = without_margins(*_CHEAP) | {"kurtosis": Metric(kurtosis, text, has_margin=False)}
    default = log_spaced()
    return [
        Monitor(
            model, metrics=of_each_step, schedule=1, directory=folder / EACH_STEP, arrays=False,
            alerts=(), seed=settings.number, log=logged,
        ),
        Monitor(
            model, metrics=select(*_BY_MARGINS),
            schedule=lambda step: default(step) or step % FULL_INTERVAL == 0,
            directory=folder / FULL, arrays=False, alerts=(), seed=settings.number, log=logged,
        ),
    ]  # fmt: skip
