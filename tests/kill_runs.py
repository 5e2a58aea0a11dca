"""A run that is killed again and again in the middle of a reading, and goes on each time.

Run as a program by `test_record.py`. It imports geomon once and forks: every start of the run is a
process of its own, that is killed with signal 9 at a random moment after a reading has begun.
"""

import os
import random
import select
import signal
import sys
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # a process with a pool of threads cannot be forked

from rank_runs import Decoder, ragged

from geomon import METRICS, Monitor, every, measure, read

KILLS = 20
BACK = 2  # steps from the last checkpoint to the kill


class Announced:
    """A sink that says which reading it was shown."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe

    def write(self, reading) -> None:
        os.write(self._pipe, f"shown {reading.step}\n".encode())

    def close(self) -> None: ...


def run(folder: str, pipe: int, start: int, stop: int) -> None:
    """The loop of a training, from a checkpoint at `start`."""
    model, (ids, mask) = Decoder(), ragged(0)

    def begun(hidden):
        os.write(pipe, b"begun\n")
        return hidden.mean()

    metrics = {"begun": begun, **METRICS}
    monitor = Monitor(
        model, metrics=metrics, tokens=64, schedule=every(1), directory=folder,
        sinks=[Announced(pipe)], strict=True,
    )  # fmt: skip
    for step in range(start, stop):
        with monitor(step):
            model(ids, attention_mask=mask)


def started(folder: str, start: int, stop: int) -> tuple[int, int]:
    """A process that runs, and the end of a pipe where it says what it does."""
    ours, its = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(ours)
        code = 1
        try:
            run(folder, its, start, stop)
            code = 0
        finally:
            os._exit(code)
    os.close(its)
    return process, ours


def said(pipe: int) -> str:
    """What is said next; "" when the process is gone."""
    ready, _, _ = select.select([pipe], [], [], 20)
    assert ready, "nothing was said for 20 s"
    return os.read(pipe, 65_536).decode()


def heard(pipe: int) -> str:
    """What is said next by a process that goes on."""
    text = said(pipe)
    assert text, "the run ended by itself"
    return text


def checked(folder: Path, shown: set[int]) -> int:
    """The first step that is not recorded: all before it are, once, and so is what was shown."""
    steps = [reading.step for reading in read(folder)]
    assert steps == list(range(len(steps))), steps
    assert shown <= set(steps), (shown, steps)
    return len(steps)


def main(folder: str) -> None:
    chance = random.Random(7)
    shown: set[int] = set()
    torn = halfway = first = 0
    measure(Decoder(), dict(zip(("ids", "attention_mask"), ragged(0), strict=True)))  # imports
    for _ in range(KILLS):
        process, pipe = started(folder, max(0, first - BACK), first + 1000)
        text = ""
        wanted = chance.randint(1, 3)  # readings that are shown before
        while text.count("shown") < wanted:
            text += heard(pipe)
        began = time.perf_counter()
        while text.count("shown") == wanted:
            text += heard(pipe)
        seconds = time.perf_counter() - began
        time.sleep(chance.random() * seconds)  # somewhere in the next reading
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        while more := said(pipe):
            text += more
        os.close(pipe)
        shown |= {int(line.split()[1]) for line in text.splitlines() if line.startswith("shown")}
        halfway += text.rstrip().endswith("begun")
        record = Path(folder) / "readings.jsonl"
        torn += not record.read_bytes().endswith(b"\n")
        first = checked(Path(folder), shown)
    process, pipe = started(folder, first - BACK, first + 2)
    _, status = os.waitpid(process, 0)
    assert status == 0
    assert checked(Path(folder), shown) == first + 2
    assert not list(Path(folder).glob("readings.*.jsonl"))  # it never started over
    print(f"{KILLS} kills, {halfway} while measuring, {torn} torn lines, {first + 2} readings")


if __name__ == "__main__":
    main(sys.argv[1])
