"""Attention of sampled rows: the memory it takes, and its agreement with the full softmax."""

import math
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from geomon.kernels.attention import attention_rows

LENGTH, HEADS, HEAD_WIDTH, QUERIES = 8192, 32, 64, 128
ALLOWED_MB = 200
LENGTHS = (64, 512, 2048, 4096)
MASKS = ("causal", "bidirectional", "padded", "sliding window", "grouped query")


def main(
    processes: Annotated[
        int, typer.Option(help="Fresh processes: where the heap begins decides its holes.")
    ] = 10,
    alone: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Print the peak memory of one call, and the largest difference in entropy."""
    if alone:
        print(_extra_memory(*alone.split("/")))
        return
    console = Console(width=110)
    console.print(_memory_table(processes))
    console.print(_agreement_table())


def peak_beyond(action: Callable[[], object]) -> float:
    """Megabytes (10^6) of resident memory that `action` takes beyond what is there before it.

    For a process of its own: the first call pays for what the libraries set up once.
    """
    before = _resident("VmRSS")
    try:
        Path("/proc/self/clear_refs").write_text("5")  # forgets the peak of the imports
    except OSError:
        before = _resident("VmHWM")
    action()
    return (_resident("VmHWM") - before) / 1e6


def _resident(field: str) -> int:
    """VmRSS (now) or VmHWM (the peak), in bytes.

    From /proc: ru_maxrss of a child begins with the peak of the process that started it. Elsewhere
    ru_maxrss serves for both.
    """
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return 1024 * int(status.split(f"{field}:")[1].split()[0])


def _memory_table(processes: int) -> Table:
    table = Table(
        title=f"{HEADS} heads of width {HEAD_WIDTH}, {QUERIES} query rows against {LENGTH:,} keys"
    )
    table.add_column("given as")
    table.add_column("computed by")
    for column in ("inputs, MB", "peak beyond inputs, MB", "s"):
        table.add_column(column, justify="right")
    table.add_column(f"below {ALLOWED_MB} MB")
    for dtype, rows in (
        ("float32", "sampled"), ("bfloat16", "sampled"), ("float32", "at once"),
    ):  # fmt: skip
        command = [sys.executable, "-m", "benchmarks.attention_memory", "--alone"]
        answers = [
            subprocess.run(
                [*command, f"{dtype}/{rows}"], check=True, capture_output=True, text=True
            ).stdout
            for _ in range(processes)
        ]
        inputs, extra, seconds = zip(*(map(float, each.split()) for each in answers), strict=True)
        name = "attention_rows" if rows == "sampled" else "softmax of the same rows at once"
        table.add_row(
            dtype, name, f"{inputs[0]:.0f}", f"{min(extra):.0f} to {max(extra):.0f}",
            f"{statistics.median(seconds):.2f}", "yes" if max(extra) < ALLOWED_MB else "NO",
        )  # fmt: skip
    return table


def _extra_memory(dtype: str, rows: str) -> str:
    torch.set_num_threads(2)
    torch.manual_seed(0)
    query = torch.randn(1, HEADS, QUERIES, HEAD_WIDTH).to(getattr(torch, dtype))
    key = torch.randn(1, HEADS, LENGTH, HEAD_WIDTH).to(getattr(torch, dtype))
    position = torch.arange(LENGTH)
    visible = (position <= torch.linspace(0, LENGTH - 1, QUERIES).long()[:, None])[None, None]

    def at_once() -> Tensor:
        scores = query.float() @ key.float().transpose(-1, -2) / HEAD_WIDTH**0.5
        weights = scores.masked_fill(~visible, -math.inf).softmax(dim=-1)
        return torch.special.entr(weights).sum(dim=-1)

    def sampled() -> object:
        return attention_rows(query, key, visible, HEAD_WIDTH**-0.5)

    action: Callable[[], object] = sampled if rows == "sampled" else at_once
    inputs = sum(t.numel() * t.element_size() for t in (query, key, visible)) / 1e6
    extra = peak_beyond(action)
    began = time.perf_counter()
    action()
    return f"{inputs} {extra} {time.perf_counter() - began}"


def _agreement_table() -> Table:
    torch.set_num_threads(2)
    table = Table(
        title="Largest difference in entropy, nats: sampled rows, full softmax in float64"
    )
    table.add_column("mask")
    for length in LENGTHS:
        table.add_column(f"T = {length:,}", justify="right")
    for mask in MASKS:
        table.add_row(mask, *(f"{_difference(mask, length):.1e}" for length in LENGTHS))
    return table


def _difference(mask: str, length: int) -> float:
    """Over four heads and the sampled rows of two sequences, each against the full matrix."""
    generator = torch.Generator().manual_seed(length)
    heads, key_heads = 4, 2 if mask == "grouped query" else 4
    query = torch.randn(2, heads, length, HEAD_WIDTH, generator=generator)
    key = torch.randn(2, key_heads, length, HEAD_WIDTH, generator=generator)
    visible = _visible(mask, length)
    rows = torch.randperm(length, generator=generator)[: min(QUERIES, length)]
    # Scores with a standard deviation of 3: sharp rows beside flat ones.
    scale = 3 / HEAD_WIDTH**0.5
    sampled = attention_rows(query[:, :, rows], key, visible[:, :, rows], scale)
    largest = 0.0
    for sequence in range(2):
        for head in range(heads):
            faced = key[sequence, head * key_heads // heads]
            full = _full_entropy(query[sequence, head], faced, visible[sequence, 0], scale)
            taken = sampled.entropy[head].reshape(2, -1)[sequence]
            largest = max(largest, (taken - full[rows]).abs().max().item())
    return largest


def _full_entropy(query: Tensor, key: Tensor, visible: Tensor, scale: float) -> Tensor:
    """Entropy of every row of the whole matrix; 0 for rows that see nothing."""
    scores = (query.double() @ key.double().T * scale).masked_fill(~visible, -math.inf)
    weights = scores.softmax(dim=-1).nan_to_num(0)
    return torch.special.entr(weights).sum(dim=-1)


def _visible(mask: str, length: int) -> Tensor:
    """[sequences, 1, queries, keys], True where a query may attend."""
    position = torch.arange(length)
    back = position[:, None] - position
    everywhere = torch.ones(2, 1, length, length, dtype=torch.bool)
    if mask == "bidirectional":
        return everywhere
    causal = everywhere & (back >= 0)
    if mask == "sliding window":
        return causal & (back < max(8, length // 8))
    if mask == "padded":  # the second sequence is two thirds long, padded on the left
        causal[1] &= position >= length // 3
    return causal


if __name__ == "__main__":
    typer.run(main)
