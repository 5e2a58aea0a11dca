"""TwoNN end to end on hidden states of decoders as they train, beside its peers, and on noise."""

import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config

from benchmarks.speed import CONTENDERS, Contender, quiet
from geomon.kernels import neighbours
from geomon.kernels._search import Candidates, Cloud
from geomon.kernels._sketch import Sketch
from recipes.enwik8.data import load

TOKENS = 4096
STEPS = (0, 30, 100, 1000)
# Width: layers, context, characters in a training step, learning rate. Wide ones are shallow, and
# see little in a step: what counts is that they have begun to learn.
MODELS = {
    128: (4, 64, 1024, 1e-3),
    384: (4, 128, 1024, 1e-3),
    768: (3, 128, 512, 3e-4),
    2048: (2, 128, 256, 3e-4),
}
PEERS = ("DADApy, k = 2", "scikit-dimension")

console = Console(width=120)


def main(
    states: Annotated[Path, typer.Option(help="Folder in which hidden states are kept.")],
    text: Annotated[Path | None, typer.Option(help="enwik8 or a prefix of it.")] = None,
    widths: Annotated[str, typer.Option(help="Widths, separated by commas.")] = "128,384,768",
    last: Annotated[int, typer.Option(help="Last step of training that is looked at.")] = 100,
    runs: Annotated[int, typer.Option(help="Runs of each, in turn, after one that warms up.")] = 5,
) -> None:
    """Train where states are missing, time everybody in turn on one thread, and print ratios.

    Times are CPU seconds of one thread: what else runs on the machine disturbs them least.
    """
    torch.set_num_threads(1)
    states.mkdir(parents=True, exist_ok=True)
    contenders, missing = {"geomon": CONTENDERS["dimension"]["geomon, k = 2"]()}, []
    for name in PEERS:
        try:
            contenders[name] = CONTENDERS["dimension"][name]()
        except ImportError as error:
            missing.append(f"{name}: {error.name} is not installed")
    for width in map(int, widths.split(",")):
        table = Table(title=f"TwoNN of {TOKENS:,} rows of width {width:,}, CPU time of one thread")
        for column in ("rows", "certified by sketch, %", "by float32, %", "geomon / peer",
                       "geomon / bare product"):  # fmt: skip
            table.add_column(column, justify="left" if column == "rows" else "right")
        for name, rows in _states(width, states, text, last):
            table.add_row(name, *_measure(contenders, rows, runs))
        noise = np.random.default_rng(0).standard_normal((TOKENS, width)).astype(np.float32)
        table.add_row("noise", *_measure(contenders, noise, runs))
        console.print(table)
    console.print("; ".join([f"medians of {runs}; peer: the faster of those there", *missing]))


def _measure(contenders: dict[str, Contender], rows: np.ndarray, runs: int) -> list[str]:
    points = torch.from_numpy(rows)
    product = torch.empty(256, len(points))

    def multiply(_: np.ndarray) -> float:
        for block in points.split(256):
            torch.mm(block, points.T, out=product[: len(block)])
        return 0.0

    times: dict[str, list[float]] = {}
    for _ in range(runs + 1):
        for name, contender in {**contenders, "product": multiply}.items():
            began = time.process_time()
            quiet(contender, rows)
            times.setdefault(name, []).append(time.process_time() - began)
    middle = {name: statistics.median(taken[1:]) for name, taken in times.items()}
    peer = min((middle[name] for name in contenders if name != "geomon"), default=float("nan"))
    shares = [f"{100 * share:.1f}" for share in _certified(points)]
    ratios = [middle["geomon"] / peer, middle["geomon"] / middle["product"]]
    return [*shares, *(f"{ratio:.2f}" for ratio in ratios)]


def _certified(points: Tensor) -> tuple[float, float]:
    """Shares of the rows that a sketch certifies, and that the search in float32 does."""
    usual, counts = Cloud.certified, {"sketch": 0, "float32": 0}
    used: list[bool] = []
    choose = neighbours.choose_sketch

    def noted_choice(cloud: Cloud, own: Tensor, k: int) -> Sketch | None:
        sketch = choose(cloud, own, k)
        used.append(sketch is not None)
        return sketch

    def noted(cloud: Cloud, own: Tensor, found: Candidates, kth: Tensor) -> Tensor:
        certain = usual(cloud, own, found, kth)
        name = "sketch" if used and used.pop() else "float32"
        counts[name] += int(certain.sum()) if found.rounding > 1e-10 else 0
        return certain

    replaced: list[tuple[object, str, Callable[..., object], Callable[..., object]]] = [
        (Cloud, "certified", noted, usual),
        (neighbours, "choose_sketch", noted_choice, choose),
    ]
    rows = points[neighbours.unique_rows(points)]
    for owner, name, new, _ in replaced:
        setattr(owner, name, new)
    neighbours.nearest(rows, 2)
    for owner, name, _, old in replaced:
        setattr(owner, name, old)
    return counts["sketch"] / len(rows), counts["float32"] / len(rows)


def _states(
    width: int, folder: Path, text: Path | None, last: int
) -> Iterator[tuple[str, np.ndarray]]:
    """Hidden states of the second and of the last layer at each step, trained if not kept."""
    layers = MODELS[width][0]
    wanted = [
        (f"step {step}, layer {layer}", folder / f"w{width}_s{step}_l{layer}.npy")
        for step in STEPS
        if step <= last
        for layer in sorted({1, layers})
    ]
    if not all(path.exists() for _, path in wanted):
        _train(width, folder, text, last)
    for name, path in wanted:
        yield name, np.load(path)


def _train(width: int, folder: Path, text: Path | None, last: int) -> None:
    layers, context, characters, rate = MODELS[width]
    corpus = load(text)
    train, held = (torch.from_numpy(part.astype(np.int64)) for part in (corpus.train, corpus.test))
    held = held[:TOKENS].view(-1, context)
    torch.manual_seed(0)
    configuration = GPT2Config(
        vocab_size=len(corpus.symbols), n_positions=context, n_embd=width, n_layer=layers,
        n_head=max(4, width // 64), resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(configuration)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for step in range(last + 1):
        if step in STEPS:
            with torch.no_grad():
                seen = model(input_ids=held, output_hidden_states=True, use_cache=False)
            for layer in (1, layers):
                rows = seen.hidden_states[layer].reshape(-1, width).numpy()
                np.save(folder / f"w{width}_s{step}_l{layer}.npy", rows)
        start = torch.randint(len(train) - context, (characters // context, 1))
        batch = train[start + torch.arange(context)]
        model(input_ids=batch, labels=batch, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    typer.run(main)
