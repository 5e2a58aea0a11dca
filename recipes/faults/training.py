"""Runs of small decoders, healthy or with a fault, each watched as users do and at every step."""

import contextlib
import logging
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from geomon import Monitor
from geomon.analysis import WATCHED
from geomon.distributed import RankGroup
from geomon.monitor import DEFAULT_SHARE, Account, Due, Planner
from recipes.enwik8.optimizer import adamw, cosine_rate
from recipes.enwik8.text import Text, carried_text, characters
from recipes.faults.kinds import FAULTS, EachStep, Subject, nothing
from recipes.study.model import Architecture, Transformer
from recipes.study.text import random_windows
from recipes.study.training import begin_training, finish_training, update, without_margins

# Steps of a run as its monitors are told, those at which a fault may come, and those that are made
# after it.
STEPS, EARLIEST, LATEST, AFTER = 1_500, 600, 780, 200
# From this step on every step is read by the first monitor: the model has learned something.
FIRST_READ = 500
# The record of every step, and those of monitors with all defaults, by the batches of a training.
EACH_STEP = "every step"
# All that alerts look at, without margins: a curve that is read at every step has its own scatter.
_OF_ALERTS = (*WATCHED, "effective_rank", "massive_share", "anisotropy", "qk_cosine")
_HEADS = 4


class Costs(NamedTuple):
    """Costs of geomon in training steps (docs/cost.md: 6 layers of width 128, one thread).

    Attributes:
        reading: Cost of a reading of all default metrics.
        check: Cost of a check.
    """

    reading: float
    check: float


BATCHES = {"32 x 128 tokens": Costs(1.0, 0.13), "8 x 64 tokens": Costs(3.4, 0.6)}


@dataclass(frozen=True)
class Job:
    """A run: what makes it is drawn by its number.

    Attributes:
        number: Number of the run; runs of one number differ in their fault alone.
        fault: Name of the fault; "" for a healthy run.
        width: Width of the hidden states.
    """

    number: int
    fault: str = ""
    width: int = 64

    @property
    def folder(self) -> Path:
        """Folder of the run inside the folder of all runs."""
        return Path(f"width_{self.width}_{self.number:03d}") / (self.fault or "healthy")

    @property
    def block(self) -> str:
        """Kind of the blocks."""
        needed = FAULTS[self.fault].block if self.fault else ""
        return needed or ("gpt2", "llama")[self.number % 2]

    def chance(self, of: str = "") -> random.Random:
        """Make the source of chance of the run, or of its fault."""
        return random.Random(f"{self.width} {self.number} {of}")

    @property
    def layers(self) -> int:
        """Number of blocks."""
        return self.chance("layers").choice((3, 4))

    @property
    def fault_step(self) -> int:
        """Step before which the fault comes, if one does: all steps before are healthy."""
        return self.chance(self.fault).randint(EARLIEST, LATEST)

    @property
    def fault_block(self) -> int:
        """Block that has the fault, if it is in one."""
        return self.chance(f"{self.fault} where").randrange(self.layers)


def build_model(job: Job, vocabulary: int, context: int) -> nn.Module:
    """Build the model of a run; torch's generator has its seed."""
    if job.block == "gpt2":
        architecture = Architecture(job.layers, job.width, _HEADS, context)
        return Transformer(nn.Embedding(vocabulary, job.width), architecture)
    is_mixed = job.block == "mixtral"
    configuration = AutoConfig.for_model(
        job.block, vocab_size=vocabulary, max_position_embeddings=context, hidden_size=job.width,
        intermediate_size=job.width if is_mixed else 8 * job.width // 3,
        num_hidden_layers=job.layers, num_attention_heads=_HEADS, num_key_value_heads=_HEADS,
        bos_token_id=None, eos_token_id=None, use_cache=False,
        **({"num_local_experts": 4} if is_mixed else {}),
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(configuration)


def new_subject(job: Job, given: Text) -> Subject:
    """Build a training from its seed: model, batch, learning rate and text are drawn."""
    chance, context = job.chance(), 48
    text = given
    if job.number % 3 == 2:
        text = characters(carried_text(), "Python's reference and docstrings")
    batch, highest = chance.choice((8, 12, 16)), 1e-3 * 3 ** chance.random()
    torch.manual_seed(job.number)
    model = build_model(job, text.vocabulary, context)
    share = cosine_rate(50, 4_000)
    return Subject(
        model, job.block, adamw(model, highest), random_windows(text.train, context + 1, batch),
        lambda step: highest * share(step), text.vocabulary,
    )  # fmt: skip


def plan(costs: Costs, steps: int) -> tuple[set[int], set[int]]:
    """Plan a run as a monitor does by default, at costs that were measured on usual batches.

    The models here are so small that a step takes little more than the calls of Python in it.

    Returns:
        Steps that are read, and steps that are checked.
    """
    now = 0.0
    account = Account(clock=lambda: now)
    planner = Planner(None, DEFAULT_SHARE, "auto", RankGroup(), account, source="inline")
    read_at, checked_at = set(), set()
    planner.purse.end = steps - 1
    account.begin()
    planner.begin(0, 0)
    for step in range(steps):
        planner.advance(step)
        due = planner.due(force=step == steps - 1)
        with account.charge():
            if due is Due.READING:
                planner.mark_read("inline")
                read_at.add(step)
                now += costs.reading
            elif due is Due.CHECK:
                planner.checks.mark(costs.check)
                checked_at.add(step)
                now += costs.check
        now += 1.0
    return read_at, checked_at


def monitors_of(model: nn.Module, folder: Path) -> list[Monitor]:
    """Attach a monitor that reads every step, and one with all defaults for each plan."""
    found = [
        Monitor(
            model, metrics=without_margins(*_OF_ALERTS), checks=None, arrays=False, seed=0,
            schedule=lambda step: step >= FIRST_READ, log=("loss", "gradient_norm"),
            directory=folder / EACH_STEP,
        )
    ]  # fmt: skip
    for batches, costs in BATCHES.items():
        read_at, checked_at = plan(costs, STEPS)
        found.append(
            Monitor(
                model, directory=folder / batches, schedule=read_at.__contains__,
                checks=checked_at.__contains__, arrays=False,
            )
        )  # fmt: skip
    return found


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence geomon's warnings, because what they say of faults is no news here."""
    log = logging.getLogger("geomon")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def make_step(
    subject: Subject, monitors: Sequence[Monitor], step: int, generator: torch.Generator
) -> tuple[float, float]:
    """Make a step of a training; return its loss and its gradient norm."""
    batch = subject.draw(generator)
    with contextlib.ExitStack() as stack:
        for monitor in monitors:
            stack.enter_context(monitor(step))
        loss = subject.loss(batch)
    norm = update(subject.model, subject.optimizer, loss, subject.rate(step))
    return float(loss.detach()), float(norm)


def train(
    job: Job, subject: Subject, monitors: Sequence[Monitor]
) -> Iterator[tuple[int, float, float]]:
    """Make the steps of a run, with its fault; yield the loss and the gradient norm of each."""
    generator = torch.Generator().manual_seed(job.number)
    each_step: EachStep = nothing
    for step in range(job.fault_step + AFTER):
        if job.fault and step == job.fault_step:
            chance = job.chance(f"{job.fault} how")
            each_step = FAULTS[job.fault].plant(subject, job.fault_block, chance)
        each_step(step - job.fault_step)
        yield step, *make_step(subject, monitors, step, generator)


@quiet()
def run(job: Job, given: Text, folder: Path) -> None:
    """Make a run; nothing is done if the folder holds the complete one."""
    place = folder / job.folder
    description = asdict(job) | {"sha256": given.sha256()}
    if not begin_training(place, description):
        return
    subject = new_subject(job, given)
    monitors = monitors_of(subject.model, place)
    for step, loss, norm in train(job, subject, monitors):
        monitors[0].log(step, loss=loss, gradient_norm=norm)
    for monitor in monitors:
        monitor.close()
    finish_training(place, description)
