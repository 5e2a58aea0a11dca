"""Times one reading on 1, 2 and 4 ranks."""

import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import Tensor, nn

from benchmarks.timing import print_machine, print_table
from geomon import Memory, Monitor

LAYERS, HEADS, LENGTH, VOCABULARY = 12, 8, 128, 500


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


def _read(width: int, tokens: int, runs: int) -> None:
    """Time readings of a random decoder on one rank, with this rank's share of the batch."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = _Decoder(width)
    generator = torch.Generator().manual_seed(dist.get_rank())
    sequences = tokens // LENGTH // dist.get_world_size()
    ids = torch.randint(0, VOCABULARY, (sequences, LENGTH), generator=generator)
    memory = Memory()
    monitor = Monitor(
        model, tokens=tokens, directory=None, sinks=[memory], schedule=lambda step: True,
        budget=None, strict=True,
    )  # fmt: skip
    cpu = []
    for step in range(runs + 1):  # the first warms up
        with monitor(step), torch.no_grad():
            model(ids)
            dist.barrier()  # time only the reading, not the wait for another forward pass
            began = time.process_time()
        cpu.append(time.process_time() - began)
    taken = [reading.seconds for reading in memory.readings][1:]
    print(json.dumps({"seconds": taken, "cpu": statistics.median(cpu[1:])}))
    dist.destroy_process_group()


def _started(size: int, width: int, tokens: int, runs: int) -> list[dict[str, Any]]:
    """Start `size` processes, and return their results."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(size)}
    sizes = ["--width", str(width), "--tokens", str(tokens), "--runs", str(runs)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.ranks", *sizes, "--rank", str(rank)],
            env=os.environ | shared | {"RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )
        for rank in range(size)
    ]  # fmt: skip
    said = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit(f"a rank failed: {[process.returncode for process in processes]}")
    return [json.loads(text.splitlines()[-1]) for text in said]


def _rows(width: int, tokens: int, runs: int) -> Iterator[tuple[str, ...]]:
    alone = 0.0
    for size in (1, 2, 4):
        found = _started(size, width, tokens, runs)
        taken = statistics.median(found[0]["seconds"])
        alone = alone or taken
        busiest = max(each["cpu"] for each in found)
        yield str(size), f"{taken:.2f}", f"{taken / alone:.2f}", f"{busiest:.2f}"


def main(
    width: Annotated[int, typer.Option(help="Width of the hidden states.")] = 256,
    tokens: Annotated[int, typer.Option(help="Rows of a reading, over all ranks.")] = 4096,
    runs: Annotated[int, typer.Option(help="Readings; the median counts.")] = 5,
    rank: Annotated[int, typer.Option(hidden=True)] = -1,
) -> None:
    """Read an equal number of rows on each number of ranks."""
    if rank >= 0:
        _read(width, tokens, runs)
        return
    print_table(
        f"One reading of {LAYERS} layers, width {width}, {tokens:,} rows",
        ("ranks", "reading, s", "of one rank's", "CPU of the busiest rank, s"),
        _rows(width, tokens, runs),
    )
    print_machine(f"medians of {runs}", "one thread to a rank")


if __name__ == "__main__":
    typer.run(main)
