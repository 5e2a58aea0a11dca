"""Costs of geomon: a reading, a check, a step with neither, and a reading on many ranks."""

import logging
import pickle
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config

from benchmarks import mesh_models
from benchmarks.forked import on_ranks
from benchmarks.mesh_models import MeshSpec
from benchmarks.overhead import overhead, peak
from benchmarks.python_bound import python_bound
from benchmarks.timing import print_machine, print_table, seconds
from geomon import METRICS, Memory, Monitor, every
from geomon.capture.anatomy.blocks import find_anatomy
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
ON_RANKS = mesh_models.Sizes(
    width=256, heads=8, key_heads=4, inner=1024, vocabulary=1024, length=128, batch=8, layers=8
)

app = typer.Typer(help=__doc__)
app.command()(overhead)
app.command()(peak)
app.command()(python_bound)
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

    The models are trained first, like users' models: the neighbour search is cheaper once
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
        # The first looks load modules and fill bands; step 0 would be a reading.
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
    """A window around nothing, and steps that are not read, compared with steps without geomon."""
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


# Bytes that a rank passes to others, by the first two arguments of geomon's collectives.
SENT: dict[str, Callable[..., int]] = {
    "all_gather_object": lambda values, value: (len(values) - 1) * len(pickle.dumps(value)),
    "gather_object": lambda value, values: 0 if values else len(pickle.dumps(value)),
    "broadcast_object_list": lambda values: (
        0 if dist.get_rank() else (dist.get_world_size() - 1) * len(pickle.dumps(values[0]))
    ),
    "all_to_all_single": lambda output, given: given.numel() * given.element_size(),
}


@contextmanager
def _counted_bytes() -> Iterator[list[int]]:
    """Collect how many bytes this rank sends in each collective of geomon."""
    plain, sent = {name: getattr(dist, name) for name in SENT}, list[int]()

    def call(name: str, *args: Any, **kwargs: Any) -> Any:
        sent.append(SENT[name](*args[:2]))
        return plain[name](*args, **kwargs)

    try:
        for name in SENT:
            setattr(dist, name, partial(call, name))
        yield sent
    finally:
        for name, function in plain.items():
            setattr(dist, name, function)


def _on_rank(spec: MeshSpec, rows: int, runs: int) -> tuple[float, float, float, float]:
    """Measure a mesh on this rank: collectives and bytes of a reading, its time, and a step's."""
    torch.set_num_threads(1)
    training, memory = mesh_models.Training(spec, "Llama", 0.0, sizes=ON_RANKS), Memory()
    bare = [seconds(lambda: training.step(0)) for _ in range(runs + 1)]  # the first warms up
    monitor = Monitor(
        training.watched, tokens=rows, directory=None, sinks=[memory], schedule=every(1),
        budget=None, strict=True,
    )  # fmt: skip

    @contextmanager
    def around(step: int) -> Iterator[None]:
        with monitor(step):
            yield
            dist.barrier()  # the reading alone is timed, not the wait for another's forward pass

    with _counted_bytes() as sent:
        for step in range(runs + 1):
            training.step(step, partial(around, step))
    monitor.close()
    taken = [reading.seconds for reading in memory.readings][1:] or [0.0]
    each = len(sent) / (runs + 1), sum(sent) / (runs + 1)
    return *each, statistics.median(taken), statistics.median(bare[1:])


@app.command()
def ranks(
    rows: Annotated[int, typer.Option(help="Rows of a reading, over all ranks.")] = 1024,
    size: Annotated[int, typer.Option(help="Largest number of ranks.")] = 8,
    runs: Runs = 3,
) -> None:
    """A reading and a training step on every mesh, and what a reading sends."""
    logging.getLogger("geomon").setLevel(logging.ERROR)

    def row(spec: MeshSpec) -> list[str]:
        found = on_ranks(spec.size, _on_rank, spec, rows, runs)
        calls, _, taken, step = found[0]
        sent = sum(each[1] for each in found)
        return [str(spec), f"{calls:.0f}", f"{sent / 1e6:.1f}", f"{taken:.2f}", f"{step:.2f}"]

    meshes = (MeshSpec(), MeshSpec(data=2, wrap="DDP"), *mesh_models.MESHES)
    print_table(
        f"One reading of {ON_RANKS.layers} layers, width {ON_RANKS.width}, {rows:,} rows, and one "
        f"training step of {ON_RANKS.batch * ON_RANKS.length:,} tokens a data rank",
        ("mesh", "collectives", "MB", "reading, s", "step, s"),
        (row(spec) for spec in meshes if spec.size <= size),
    )
    print_machine(f"medians of {runs}", "one thread to a rank")


if __name__ == "__main__":
    app()
