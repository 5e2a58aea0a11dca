"""Measures the cost of geomon in a training on an accelerator, in at most eight minutes.

Tables stay valid if a later one is interrupted. Without an accelerator the sizes are tiny, as a
test.
"""

import itertools
import math
import statistics
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import torch
import transformers
import typer
from torch import Tensor, nn
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.timing import print_table
from geomon import Memory, Monitor

# Untimed first steps, for compilation and for the memory that torch keeps.
_WARM_UP = 10
# The training reads its loss at this interval, and the host waits for it.
_LOGGED = 10
# Repetitions of each forced reading; the median is printed.
_FORCED = 2
# Share of tokens that repeat the one seven places earlier.
_REPEATED = 0.3
# Values below this are compared by their absolute difference.
_SMALL = 1e-3


@dataclass(frozen=True)
class Size:
    """Sizes of a decoder and its batch.

    Attributes:
        layers: Number of blocks.
        width: Width of the hidden states. Heads have width 64, or 16 at widths below 128.
        sequences: Number of sequences in a batch.
        length: Number of tokens of a sequence.
        symbols: Number of distinct tokens.
        steps: Length of a run.
    """

    layers: int
    width: int
    sequences: int
    length: int
    symbols: int
    steps: int

    def __str__(self) -> str:
        return f"{self.layers} x {self.width:,}, {self.sequences} x {self.length:,} tokens"


Name = Literal["small", "large"]
SIZES: dict[Name, Size] = {
    "small": Size(12, 768, 16, 1024, 32_000, 1000),
    "large": Size(24, 1024, 16, 1024, 32_000, 500),
}
TINY = Size(2, 32, 8, 32, 100, 20)


class Training:
    """A decoder in training: bfloat16 by autocast, fused AdamW, tokens with falling frequencies.

    Args:
        size: Sizes of the decoder and its batch.
        device: Device of the training.
    """

    def __init__(self, size: Size, device: torch.device) -> None:
        torch.manual_seed(0)
        heads = max(1, size.width // (64 if size.width >= 128 else 16))
        configuration = LlamaConfig(
            vocab_size=size.symbols, hidden_size=size.width, intermediate_size=size.width * 8 // 3,
            num_hidden_layers=size.layers, num_attention_heads=heads, num_key_value_heads=heads,
            max_position_embeddings=size.length, use_cache=False, bos_token_id=None,
            eos_token_id=None,
        )  # fmt: skip
        self.size, self.device = size, device
        with device:
            self.model = AutoModelForCausalLM.from_config(configuration)
        backend = "inductor" if device.type == "cuda" else "aot_eager"
        for block in self.model.model.layers:  # as large trainings do
            block.compile(backend=backend)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        frequencies = 1 / torch.arange(1, size.symbols + 1, dtype=torch.float32)
        self._frequencies = frequencies.to(device)
        self._number = 0

    def batch(self) -> Tensor:
        """Draw tokens that, as in text, are likely to repeat soon."""
        rows, length = self.size.sequences, self.size.length
        drawn = torch.multinomial(self._frequencies, rows * length, replacement=True)
        ids = drawn.view(rows, length)
        again = torch.rand(rows, length, device=self.device) < _REPEATED
        return torch.where(again, ids.roll(7, dims=1), ids)

    def step(self, around: AbstractContextManager[None]) -> Tensor:
        """Make one update, and return its loss.

        Args:
            around: Context manager around the forward pass.
        """
        ids = self.batch()
        with torch.autocast(self.device.type, torch.bfloat16):
            with around:
                logits = self.model(input_ids=ids).logits
            loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


class Run(NamedTuple):
    """Results of a run.

    Attributes:
        milliseconds: Time of each step on the device, from the end of the previous one, ascending.
        quiet: Median of the steps during which no thread measured, in ms.
        peak: Largest memory of the device in GB (10^9 bytes); NaN on the host.
        graphs: Number of graphs that were compiled meanwhile.
    """

    milliseconds: list[float]
    quiet: float
    peak: float
    graphs: int

    @property
    def median(self) -> float:
        """Median time of a step in ms."""
        return statistics.median(self.milliseconds)

    @property
    def mean(self) -> float:
        """Mean time of a step in ms."""
        return statistics.fmean(self.milliseconds)


def run(training: Training, steps: int, monitor: Monitor | None = None) -> Run:
    """Train for some steps.

    Args:
        training: The training, which continues.
        steps: Number of steps.
        monitor: Monitor of the training, or None to train without geomon.
    """
    on_device = training.device.type == "cuda"
    graphs = counters["stats"]["unique_graphs"]
    synchronize(training.device)
    if on_device:
        torch.cuda.reset_peak_memory_stats()
    marks: list[Any] = [_mark(on_device)]
    busy = [False]
    for step in range(steps):
        loss = training.step(nullcontext() if monitor is None else monitor(step))
        marks.append(_mark(on_device))
        busy.append(any(thread.name == "geomon" for thread in threading.enumerate()))
        if step % _LOGGED == 0:
            loss.item()
    synchronize(training.device)
    times = [_between(one, other) for one, other in itertools.pairwise(marks)]
    beside = [before or after for before, after in itertools.pairwise(busy)]
    quiet = [time for time, one in zip(times, beside, strict=True) if not one]
    return Run(
        sorted(times),
        statistics.median(quiet or times),
        torch.cuda.max_memory_allocated() / 1e9 if on_device else float("nan"),
        counters["stats"]["unique_graphs"] - graphs,
    )


def _mark(on_device: bool) -> Any:
    if not on_device:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(one: Any, other: Any) -> float:
    """Return the milliseconds between two marks."""
    return 1e3 * (other - one) if isinstance(one, float) else float(one.elapsed_time(other))


def synchronize(device: torch.device) -> None:
    """Wait for the training's queued work on a device, not for what a thread measures.

    Args:
        device: The device; the host has no queue.
    """
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


# -- tables ----------------------------------------------------------------------------------------


def runs(training: Training, steps: int) -> Iterator[list[object]]:
    """Yield a row for each way to watch a run, alternating with runs without geomon.

    Args:
        training: The training, which continues from row to row.
        steps: Length of each run.
    """
    few = max(_WARM_UP, steps // 10)
    run(training, _WARM_UP)

    def row(name: str, found: Run, *watched: object) -> list[object]:
        return [
            name, len(found.milliseconds), f"{found.median:.1f}",
            f"{found.milliseconds[len(found.milliseconds) * 99 // 100]:.1f}",
            *(watched or ("", "", "")), f"{found.peak:.2f}", found.graphs,
        ]  # fmt: skip

    yield row("without geomon", run(training, few))
    probe = training.batch()[:8, : training.size.length // 2]
    ways: dict[str, tuple[int, dict[str, Any]]] = {
        "defaults": (steps, {}),
        'device="auto"': (steps, {"device": "auto"}),
        "a probe": (steps // 4, {"probe": probe}),
    }
    for name, (length, options) in ways.items():
        with _watching(training, steps=length, **options) as (monitor, memory):
            found = run(training, length, monitor)
            counted = monitor.overhead
        # The machine's speed drifts by more than geomon takes, from one run to the next.
        lost = found.mean / found.quiet - 1
        read = len(memory.readings)
        yield row(name, found, f"{100 * lost:+.1f}", f"{100 * counted:.1f}", read)
        yield row("without geomon", run(training, few))


@contextmanager
def _watching(
    training: Training, steps: int | None = None, **options: Any
) -> Iterator[tuple[Monitor, Memory]]:
    memory = Memory()
    with (
        tempfile.TemporaryDirectory() as folder,
        Monitor(training.model, sinks=[memory], directory=folder, **options) as monitor,
    ):
        monitor.expect_end(None if steps is None else steps - 1)
        yield monitor, memory


# Options of the monitor for each way to read a step.
_LOOKS: dict[str, dict[str, Any]] = {
    "check": {"schedule": 10**9, "checks": 1},
    'reading, device="auto", in the background': {"background": True, "device": "auto"},
    "reading, on the host, in the background": {"background": True},
    'reading, device="auto"': {"background": False, "device": "auto"},
    "reading, on the host": {"background": False},
}


def costs(training: Training, usual: float) -> Iterator[list[object]]:
    """Yield a row for each way to read a step, with everything that the training waits for.

    Args:
        training: The training.
        usual: Time of a step without geomon in ms.
    """
    for name, options in _LOOKS.items():
        with _watching(training, **{"schedule": 1, "checks": None} | options) as (monitor, memory):
            first = 200 if options.get("checks") else 0  # a check needs bands
            delays, whole = list[float](), list[float]()
            for step in range(first, first + _FORCED + 1):  # the first one warms up
                synchronize(training.device)
                began = time.perf_counter()
                training.step(monitor(step))
                synchronize(training.device)
                delays.append(1e3 * (time.perf_counter() - began) - usual)
                for thread in threading.enumerate():
                    if thread.name == "geomon":
                        thread.join()
                whole.append(1e3 * (time.perf_counter() - began) - usual)
            words = {word for reading in memory.readings for word in reading.words()}
        times = [statistics.median(each[1:]) for each in (delays, whole)]
        yield [
            name, *(text for each in times for text in (f"{each:.1f}", f"{each / usual:.2f}")),
            "; ".join(sorted(word for word in words if "measured on" in word)),
        ]  # fmt: skip


def differences(training: Training) -> Iterator[list[object]]:
    """Yield, for each metric, the difference between its values on the device and on the host.

    Args:
        training: The training with the model to probe.
    """
    probe = training.batch()[:8, : training.size.length // 2]
    readings = []
    for device in ("cpu", "auto"):
        options = {"probe": probe, "background": False, "device": device, "checks": None}
        with (
            _watching(training, **options) as (monitor, memory),
            torch.autocast(training.device.type, torch.bfloat16),
        ):
            monitor.probe(0)
        readings.append(memory.readings[0].values)
    host, there = readings
    worst: dict[str, tuple[float, str]] = {}
    for tag, value in host.items():
        if not tag.startswith("geomon/") and not math.isnan(value):
            metric = tag.split("/")[0] + ("/margin" if tag.endswith("margin") else "")
            apart = abs(there.get(tag, math.nan) - value) / max(abs(value), _SMALL)
            worst[metric] = max(worst.get(metric, (0.0, "")), (apart, tag))
    for metric, (apart, tag) in sorted(worst.items(), key=lambda item: -item[1][0])[:12]:
        yield [metric, f"{apart:.1e}", tag]


_RUNS = (
    "run", "steps", "step, ms", "99 %, ms", "lost, %", "counted, %", "readings", "peak, GB",
    "new graphs",
)  # fmt: skip
_COSTS = ("what", "delay, ms", "in steps", "until done, ms", "in steps", "note")


# A table: its title, names of its columns, its rows.
Table = tuple[str, tuple[str, ...], Iterator[list[object]]]


def tables(size: Size, device: torch.device, steps: int) -> Iterator[Table]:
    """Yield runs, single readings, and values of the device next to the host's."""
    training = Training(size, device)
    yield f"Compiled blocks, {size}", _RUNS, runs(training, steps)
    usual = run(training, 2 * _WARM_UP).median
    yield f"Compiled blocks, {size}, one step", _COSTS, costs(training, usual)
    yield f"Device and host, {size}", ("metric", "apart", "value"), differences(training)


def main(
    only: Annotated[Name | None, typer.Option(help="Size of the model; all by default.")] = None,
    steps: Annotated[
        int | None, typer.Option(help="Steps of a run, if not the size's own.")
    ] = None,
) -> None:
    """Train with and without geomon on the available accelerator, and print the cost."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    card = "no accelerator: tiny sizes, to see that the parts work"
    if device.type == "cuda":
        card = f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
    print(f"{card}; torch {torch.__version__}, transformers {transformers.__version__}", flush=True)
    began = time.perf_counter()
    for name in [only] if only else SIZES:
        size = SIZES[name] if device.type == "cuda" else TINY
        try:
            for table in tables(size, device, steps or size.steps):
                print_table(*table)
        except Exception:
            traceback.print_exc()
        print(f"\n{name}: {time.perf_counter() - began:.0f} s since the start", flush=True)
        if device.type == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    typer.run(main)
