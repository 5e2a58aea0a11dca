"""Runs that are killed at random moments, and go on: python -m benchmarks.kills.

Every start of a run is a process of its own, or two ranks, killed with signal 9 at a random moment
and started again two steps before the last reading of the record, as from a checkpoint. After each
kill the record must hold every reading that was shown, none twice, and no torn line but the last.

geomon is imported once and the runs are forked.
"""

import os
import random
import select
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

os.environ["OMP_NUM_THREADS"] = "1"  # a process with a pool of threads cannot be forked

import torch
import torch.distributed as dist
import torch.nn.functional as F
import typer
from torch import Tensor, nn

from geomon import METRICS, Monitor, Reading, every, measure, read
from geomon.record import FILE_NAME

BACK = 2  # steps from the last checkpoint to the kill
LENGTH, WIDTH, VOCABULARY = 24, 16, 40
# By name: number of ranks, and whether readings are measured in the background. Two ranks whose
# rows are gathered measure at once, so in the background the first one measures its own.
KINDS = {
    "inline": (1, False),
    "background": (1, True),
    "inline, two ranks": (2, False),
    "background, two ranks": (2, True),
}


class Block(nn.Module):
    """Attention and a projection."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.v_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Causal attention with two heads."""
        q, k, v = (
            layer(x).unflatten(-1, (2, -1)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + y.transpose(1, 2).flatten(2).tanh()


class Decoder(nn.Module):
    """Three blocks on tokens and places."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        """Hidden states, [sequences, length, width]."""
        x: Tensor = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return x


class Announced:
    """A sink that says which reading it was shown."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe

    def write(self, reading: Reading) -> None:
        """Say it."""
        os.write(self._pipe, f"shown {reading.step}\n".encode())

    def close(self) -> None:
        """Do nothing."""


@dataclass
class Report:
    """What a campaign of one kind found."""

    kills: int = 0
    while_measuring: int = 0
    torn: int = 0
    readings: int = 0
    left_out: int = 0


def train(
    folder: str, pipe: int, first: int, stop: int, *, rank: int, ranks: int, background: bool
) -> None:
    """Train from a checkpoint at a step, and read every step."""
    if ranks > 1:
        store = os.environ["KILLS_STORE"]
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    generator = torch.Generator().manual_seed(rank)
    ids = torch.randint(0, VOCABULARY, (3, LENGTH), generator=generator)

    def begun(hidden: Tensor) -> Tensor:
        os.write(pipe, b"begun\n")
        return hidden.mean()

    model = Decoder()
    monitor = Monitor(
        model, metrics={"begun": begun, **METRICS}, tokens=64, schedule=every(1), budget=None,
        directory=folder, sinks=[Announced(pipe)], background=background, gather=not background,
    )  # fmt: skip
    for step in range(first, stop):
        with monitor(step):
            model(ids)
    monitor.close()


class Started:
    """A run that goes on, of one process or several, and the end of a pipe where it says so.

    Args:
        folder: Folder of the record.
        first: First step.
        stop: Step before which it ends by itself.
        kind: Name of the kind of run.
    """

    def __init__(self, folder: Path, first: int, stop: int, kind: str) -> None:
        ranks, background = KINDS[kind]
        os.environ["KILLS_STORE"] = f"file://{folder}.store.{time.time_ns()}"
        self.pipe, its = os.pipe()
        self.processes = []
        for rank in range(ranks):
            process = os.fork()
            if process == 0:
                os.close(self.pipe)
                code = 1
                try:
                    train(
                        str(folder), its, first, stop,
                        rank=rank, ranks=ranks, background=background,
                    )  # fmt: skip
                    code = 0
                finally:
                    os._exit(code)
            self.processes.append(process)
        os.close(its)

    def hear(self) -> str:
        """Wait for what is said next; "" when every process is gone."""
        ready, _, _ = select.select([self.pipe], [], [], 60)
        if not ready:
            raise AssertionError("nothing was said for 60 s")
        return os.read(self.pipe, 65_536).decode()

    def hear_until(self, done: Callable[[str], bool], text: str = "") -> str:
        """Collect what is said until it satisfies a condition."""
        while not done(text):
            more = self.hear()
            if not more:
                raise AssertionError(f"the run ended by itself after {text[-200:]!r}")
            text += more
        return text

    def kill(self, pauses: list[float]) -> str:
        """Kill one process after another; returns what was still said."""
        for process, pause in zip(self.processes, pauses, strict=True):
            time.sleep(pause)
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
        text = ""
        while more := self.hear():
            text += more
        os.close(self.pipe)
        return text

    def wait(self) -> None:
        """Wait until it has ended by itself, well."""
        for process in self.processes:
            status = os.waitpid(process, 0)[1]
            assert status == 0, f"a process ended with {status}"
        os.close(self.pipe)


def check(folder: Path, shown: set[int], *, deaths: int = 0) -> int:
    """Check that all steps up to the last are recorded once, and what was shown; returns the next.

    In the background some of the last readings may not have been recorded, or shown: they are made
    again after the resume, since the checkpoint is older. Where one rank dies before the other, the
    reading that they were making together is left out, which is no loss of what was made.
    """
    record = read(folder)
    steps = [reading.step for reading in record]
    assert len(set(steps)) == len(steps), f"doubled: {steps}"
    assert shown <= set(steps), f"shown and lost: {sorted(shown - set(steps))}"
    missing = set(range(max(steps))) - set(steps)
    assert len(missing) <= deaths, f"lost: {sorted(missing)}"
    assert record.mixed_at is None, f"mixed from line {record.mixed_at}"
    for path in (folder / "arrays").glob("step_*.npz"):
        step, source = int(path.stem.split("_")[1]), path.stem.split("_")[2]
        assert "mean_query/layer_03" in record.arrays(step, source), f"{path} is not whole"
        assert step in steps, f"arrays of step {step} without its reading"
    return max(steps) + 1


def resumed(first: int) -> int:
    """The step of the last checkpoint; a run that begins at 0 again would be a new one."""
    return max(min(first, 1), first - BACK)


def run(folder: Path, kind: str, kills: int, seed: int) -> Report:
    """Kill a run of one kind again and again; raises an AssertionError where something is lost."""
    chance = random.Random(seed)
    shown: set[int] = set()
    report = Report()
    first = 0
    for _ in range(kills):
        started = Started(folder, resumed(first), first + 10_000, kind)
        wanted = chance.randint(1, 3)  # readings that are shown before
        text = started.hear_until(lambda text: text.count("shown") >= wanted)  # noqa: B023
        began = time.perf_counter()
        count = text.count("shown")
        text = started.hear_until(lambda text: text.count("shown") > count, text)  # noqa: B023
        seconds = time.perf_counter() - began
        chance.shuffle(started.processes)  # the first rank dies first, or another
        pauses = [chance.random() * seconds for _ in started.processes]  # within the next reading
        text += started.kill(pauses)
        lines = text.splitlines()
        shown |= {int(line.split()[1]) for line in lines if line.startswith("shown")}
        report.kills += 1
        report.while_measuring += lines[-1] == "begun"
        report.torn += not (folder / FILE_NAME).read_bytes().endswith(b"\n")
        deaths = report.kills if len(started.processes) > 1 else 0
        first = check(folder, shown, deaths=deaths)
    last = Started(folder, resumed(first), first + 2, kind)
    last.wait()
    assert check(folder, shown, deaths=deaths) == first + 2
    report.readings = len(read(folder))
    report.left_out = first + 2 - report.readings
    assert not list(folder.glob("readings.*.jsonl")), "it started over"
    assert not list(folder.glob("arrays/.*.part")), "what was begun is still there"
    return report


def main(
    kills: Annotated[int, typer.Option(help="Number of kills, over all kinds of runs.")] = 200,
    seed: Annotated[int, typer.Option(help="Seed of the moments.")] = 7,
) -> None:
    """Kill runs, and check what they have recorded."""
    torch.set_num_threads(1)
    measure(Decoder(), torch.zeros(1, LENGTH, dtype=torch.long))  # imports
    for index, kind in enumerate(KINDS):
        count = kills * (index + 1) // len(KINDS) - kills * index // len(KINDS)
        with tempfile.TemporaryDirectory() as place:
            found = run(Path(place, "run"), kind, count, seed + index)
        print(
            f"{kind}: {found.kills} kills, {found.while_measuring} while measuring, "
            f"{found.torn} torn lines, {found.readings} readings, none lost or doubled, "
            f"{found.left_out} left out as one rank had died",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(typer.run(main))
