"""Whether memory of a training grows by looks at it: resident memory over many steps, on Linux."""

import multiprocessing
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.small_models import Sizes, make
from benchmarks.timing import print_machine, print_table
from geomon import Monitor, every

WAYS: dict[str, dict[str, Any] | None] = {
    "without geomon": None,
    "default": {},
    "a reading each third step": {"schedule": every(3)},
    "a check at each step": {"schedule": lambda step: step == 0, "checks": every(1)},
}
_OVER = 20  # single steps vary by 50 MB, the largest of 20 by 10
_SHOWN = 6  # numbers of a row
_MODEL = "Llama, sdpa"


def _resident() -> float:
    """Return the resident memory of this process in megabytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 1e6


def _train(way: str, steps: int, sizes: Sizes, sequences: int) -> Iterator[float]:
    """Train on one thread, and yield the memory at the end of each step."""
    torch.set_num_threads(1)
    model, batch = make(_MODEL, sizes, sequences)
    optimizer, options = torch.optim.AdamW(model.parameters(), 1e-3), WAYS[way]
    with tempfile.TemporaryDirectory() as folder:
        monitor = None if options is None else Monitor(model, directory=folder, **options)
        if monitor is not None:
            monitor.expect_end(steps - 1)
        for step in range(steps):
            with nullcontext() if monitor is None else monitor(step):
                logits = model(**batch).logits
                loss = logits.square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            del logits, loss
            yield _resident()
        if monitor is not None:
            monitor.close()


def _row(way: str, steps: int, sizes: Sizes, sequences: int) -> list[str]:
    """Return the largest memory of the last steps before each of a few steps."""
    used = [*_train(way, steps, sizes, sequences)]
    ends = [steps * number // _SHOWN for number in range(1, _SHOWN + 1)]
    return [way, *(f"{max(used[max(0, end - _OVER) : end]):.0f}" for end in ends)]


def main(
    steps: Annotated[int, typer.Option(min=_SHOWN, help="Steps of each training.")] = 600,
    layers: Annotated[int, typer.Option(help="Number of blocks.")] = 6,
    width: Annotated[int, typer.Option(help="Width of the hidden states.")] = 128,
    length: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 128,
    sequences: Annotated[int, typer.Option(help="Sequences of a batch.")] = 32,
) -> None:
    """Print resident memory over a training, each in a process of its own."""
    given = steps, Sizes(layers, width, length), sequences
    ends = [steps * number // _SHOWN for number in range(1, _SHOWN + 1)]

    def rows() -> Iterator[list[str]]:
        for way in WAYS:
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as alone:
                yield alone.submit(_row, way, *given).result()

    print_table(
        f"Largest resident memory of the {_OVER} steps before a step, MB; {layers} layers of width "
        f"{width}, {sequences} x {length} tokens",
        ("", *(f"step {end:,}" for end in ends)),
        rows(),
    )
    print_machine("one thread")


if __name__ == "__main__":
    typer.run(main)
