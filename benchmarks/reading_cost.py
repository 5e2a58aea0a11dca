"""The cost of one reading in units of one training step on the same tokens: make bench.

The models are trained for some steps on enwik8 first, as the models of users are: the neighbour
search is cheaper once training has given the rows a few leading directions.
"""

import functools
import platform
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, GPT2Config

import geomon.metrics.views
from benchmarks.training import RATES, train_on_text
from geomon import METRICS, Memory, Monitor
from geomon.metrics.evaluate import sources_of
from recipes.enwik8.data import Corpus, load

TOKENS = 4096
# Tokens of a batch in the training before the readings: small, for the model of width 768.
TRAINING_TOKENS = 1024

# layers, width, context: the recipe's model, one a little larger, and GPT-2's own size.
SIZES = {"small": [(4, 128, 64), (6, 128, 128), (6, 384, 256)], "gpt2": [(12, 768, 512)]}
COLUMNS = (
    "layers", "width", "context", "step, s", "inline, s", "probe, s", "inline / step",
    "probe / step", "step unmonitored / bare",
)  # fmt: skip

# Where the time of a reading goes: the views that are computed for it, and its metrics.
SEARCH = ("nearest", "far_nearest", "distinct_neighbours", "copies", "distinct")
PARTS = dict.fromkeys(SEARCH, "neighbours") | {
    "axes": "spectrum", "ordinary_axes": "spectrum",
    "attention": "attention", "token_types": "token types",
    "ordinary_rows": "sinks", "gride": "dimension", "twonn": "dimension",
    "twonn_distinct": "dimension",
}  # fmt: skip
OF_HEADS = "queries and keys"
REST = "other moments and angles"


def main(
    size: Annotated[str, typer.Option(help="small (three minutes) or gpt2 (15).")] = "small",
    runs: Annotated[int, typer.Option(help="Pairs of a step and a reading of each kind.")] = 9,
    trained: Annotated[
        int, typer.Option(min=0, help="Steps of training on enwik8 before; 0 for random tokens.")
    ] = 100,
) -> None:
    """Time training steps and readings in turn, and print the ratios of their medians."""
    unknown = PARTS.keys() - geomon.metrics.views.DERIVED.keys() - METRICS.keys()
    if unknown:
        raise SystemExit(f"no view and no metric has the name {', '.join(sorted(unknown))}")
    corpus = load() if trained else None
    state = "random tokens, untrained models"
    if corpus is not None:
        state = f"models trained for {trained:,} steps on {corpus.source}"
    table = Table(title=f"One reading of all {len(METRICS)} metrics on {TOKENS:,} tokens")
    for column in COLUMNS:
        table.add_column(column, justify="right")
    taken = Table(title="Where the time of an inline reading goes, layers one by one, ms")
    for column in ("layers", "width", "capture", *dict.fromkeys(PARTS.values()), OF_HEADS, REST,
                   "bare matrix product"):  # fmt: skip
        taken.add_column(column, justify="right")
    for sizes in SIZES[size]:
        measured, parts = _measure(*sizes, runs, corpus, trained)
        table.add_row(*map(str, sizes), *measured)
        taken.add_row(*map(str, sizes[:2]), *(f"{1000 * part:.0f}" for part in parts))
    console = Console(width=120)
    console.print(table)
    console.print(taken)
    console.print(
        "neighbours: search, ranking in float64 and what it needs; bare matrix product: rows by "
        "rows in float32, once a layer, which the distances cannot do without"
    )
    console.print(
        f"{state}; medians of {runs}; {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}, {platform.machine()}"
    )


def _measure(
    layers: int, width: int, context: int, runs: int, corpus: Corpus | None, trained: int
) -> tuple[list[str], list[float]]:
    torch.manual_seed(0)
    symbols = 205 if corpus is None else len(corpus.symbols)
    configuration = GPT2Config(
        vocab_size=symbols, n_positions=context, n_embd=width, n_layer=layers, n_head=width // 32,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, activation_function="gelu_pytorch_tanh",
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(configuration)
    ids = torch.randint(0, symbols, (TOKENS // context, context))
    if corpus is not None:
        ids = torch.from_numpy(corpus.validation[:TOKENS]).long().view(-1, context)
        sequences, rate = max(1, TRAINING_TOKENS // context), RATES[width]
        losses = train_on_text(model, corpus, context=context, sequences=sequences, rate=rate)
        for _ in range(trained):
            loss = next(losses)
        losses.close()  # with its optimizer
        print(f"{layers} layers, width {width}: loss {loss:.2f} after {trained} steps", flush=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    clock = _Clock()
    settings: dict[str, Any] = {
        "tokens": TOKENS, "batches": 1, "directory": None, "probe": None, "strict": True,
        "schedule": lambda step: step % 3 == 1,
    }  # fmt: skip
    memory, in_parts = Memory(), Memory()
    monitor = Monitor(model, sinks=[memory], **settings)
    # Layers one after another, with all threads for each: the metrics are not geomon's own ones.
    timed = Monitor(model, metrics=clock.timed(METRICS), sinks=[in_parts], **settings)

    def train(step: int | None, watching: Monitor = monitor) -> None:
        if step is None:
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        else:
            with watching(step):
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    bare, unmonitored, inline, probe, capture = [], [], [], [], []
    parts: dict[str, list[float]] = defaultdict(list)
    derived = geomon.metrics.views.DERIVED
    for run in range(runs + 1):  # the first warms up
        bare.append(_seconds(lambda: train(None)))
        unmonitored.append(_seconds(lambda run=run: train(3 * run + 2)))  # type: ignore[misc]
        train(3 * run + 4)
        inline.append(memory.readings[-1].seconds)
        monitor.probe(3 * run + 5, {"input_ids": ids, "use_cache": False})
        probe.append(memory.readings[-1].seconds)
        clock.seconds.clear()
        geomon.metrics.views.DERIVED = clock.timed(derived)
        train(3 * run + 4, timed)
        geomon.metrics.views.DERIVED = derived
        for part in dict.fromkeys([*PARTS.values(), OF_HEADS, REST]):
            parts[part].append(clock.seconds[part])
        capture.append(in_parts.readings[-1].seconds - sum(clock.seconds.values()))
    rows = torch.randn(TOKENS, width)
    product = [_seconds(lambda: [own @ rows.T for own in rows.split(256)]) for _ in range(runs + 1)]
    step, beside, read, probed = (
        statistics.median(times[1:]) for times in (bare, unmonitored, inline, probe)
    )
    middle = [statistics.median(times[1:]) for times in (capture, *parts.values(), product)]
    middle[-1] *= layers + 1
    figures = [
        f"{step:.3f}", f"{read:.3f}", f"{probed:.3f}", f"{read / step:.2f}", f"{probed / step:.2f}",
        f"{beside / step:.3f}",
    ]  # fmt: skip
    return figures, middle


class _Clock:
    """Seconds of each part of a reading, without those of the parts that it asks for."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inner: list[float] = []

    def timed(self, functions: Any) -> Any:
        """The same table of functions (or of tuples of them), of which each is timed."""
        return {
            name: tuple(self._one(name, way) for way in made)
            if isinstance(made, tuple)
            else self._one(name, made)
            for name, made in functions.items()
        }

    def _one(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        part = PARTS.get(name)
        if part is None:
            part = REST if sources_of(function) == {"hidden"} else OF_HEADS

        @functools.wraps(function)
        def timed(*args: Any) -> Any:
            began = time.perf_counter()
            self._inner.append(0.0)
            try:
                return function(*args)
            finally:
                taken = time.perf_counter() - began
                self.seconds[part] += taken - self._inner.pop()
                if self._inner:
                    self._inner[-1] += taken

        return timed


def _seconds(action: Callable[[], None]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


if __name__ == "__main__":
    typer.run(main)
