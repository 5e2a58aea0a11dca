"""Time that looks cost a training bound by Python, as on a GPU that waits for its operators."""

import logging
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, NamedTuple

import torch
import typer
from torch import Tensor, nn

from benchmarks.small_models import Sizes, make
from benchmarks.timing import print_machine, print_table
from geomon import Monitor, every

# Sequences of a step, so short and few that it takes no arithmetic; and of a step that is looked
# at, which has as many rows as a reading keeps. A GPU computes either while Python goes on.
_FEW, _SHORT, _MANY = 2, 16, 64
# Quiet steps before a look, whose median is what a step takes.
_QUIET = 32
# Steps after the last one beside a measuring thread: the reading is recorded in the first.
_AFTER = 2
# Steps at which is looked: the first is late enough for bands, which a check compares with.
_APART = 1000
_WARMED = 2  # looks after which nothing is new, and the process runs
_EVERY = 100  # steps between looks, for the share that is lost
_READING = {"schedule": every(_APART), "checks": None, "budget": None}
_CHECK = {"schedule": every(10**9), "checks": every(_APART), "budget": None}
WAYS: dict[str, dict[str, Any]] = {
    "reading, waited for": {"background": False, **_READING},
    "reading in a thread": {"background": "thread", **_READING},
    "reading in a process": {"background": "process", **_READING},
    "check in a thread": {"background": "thread", **_CHECK},
    "check in a process": {"background": "process", **_CHECK},
}


@dataclass
class _Way:
    """One way to look: seconds of usual steps and of measuring, and what was lost, in steps."""

    monitor: Monitor
    is_beside: bool
    step: int = 1
    usual: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)
    others: list[float] = field(default_factory=list)


class _Training:
    """A decoder whose steps take no arithmetic, except for those that are looked at."""

    def __init__(self, layers: int, width: int, length: int) -> None:
        torch.manual_seed(0)
        self.model, self.many = make("GPT-2, sdpa", Sizes(layers, width, length), _MANY)
        self.few = {name: ids[:_FEW, :_SHORT] for name, ids in self.many.items()}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        logits: Tensor = self.model(**batch).logits
        ids = batch["input_ids"]
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    def step(self, way: _Way) -> "_Moment":
        """Make a step, and return its seconds."""
        began = _Moment.now()
        with way.monitor(way.step):
            loss = self.forward(self.few)
        way.step += 1
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return _Moment.now().since(began)


class _Moment(NamedTuple):
    """Seconds that this thread has run, and has slept, for instance to wait for Python's lock.

    Those in which it waited for a processor count as neither: on a machine with enough processors
    there are none. Only Linux knows them.
    """

    run: float
    slept: float

    @classmethod
    def now(cls) -> "_Moment":
        run, queued = time.thread_time(), 0.0
        with suppress(OSError):
            queued = int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
        return cls(run, time.perf_counter() - run - queued)

    def since(self, other: "_Moment") -> "_Moment":
        return _Moment(self.run - other.run, max(0.0, self.slept - other.slept))


def _is_measuring() -> bool:
    return any(thread.name == "geomon" for thread in threading.enumerate())


def _of_others() -> float:
    """Return the processor seconds of this process's other threads, which may hold the lock."""
    return time.process_time() - time.thread_time()


def _watch(training: _Training, way: _Way, batch: dict[str, Tensor]) -> float:
    """Look at a forward pass, and return how many seconds longer it takes."""
    began = _Moment.now()
    training.forward(batch)
    plain = _Moment.now().since(began).run
    way.step += _APART - way.step % _APART
    began = _Moment.now()
    with way.monitor(way.step):
        training.forward(batch)
    way.step += 1
    return sum(_Moment.now().since(began)) - plain


def _train(training: _Training, way: _Way, idle: float) -> tuple[float, float]:
    """Train until nothing is measured any more; return seconds lost, and seconds of other threads.

    Lost are geomon's own, and those in which the training sleeps beyond what it does in a quiet
    step, at most as long as other threads run: one of them must have held the lock.
    """
    left, charged, others = _AFTER, way.monitor.account.charged, _of_others()
    slept = 0.0
    while left:
        left = left if _is_measuring() else left - 1
        slept += training.step(way).slept - idle
    others = _of_others() - others
    return min(max(0.0, slept), others) + way.monitor.account.charged - charged, others


def _look(training: _Training, way: _Way) -> None:
    """Look twice: at a step as short as others, and at one with as many rows as are kept."""
    quiet = [training.step(way) for _ in range(_QUIET)]
    one = statistics.median(each.run for each in quiet)
    idle = statistics.fmean(each.slept for each in quiet)
    short = _watch(training, way, training.few)
    _train(training, way, idle)
    long = _watch(training, way, training.many)
    began = time.perf_counter()
    beside, others = _train(training, way, idle)
    way.seconds.append(time.perf_counter() - began)
    way.others.append(others / one)
    way.usual.append(one)
    way.waits.append((short if way.is_beside else long) / one)
    way.beside.append(beside / one)


def _rows(ways: dict[str, _Way]) -> Iterator[list[str]]:
    for name, way in ways.items():
        waits, beside = way.waits[_WARMED:], way.beside[_WARMED:]
        low, middle, high = statistics.quantiles(map(sum, zip(waits, beside, strict=True)))
        yield [
            name, f"{statistics.median(waits):.1f}", f"{statistics.median(beside):.1f}",
            f"{middle:.1f} ({low:.1f} to {high:.1f})", f"{middle / _EVERY:.1%}",
            f"{statistics.median(way.others[_WARMED:]):.1f}",
            f"{statistics.median(way.seconds[_WARMED:]):.1f}",
        ]  # fmt: skip


def python_bound(
    looks: Annotated[
        int, typer.Option(help="Looks of each kind; medians and quartiles count.")
    ] = 7,
    layers: Annotated[int, typer.Option(help="Number of blocks.")] = 12,
    width: Annotated[int, typer.Option(help="Width of the hidden states.")] = 64,
    length: Annotated[int, typer.Option(help="Length of a sequence.")] = 64,
    ways: Annotated[str, typer.Option(help="Words in the ways to look; all by default.")] = "",
) -> None:
    """Steps that a training of many small operators on one thread loses by a look.

    A step of 2 x 16 tokens takes no arithmetic, as on a GPU, where Python launches operators. It
    waits for a look at such a step; what goes on beside it is a look at 64 sequences, whose rows
    the GPU would have copied. Ways take turns, between steps without any.
    """
    torch.set_num_threads(1)
    logging.getLogger("geomon").setLevel(logging.ERROR)
    training = _Training(layers, width, length)
    with TemporaryDirectory() as folder, ExitStack() as stack:
        chosen = {
            name: _Way(
                stack.enter_context(
                    Monitor(training.model, directory=Path(folder) / name, **options)
                ),
                bool(options["background"]),
            )
            for name, options in WAYS.items()
            if any(word in name for word in ways.split(","))
        }
        for _ in range(_WARMED + looks):
            for way in chosen.values():
                _look(training, way)
        print_table(
            f"Steps of {1e3 * _usual(chosen):.0f} ms lost by a look, {layers} layers",
            (
                "look", "waits", "beside", "lost", f"of {_EVERY} steps", "other threads run",
                "measured after, s",
            ),
            _rows(chosen),
        )  # fmt: skip
    print_machine("time of the training", f"medians and quartiles of {looks}")


def _usual(ways: dict[str, _Way]) -> float:
    return statistics.median(one for way in ways.values() for one in way.usual)
