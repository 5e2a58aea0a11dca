"""Healthy trainings, and branches of them into which a fault is put; each leaves two records."""

import contextlib
import copy
import json
import logging
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from geomon import Metric, MetricText, Monitor, log_spaced, select
from geomon.analysis.bands import FIRST, WATCHED
from recipes.enwik8.text import Text
from recipes.faults.kinds import FAULTS, Fault
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
from recipes.study.training import begin_training, cosine_rate, finish_training

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
    """Select metrics without their margins: a curve that is read at every step has its own scatter.

    Args:
        names: Names of the metrics.
    """
    found = {}
    for name, metric in select(*names).items():
        assert isinstance(metric, Metric)
        found[name] = replace(metric, has_margin=False)
    return found


def fault_step(settings: Settings, fault: Fault) -> int:
    """Draw the step at which a fault comes.

    Args:
        settings: Settings of the healthy training.
        fault: The fault.
    """
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
    """Make a healthy training and its branches; what is complete in the folder is kept.

    Args:
        job: The training.
        given: The text that the recipe was given.
        folder: Folder of all trainings.
    """
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
        fault = FAULTS[name]
        branch = place / name
        if begin_training(branch, description | {"fault": name}):
            due.setdefault(fault_step(settings, fault), []).append(fault)
    last = job.steps if healthy else max(due, default=0)
    if not last:
        return
    torch.manual_seed(settings.number)
    subject = new_subject(settings, corpus)
    generator = torch.Generator().manual_seed(settings.number)

    def branch_off(step: int) -> None:
        for fault in due.get(step, ()):
            start, branch = time.process_time(), place / fault.name
            train_on(copied(subject), copied_state(generator), branch, step, fault, settings)
            finish_training(branch, description | {"fault": fault.name}, start)

    train(
        subject, generator, place / "healthy" if healthy else None, range(last + 1),
        settings=settings, before=branch_off, verifies=job.verifies,
        each_step=range(FIRST if job.verifies else FIRST_READ, last + 1),
    )  # fmt: skip
    if healthy:
        finish_training(place / "healthy", description, began)


def train_on(
    subject: Subject,
    generator: torch.Generator,
    folder: Path,
    step: int,
    fault: Fault,
    settings: Settings,
) -> None:
    """Put a fault into a training, and train on.

    Args:
        subject: The training, which is changed.
        generator: Source of the batches.
        folder: Folder of the records.
        step: First step of the fault.
        fault: The fault.
        settings: Settings of the training.
    """
    planted = fault.plant(subject, random.Random(f"{settings.name} {fault.name} where"))
    train(
        subject, generator, folder, range(step, step + fault.steps),
        settings=settings, each_step=range(step, step + fault.steps),
        before=lambda at: planted.each_step(at - step),
    )  # fmt: skip
    (folder / "fault.json").write_text(
        json.dumps({"fault": fault.name, "step": step, "block": planted.block}) + "\n"
    )


def copied_state(generator: torch.Generator) -> torch.Generator:
    """Make a generator that draws what another one will draw.

    Args:
        generator: The other one.
    """
    return torch.Generator().set_state(generator.get_state())


def new_subject(settings: Settings, corpus: Text) -> Subject:
    """Build a training; torch's generator has its seed.

    Args:
        settings: Settings of the training.
        corpus: Its text.
    """
    model = build_model(settings, corpus.vocabulary)
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=settings.learning_rate, betas=(0.9, 0.95),
    )  # fmt: skip
    draw = random_windows(corpus.train, SIZES[settings.size].context + 1, settings.batch)
    rate = cosine_rate(_WARM_UP, _WHOLE_RUN)
    return Subject(model, optimizer, draw, next_character_loss, rate)


def copied(subject: Subject) -> Subject:
    """Copy a training with its model and optimizer.

    Args:
        subject: The training.
    """
    model = copy.deepcopy(subject.model)
    optimizer = torch.optim.AdamW(model.parameters())
    groups, names = [], dict(zip(subject.model.parameters(), model.parameters(), strict=True))
    for group in subject.optimizer.param_groups:
        groups.append({**group, "params": [names[each] for each in group["params"]]})
    optimizer = torch.optim.AdamW(groups)
    optimizer.load_state_dict(copy.deepcopy(subject.optimizer.state_dict()))
    return replace(subject, model=model, optimizer=optimizer)


def train(
    subject: Subject,
    generator: torch.Generator,
    folder: Path | None,
    steps: range,
    *,
    settings: Settings,
    each_step: range,
    before: Callable[[int], None],
    verifies: bool = False,
) -> None:
    """Train, and record what is read in the training forward.

    Args:
        subject: The training.
        generator: Source of the batches.
        folder: Folder of the records; None for none.
        steps: Steps: numbers of the updates that are in the weights.
        settings: Settings of the training.
        each_step: Steps of which each is read; of the others those of the default schedule are.
        verifies: Whether alerts are raised as in any run, and nothing else is recorded.
        before: Function that is called before each forward pass with its step.
    """
    model, entropy = subject.model, UpdateEntropy(subject.model)
    default = log_spaced()
    monitors = [] if folder is None else monitors_of(model, folder, settings, verifies=verifies)
    for step in steps:
        before(step)
        windows = subject.draw(generator)
        reads = step in each_step or default(step)
        with contextlib.ExitStack() as stack:
            for monitor in monitors if reads else ():
                stack.enter_context(monitor(step))
            loss = subject.loss(model, windows)
        subject.optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if monitors and reads:
            values = {"loss": float(loss.detach()), "gradient_norm": float(norm)}
            values |= {} if verifies else entropy()
            if step % _WEIGHTS_INTERVAL == 0 and not verifies:
                values |= stable_ranks(model) | near_unit_modes(model, windows[:, :-1])
            for monitor in monitors:
                monitor.log(step, **values)
        for group in subject.optimizer.param_groups:
            group["lr"] = settings.learning_rate * subject.rate(step)
        subject.optimizer.step()
    for monitor in monitors:
        monitor.close()


def monitors_of(
    model: nn.Module, folder: Path, settings: Settings, *, verifies: bool = False
) -> list[Monitor]:
    """Attach the monitors of a training.

    Args:
        model: The model.
        folder: Folder of the records.
        settings: Settings of the training.
        verifies: Whether alerts are raised as in any run, and nothing else is recorded.
    """
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
