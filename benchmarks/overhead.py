"""Costs of one watched forward pass beyond a plain one: Python, and memory."""

import ctypes
import gc
import logging
import multiprocessing
import statistics
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, NamedTuple

import torch
import typer
from torch import nn

from benchmarks.small_models import MODELS, Sizes, make
from benchmarks.timing import print_machine, print_table
from benchmarks.windows import new_plans, watch
from geomon import METRICS, Monitor, every
from geomon.capture.anatomy.blocks import find_anatomy
from geomon.metrics import Evaluator

TINY = (64, 16)  # width and length: what is timed is Python
SEQUENCES = 2
WARMED = 4  # readings and checks after which nothing is new
NEVER = every(10**9)  # but for step 0
WAYS: dict[str, dict[str, Any]] = {
    "reading": {"schedule": every(1), "checks": None},
    "check": {"schedule": NEVER, "checks": 1},
}


class _Costs(NamedTuple):
    """Milliseconds of a thread: a plain pass, and what the first and later ones take besides."""

    plain: float
    first: dict[str, float]
    later: dict[str, float]


def _timed(action: Callable[[], object]) -> float:
    began = time.thread_time()
    action()
    return 1e3 * (time.thread_time() - began)


def _wait() -> None:
    """Wait for the threads that measure, so that the next pass runs alone."""
    for thread in threading.enumerate():
        if thread.name == "geomon":
            thread.join()


def _costs(name: str, layers: int, runs: int, begin: int, folder: str) -> _Costs:
    """Time plain and watched passes in turn, so that what drifts meets all alike."""
    sizes = Sizes(layers, *TINY)
    model, batch = make(name, sizes, SEQUENCES)
    model(**batch)  # compiles
    monitors = {
        way: Monitor(model, directory=Path(folder) / way, background=True, budget=None, **options)
        for way, options in WAYS.items()
    }
    taken: dict[str, list[float]] = {way: [] for way in ("plain", *WAYS)}

    def watched(way: str, step: int) -> None:
        with monitors[way](step):
            model(**batch)

    for run in range(WARMED + runs):
        taken["plain"].append(_timed(lambda: model(**batch)))
        for way in WAYS:
            _wait()
            gc.collect()
            taken[way].append(_timed(partial(watched, way, begin + run)))
    for monitor in monitors.values():
        monitor.close()
    plain = statistics.median(taken["plain"][WARMED:])
    first = {way: taken[way][0] - plain for way in WAYS}
    later = {way: statistics.median(taken[way][WARMED:]) - plain for way in WAYS}
    return _Costs(plain, first, later)


def _row(name: str, layers: int, runs: int, begin: int) -> list[str]:
    with TemporaryDirectory() as folder:
        costs = _costs(name, layers, runs, begin, folder)
    each = (costs.plain, *costs.later.values(), *costs.first.values())
    return [f"{name}, {layers}", *(f"{ms / layers:.2f}" for ms in each)]


def overhead(
    runs: Annotated[int, typer.Option(help="Passes of each kind; the median counts.")] = 12,
    layers: Annotated[str, typer.Option(help="Numbers of layers.")] = "12,24",
    models: Annotated[str, typer.Option(help="Words in the models' names; all by default.")] = "",
    begin: Annotated[int, typer.Option(help="First step: from 200 on there are bands.")] = 1,
) -> None:
    """Milliseconds of Python a layer that a reading and a check take beyond the plain pass.

    The model is so small that arithmetic takes no time (2 x 16 tokens, width 64). Only the
    training's thread counts: values are computed in another.
    """
    torch.set_num_threads(1)
    logging.getLogger("geomon").setLevel(logging.ERROR)
    chosen = [name for name in MODELS if any(word in name for word in models.split(","))]
    _warm_up()
    columns = ("plain", "+ reading", "+ check", "+ first reading", "+ first check")
    print_table(
        "Milliseconds a layer of a forward pass, and what is added to it",
        ("model, layers", *columns),
        (_row(name, int(n), runs, begin) for name in chosen for n in layers.split(",")),
    )
    print_machine("thread time of the training", f"medians of {runs}, from step {begin} on")


def _warm_up() -> None:
    """Load and cache what the first reading of a process does, whatever the model."""
    with TemporaryDirectory() as folder:
        _costs("nanoGPT, by hand", 1, 1, 1, folder)


# -- memory ----------------------------------------------------------------------------------------

# Option of glibc's mallopt, and bytes: larger tensors are given back as soon as they are freed, so
# that the peak is that of what lives.
_MMAP_THRESHOLD, _LARGE = -3, 65536
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
PASSES = ("plain", "first", "later")


def _resident(what: str) -> float:
    """Read megabytes of this process: VmRSS, or VmHWM, the peak since it was cleared."""
    lines = _STATUS.read_text().splitlines()
    return next(int(x.split()[1]) for x in lines if x.startswith(f"{what}:")) / 1e3


def _peak_of(name: str, sizes: Sizes, sequences: int, kind: str, *, gradients: bool) -> float:
    """Megabytes above the model at the peak of one forward pass in this process."""
    torch.set_num_threads(1)
    with suppress(AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _LARGE)
    views = Evaluator(METRICS, 1).views

    def forward(
        model: nn.Module, batch: dict[str, Any], anatomy: Any, plans: Any, *, watched: bool
    ) -> object:
        around = watch(anatomy, views, rows=4096, plans=plans) if watched else nullcontext()
        with torch.set_grad_enabled(gradients), around as window:
            output = model(**batch)
        return output, None if window is None else window.snapshot()

    # Modules that the first watched pass of a process loads do not count as its memory.
    other, batch = make(name, Sizes(2, 64, 16), 2)
    forward(other, batch, find_anatomy(other), new_plans(), watched=True)
    model, batch = make(name, sizes, sequences)
    anatomy, plans = find_anatomy(model), new_plans()
    # A small batch first, so that only the pass that is measured is large.
    small = {key: ids[:2, :16] for key, ids in batch.items()}
    forward(model, small, anatomy, plans, watched=kind == "later")
    gc.collect()
    _CLEAR.write_text("5")  # the peak is counted from here on
    before = _resident("VmRSS")
    kept = forward(model, batch, anatomy, plans, watched=kind != "plain")
    peak = _resident("VmHWM") - before
    del kept
    return peak


def _in_child(function: Callable[..., float], *args: Any, **kwargs: Any) -> float:
    """Call a function in a fork of this process, whose memory nothing has touched."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=lambda: theirs.send(function(*args, **kwargs)))
    child.start()
    theirs.close()
    try:
        return float(ours.recv())
    except EOFError:
        raise RuntimeError("the process that was to be measured failed") from None
    finally:
        child.join()


def peak(
    tokens: Annotated[int, typer.Option(help="Tokens of the batch.")] = 4096,
    layers: Annotated[int, typer.Option(help="Number of blocks.")] = 6,
    width: Annotated[int, typer.Option(help="Width of the hidden states.")] = 512,
    models: Annotated[str, typer.Option(help="Names of models.")] = "Llama, sdpa;Llama, eager",
) -> None:
    """Peak memory of a forward pass: plain, watched for the first time, and watched again.

    Each is the largest resident set of a process of its own, above what it held before the pass.
    Linux only.
    """
    if not _CLEAR.exists():
        raise typer.BadParameter("the peak of a process can be cleared on Linux only")
    length = min(512, tokens)
    sizes = Sizes(layers, width, length)

    def row(name: str, *, gradients: bool) -> list[str]:
        peaks = [
            _in_child(_peak_of, name, sizes, tokens // length, kind, gradients=gradients)
            for kind in PASSES
        ]
        return [f"{name}, {'' if gradients else 'no '}gradients", *(f"{mb:.0f}" for mb in peaks)]

    print_table(
        f"Peak of a forward pass of {layers} layers of width {width} over {tokens:,} tokens, MB "
        "above the model",
        ("", "plain", "watched first", "watched later"),
        (row(name, gradients=kept) for kept in (False, True) for name in models.split(";")),
    )
    print_machine("one thread", "4,096 rows, the views of default metrics")
