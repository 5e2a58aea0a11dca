"""The time and the work of one reading on 1, 2 and 4 ranks: python -m benchmarks.ranks."""

import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from geomon import Memory, Monitor
from geomon.capture.snapshot import Layer
from geomon.distributed import group
from geomon.metrics import Evaluator
from geomon.metrics.views import split_rows

LAYERS, HEADS, LENGTH, VOCABULARY = 12, 8, 128, 500
COLUMNS = (
    "ranks", "reading, s", "of one rank's", "CPU of a rank, s", "layers", "rows",
    "distances, Gflop", "spectra, Gflop", "attention, Gflop", "sent, MB",
)  # fmt: skip


def main(
    width: Annotated[int, typer.Option(help="Of the hidden states.")] = 256,
    tokens: Annotated[int, typer.Option(help="Rows in one batch of the estimate.")] = 2048,
    runs: Annotated[int, typer.Option(help="Readings; the median counts.")] = 5,
    sizes: Annotated[str, typer.Option(help="Numbers of ranks.")] = "1,2,4",
    rank: Annotated[int, typer.Option(hidden=True)] = -1,
) -> None:
    """Read the same number of rows on each number of ranks; columns are those of the busiest."""
    if rank >= 0:
        _read(width, tokens, runs)
        return
    table = Table(title=f"One reading of {LAYERS} layers, width {width}, two batches of {tokens:,}")
    for column in COLUMNS:
        table.add_column(column, justify="right")
    alone = 0.0
    for size in map(int, sizes.split(",")):
        found = _started(size, width, tokens, runs)
        seconds = statistics.median(found[0]["seconds"])
        alone = alone or seconds
        busiest = {
            name: max(each[name] for each in found) for name in found[0] if name != "seconds"
        }
        table.add_row(
            str(size), f"{seconds:.2f}", f"{seconds / alone:.2f}", f"{busiest['cpu']:.2f}",
            str(busiest["layers"]), f"{busiest['rows']:,}", f"{busiest['distances'] / 1e9:.1f}",
            f"{busiest['spectra'] / 1e9:.1f}", f"{busiest['attention'] / 1e9:.1f}",
            f"{busiest['sent'] / 1e6:.0f}",
        )  # fmt: skip
    console = Console(width=130)
    console.print(table)
    console.print(
        f"medians of {runs}, one thread to a rank on {os.cpu_count()} cores; of the work the "
        f"busiest rank's; torch {torch.__version__}, {platform.machine()}"
    )


def _started(size: int, width: int, tokens: int, runs: int) -> list[dict[str, Any]]:
    """What each of `size` processes found."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(size)}
    command = [
        sys.executable, "-m", "benchmarks.ranks", "--width", str(width), "--tokens", str(tokens),
        "--runs", str(runs), "--rank",
    ]  # fmt: skip
    processes = [
        subprocess.Popen(
            [*command, str(rank)],
            env=os.environ | shared | {"RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )
        for rank in range(size)
    ]  # fmt: skip
    said = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit(f"a rank failed: {[process.returncode for process in processes]}")
    return [json.loads(text.splitlines()[-1]) for text in said]


def _read(width: int, tokens: int, runs: int) -> None:
    """One rank: readings of a random decoder on tokens of its own; the batch is its share."""
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    torch.manual_seed(0)
    model = _Decoder(width)
    generator = torch.Generator().manual_seed(dist.get_rank())
    ids = torch.randint(0, VOCABULARY, (2 * tokens // LENGTH // size, LENGTH), generator=generator)
    memory = Memory()
    monitor = Monitor(
        model, tokens=tokens, directory=None, sinks=[memory], schedule=lambda step: True,
        strict=True,
    )  # fmt: skip
    work = _counting()
    cpu = []
    for step in range(runs + 1):  # the first warms up
        work.clear()
        with monitor(step), torch.no_grad():
            model(ids)
            dist.barrier()  # the reading alone is timed, not the wait for another's forward pass
            began = time.process_time()
        cpu.append(time.process_time() - began)
    names = ("layers", "rows", "distances", "spectra", "attention", "sent")
    found = {"seconds": [reading.seconds for reading in memory.readings][1:]}
    print(
        json.dumps(
            found | {name: work[name] for name in names} | {"cpu": statistics.median(cpu[1:])}
        )
    )
    dist.destroy_process_group()


def _counting() -> Counter[str]:
    """Counts the work of this rank from here on; floating-point operations by formula."""
    work: Counter[str] = Counter()
    measure, pack = Evaluator.measure_layer, group.pack

    def measured(self: Evaluator, layer: Layer, rows: int) -> Any:
        hidden = layer.captured["hidden"]
        work["layers"] += 1
        work["rows"] += len(hidden)
        for views in split_rows(layer, rows, self.batches):
            count, width = views["hidden"].shape
            work["distances"] += 2 * count**2 * width  # |x|^2 + |y|^2 - 2 x.y
            work["spectra"] += 2 * count * width**2 + 4 * width**3 // 3  # Gram, eigenvalues
        if "query" in layer.captured:
            query, key = layer.captured["query"], layer.captured["key"]
            work["attention"] += 2 * query.numel() * key.shape[2]
        return measure(self, layer, rows)

    def packed(parcel: Any) -> Tensor:
        content = pack(parcel)
        work["sent"] += len(content)
        return content

    Evaluator.measure_layer = measured
    group.pack = packed
    return work


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.c_attn, self.mlp = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in self.c_attn(self.norm(x)).chunk(3, dim=-1)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + y.transpose(1, 2).flatten(2)
        return x + self.mlp(x).tanh()


class _Decoder(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(_Block(width) for _ in range(LAYERS))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(LENGTH))
        for block in self.blocks:
            x = block(x)
        return x


if __name__ == "__main__":
    typer.run(main)
