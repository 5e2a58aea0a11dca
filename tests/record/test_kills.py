"""Runs that are killed at random moments and go on: no reading is lost, doubled or torn."""

import os
import random
import signal
import time
from pathlib import Path

import pytest
from forks import Forks

from geomon import read

_KILLS = 2
_BACK = 2  # steps from the last checkpoint to the kill
# Says "begun" when a reading begins to be measured, and its step when it has been shown.
_RUN = """
import sys
import torch
from plain_models import CausalSelfAttention, language_model
from geomon import METRICS, Monitor, every

folder, first, stop, background = sys.argv[1:]
torch.manual_seed(0)
ids = torch.randint(0, 50, (3, 24))


class Shown:
    def write(self, reading):
        print(reading.step, flush=True)

    def close(self):
        pass


def begun(hidden):
    print("begun", flush=True)
    return hidden.mean()


model = language_model(CausalSelfAttention, "sdpa")
monitor = Monitor(
    model, metrics={"begun": begun, **METRICS}, tokens=64, schedule=every(1), budget=None,
    directory=folder, sinks=[Shown()], background=bool(background),
)
for step in range(int(first), int(stop)):
    with monitor(step):
        model(ids)
monitor.close()
"""


class Started:
    """A run, and what it says."""

    def __init__(self, forks: Forks, folder: Path, steps: range, background: str) -> None:
        program = folder.parent / "run.py"
        program.write_text(_RUN)
        self.said = folder.parent / "said"
        with self.said.open("w") as said:
            self.process = forks.start(
                str(program), folder, steps.start, steps.stop, background,
                environment={**os.environ}, stdout=said.fileno(), stderr=2,
            )  # fmt: skip

    def words(self) -> list[str]:
        return self.said.read_text().split()

    def shown(self) -> set[int]:
        return {int(word) for word in self.words() if word.isdigit()}

    def wait_for(self, count: int) -> None:
        """Until so many readings have been shown."""
        while len(self.shown()) < count:
            assert self.process.is_running()
            time.sleep(0.002)


@pytest.mark.slow
@pytest.mark.parametrize("background", ["", "background"])
def test_a_killed_run_loses_no_reading_and_doubles_none(forks, tmp_path, background):
    chance = random.Random(7)
    folder = tmp_path / "run"
    shown: set[int] = set()
    following = 0
    for kill in range(_KILLS):
        # A run that begins at 0 again would be a new one.
        first = max(min(following, 1), following - _BACK)
        run = Started(forks, folder, range(first, 10**6), background)
        run.wait_for(chance.randint(1, 3))
        began = time.perf_counter()
        run.wait_for(len(run.shown()) + 1)
        time.sleep(chance.random() * (time.perf_counter() - began))
        while kill == 0 and run.words()[-1] != "begun":  # the first one while it measures
            time.sleep(0.002)
        run.process.send_signal(signal.SIGKILL)
        run.process.wait(60)
        shown |= run.shown()
        steps = [reading.step for reading in read(folder)]
        assert sorted(steps) == list(range(max(steps) + 1))
        assert shown <= set(steps)
        following = max(steps) + 1
    last = Started(forks, folder, range(following - _BACK, following + 2), background)
    assert last.process.wait(120) == 0
    record = read(folder)
    assert record.mixed_at is None
    assert record.readings[-1].step == following + 1
    assert not list(folder.glob("readings.*.jsonl"))
    assert not list(folder.glob("arrays/.*.part"))
    for path in folder.glob("arrays/step_*.npz"):
        _, step, source = path.stem.split("_")
        assert "mean_query/layer_03" in record.arrays(int(step), source)
