"""What geomon costs: a reading, a check, a step with neither, on a device, and on ranks."""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config

from benchmarks.forked import on_ranks
from benchmarks.timing import median_seconds, print_machine, print_table, seconds
from geomon import METRICS, Memory, Monitor, every
from geomon.capture.anatomy.blocks import find_anatomy
from geomon.capture.snapshot import HOST, Layer
from geomon.capture.window import Window
from geomon.metrics import Evaluator
from recipes.enwik8.text import load

VOCABULARY = 256
TOKENS = 4096  # of a reading
# Tokens of a batch in the training before the readings: small, for the model of width 768.
TRAINING_TOKENS = 1024
# Layers, width, context: the recipe's model, two a little larger, and GPT-2's own size.
MODELS = {"small": [(4, 128, 64), (6, 128, 128), (6, 384, 256)], "gpt2": [(12, 768, 512)]}
# Sequences of a batch, and tokens of each, at which checks are timed.
BATCHES = ((32, 128), (8, 64))
BANDED = 200  # from this step on there are bands, which a check fills
LARGE = 40  # layers of GPT-2: 528 modules
NEVER = every(10**9)  # but for step 0
HEAD_WIDTH, LENGTH, QUERIES = 64, 512, 1024  # of a layer on a device

app = typer.Typer(help=__doc__)
Runs = Annotated[int, typer.Option(help="Runs of each, of which the median is printed.")]
Layers = Annotated[int, typer.Option(help="Number of blocks.")]
Width = Annotated[int, typer.Option(help="Width of the hidden states, a multiple of 64.")]


class Training:
    """A decoder and its optimizer."""

    def __init__(self, layers: int, width: int, length: int, rate: float = 1e-4) -> None:
        torch.manual_seed(0)
        configuration = GPT2Config(
            vocab_size=VOCABULARY, n_positions=length, n_embd=width, n_layer=layers,
            n_head=width // 32, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
            bos_token_id=None, eos_token_id=None,
        )  # fmt: skip
        self.model = AutoModelForCausalLM.from_config(configuration)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate)

    def step(self, ids: Tensor, around: AbstractContextManager[None] | None = None) -> None:
        """Do a step, its forward pass within a context."""
        with around or nullcontext():
            loss = self.model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()


def _read(layers: int, width: int, context: int, trained: int, runs: int) -> list[str]:
    corpus = load()
    training = Training(layers, width, context, rate=6e-4)
    text = torch.from_numpy(corpus.train).long()
    for _ in range(trained):
        starts = torch.randint(len(text) - context, (max(1, TRAINING_TOKENS // context), 1))
        training.step(text[starts + torch.arange(context)])
    ids = torch.from_numpy(corpus.validation[:TOKENS]).long().view(-1, context)
    memory = Memory()
    monitor = Monitor(
        training.model, tokens=TOKENS, directory=None, sinks=[memory], strict=True,
        schedule=lambda step: step % 2 == 1,
    )  # fmt: skip
    steps = []
    for run in range(runs + 1):  # the first warms up
        steps.append(seconds(lambda: training.step(ids)))
        with monitor(2 * run + 1):
            training.model(input_ids=ids, labels=ids, use_cache=False)
        monitor.probe(2 * run + 2, {"input_ids": ids, "use_cache": False})
    taken = [reading.seconds for reading in memory.readings]
    bare, inline, probe = map(statistics.median, (steps[1:], taken[2::2], taken[3::2]))
    return [
        f"{layers} layers, width {width}, context {context}", f"{bare:.3f}", f"{inline:.3f}",
        f"{probe:.3f}", f"{inline / bare:.2f}", f"{probe / bare:.2f}",
    ]  # fmt: skip


@app.command()
def reading(
    size: Annotated[str, typer.Option(help="small (three minutes) or gpt2 (15).")] = "small",
    trained: Annotated[int, typer.Option(help="Steps of training on enwik8 before.")] = 100,
    runs: Runs = 9,
) -> None:
    """A reading in a training step and by a probe, and a step on the same tokens.

    The models are trained first, as those of users are: the neighbour search is cheaper once
    training has given the rows a few leading directions.
    """
    print_table(
        f"One reading of all {len(METRICS)} metrics on {TOKENS:,} tokens",
        ("model", "step, s", "inline, s", "probe, s", "inline / step", "probe / step"),
        (_read(*model, trained, runs) for model in MODELS[size]),
    )
    print_machine(f"trained for {trained:,} steps", f"medians of {runs}")


def _checked(layers: int, width: int, shape: tuple[int, int], runs: int) -> list[str]:
    training = Training(layers, width, shape[1])

    def timed(around: AbstractContextManager[None] | None = None) -> float:
        ids, began = torch.randint(VOCABULARY, shape), time.process_time()
        training.step(ids, around)
        return time.process_time() - began

    plain = statistics.median([timed() for _ in range(runs + 2)][2:])
    ratios = []
    for schedule, checks in ((every(1), None), (NEVER, 1)):
        monitor = Monitor(training.model, directory=None, schedule=schedule, checks=checks)
        # What a first one loads, and bands; step 0 would be a reading.
        taken = [timed(monitor(BANDED - 11 + at)) for at in range(11 + runs)]
        ratios.append((statistics.median(taken[11:]) - plain) / plain)
        monitor.close()
    return [f"{shape[0]} x {shape[1]}", f"{1e3 * plain:.0f}", *(f"{each:.2f}" for each in ratios)]


@app.command()
def check(layers: Layers = 6, width: Width = 128, runs: Runs = 9) -> None:
    """A reading and a check in training steps, at two sizes of batches, on one thread."""
    torch.set_num_threads(1)
    print_table(
        f"A reading and a check of {layers} layers of width {width}, in training steps",
        ("batch", "step, ms", "reading / step", "check / step"),
        (_checked(layers, width, shape, runs) for shape in BATCHES),
    )
    print_machine("one thread, processor time", f"medians of {runs}")


@app.command()
def idle(runs: Runs = 60) -> None:
    """A window around nothing, and steps at which nothing is read beside steps without geomon."""
    large, training = Training(LARGE, 128, 64), Training(4, 128, 64)
    anatomy = find_anatomy(large.model)
    views = Evaluator(METRICS, 2).views
    monitor = Monitor(training.model, schedule=NEVER, directory=None)
    ids = torch.randint(VOCABULARY, (16, 64))

    def window() -> None:
        with Window(anatomy, views, rows=TOKENS, seed=0):
            pass

    def enter() -> None:
        with monitor(7):
            pass

    actions: dict[str, Callable[[], None]] = {
        "window opened and closed, 528 modules": window,
        "monitor(step) if no reading is due": enter,
        "training step": lambda: training.step(ids),
        "training step in monitor(step)": lambda: training.step(ids, monitor(7)),
    }
    # In turn, so that what drifts meets all alike; the first ones warm up.
    taken = [{name: seconds(action) for name, action in actions.items()} for _ in range(runs + 3)]
    by_name = {name: sorted(each[name] for each in taken[3:]) for name in actions}
    print_table(
        "Where geomon does not read",
        ("", "median, ms", "from", "to"),
        (
            [name, *(f"{1e3 * each:.3f}" for each in (statistics.median(all_), all_[0], all_[-1]))]
            for name, all_ in by_name.items()
        ),
    )
    print_machine(f"{runs} of each")


def decoder_layer(rows: int, width: int) -> Layer:
    """Make a layer as a window captures it, of random numbers with a spectrum that falls.

    Args:
        rows: Number of rows of hidden states.
        width: Width of the hidden states.
    """
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    heads, sequences = width // HEAD_WIDTH, max(1, rows // LENGTH)
    each = QUERIES // sequences
    places = (torch.arange(each) * LENGTH // each)[:, None]
    number = torch.arange(rows) // LENGTH
    return Layer(
        1,
        "block",
        {
            "hidden": normal(rows, width) * torch.arange(1, width + 1) ** -0.5 + 1,
            "token_ids": torch.randint(0, 1000, (rows,), generator=generator),
            "positions": torch.arange(rows) % LENGTH,
            "sequences": number,
            "precision": torch.finfo(torch.bfloat16).eps,
            "query": normal(sequences, heads, each, HEAD_WIDTH),
            "key": normal(sequences, heads, LENGTH, HEAD_WIDTH),
            "visible": (torch.arange(LENGTH) <= places)[None, None],
            "bias": None,
            "scale": HEAD_WIDTH**-0.5,
            "softcap": None,
            "sink": None,
            "max_logits": normal(heads),
            "projected_query": normal(rows, heads, HEAD_WIDTH),
            "projected_key": normal(rows, heads, HEAD_WIDTH),
            "query_sequences": number,
            "key_sequences": number,
        },
    )


def _on_devices(
    layer: Layer, rows: int, batches: int, device: torch.device | None
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield what is timed; without an accelerator the host alone."""
    evaluator = Evaluator(METRICS, batches, strict=True)
    yield "measured on the host", lambda: evaluator.measure_layer(layer, rows)
    if device is not None:
        there = layer.to(device)
        yield f"measured on {device}", lambda: evaluator.measure_layer(there, rows)
        yield f"copy from {device} to the host", lambda: there.to(HOST)
        yield f"copy from the host to {device}", lambda: layer.to(device)
        torch.set_float32_matmul_precision("high")  # many trainings allow TF32
        yield f"measured on {device}, TF32 allowed", lambda: evaluator.measure_layer(there, rows)
        if device.type == "cuda":
            print(f"{torch.cuda.max_memory_allocated(device) / 1e6:,.0f} MB at most")


@app.command()
def devices(
    layers: Layers = 12,
    width: Width = 768,
    rows: Annotated[int, typer.Option(help="Rows in a split.")] = 4096,
    batches: Annotated[int, typer.Option(help="Splits.")] = 1,
    runs: Runs = 3,
) -> None:
    """A reading on the host and on an accelerator, and the copies between; one layer is timed."""
    where = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    layer = decoder_layer(rows * batches, width)
    times = (
        (name, median_seconds(action, runs, where))
        for name, action in _on_devices(layer, rows, batches, where)
    )
    print_table(
        f"One reading of {layers} layers of width {width}, {batches} x {rows} rows",
        ("", "one layer, s", "all layers, s"),
        ((name, f"{taken:.3f}", f"{taken * layers:.2f}") for name, taken in times),
    )
    print_machine(f"medians of {runs}")


def _on_rank(layers: int, width: int, runs: int) -> tuple[list[float], float]:
    """Read tokens of this rank's own; returns seconds of readings, and those of its processor."""
    torch.set_num_threads(1)
    training = Training(layers, width, 128)
    torch.manual_seed(dist.get_rank())
    ids = torch.randint(VOCABULARY, (TOKENS // 128 // dist.get_world_size(), 128))
    memory = Memory()
    monitor = Monitor(
        training.model, tokens=TOKENS, directory=None, sinks=[memory], schedule=every(1),
        budget=None, strict=True,
    )  # fmt: skip
    cpu = []
    for step in range(runs + 1):  # the first warms up
        with monitor(step), torch.no_grad():
            training.model(ids)
            dist.barrier()  # the reading alone is timed, not the wait for another's forward pass
            began = time.process_time()
        cpu.append(time.process_time() - began)
    taken = [reading.seconds for reading in memory.readings]
    return taken[1:], statistics.median(cpu[1:])


@app.command()
def ranks(layers: Layers = 12, width: Width = 256, runs: Runs = 5) -> None:
    """A reading of the same number of rows on 1, 2 and 4 ranks, one thread to a rank."""
    found = {size: on_ranks(size, _on_rank, layers, width, runs) for size in (1, 2, 4)}
    print_table(
        f"One reading of {layers} layers, width {width}, {TOKENS:,} rows",
        ("ranks", "reading, s", "CPU of the busiest rank, s"),
        (
            (size, f"{statistics.median(each[0][0]):.2f}", f"{max(cpu for _, cpu in each):.2f}")
            for size, each in found.items()
        ),
    )
    print_machine(f"medians of {runs}")


if __name__ == "__main__":
    app()
