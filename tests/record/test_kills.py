"""Runs that are killed between two readings and go on: no reading is lost, doubled or torn."""

import os
import signal

import pytest

from geomon import read

_BACK = 2  # steps from the last checkpoint to the kill
# Says the step of each reading that is shown; after the third it lives for a share of the time that
# a reading takes.
_RUN = """
import signal, sys, time
import torch
from support.plain_models import CausalSelfAttention, language_model
from geomon import METRICS, Monitor, every

folder, first, stop, background, share = sys.argv[1:]
torch.manual_seed(0)
ids, shown = torch.randint(0, 50, (3, 24)), []


class Shown:
    def write(self, reading):
        print(reading.step, flush=True)
        shown.append(time.perf_counter())
        if share and len(shown) == 3:
            signal.setitimer(signal.ITIMER_REAL, float(share) * (shown[2] - shown[1]))

    def close(self):
        pass


model = language_model(CausalSelfAttention, "sdpa")
monitor = Monitor(
    model, metrics=METRICS, tokens=64, schedule=every(1), budget=None, directory=folder,
    sinks=[Shown()], background=bool(background),
)
for step in range(int(first), int(stop)):
    with monitor(step):
        model(ids)
monitor.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize("background", ["", "background"])
def test_a_killed_run_loses_no_reading_and_doubles_none(forks, tmp_path, background):
    folder, program, said = tmp_path / "run", tmp_path / "run.py", tmp_path / "said"
    program.write_text(_RUN)
    first, shown = 0, set()
    for share in (0.3, 0.8, ""):
        stop = 10**6 if share else first + _BACK + 2
        with said.open("w") as output:
            process = forks.start(
                str(program), folder, first, stop, background, share,
                environment={**os.environ}, stdout=output.fileno(), stderr=2,
            )  # fmt: skip
        assert process.wait(120) == (-signal.SIGALRM if share else 0)
        shown |= set(map(int, said.read_text().split()))
        record = read(folder)
        steps = [reading.step for reading in record]
        assert sorted(steps) == list(range(max(steps) + 1))
        assert shown <= set(steps)
        first = max(steps) + 1 - _BACK  # above 0: a run that begins at 0 again would be a new one
    assert (record.mixed_at, steps[-1]) == (None, stop - 1)
    assert not list(folder.glob("readings.*.jsonl"))
    assert not list(folder.glob("arrays/.*.part"))
    for path in folder.glob("arrays/step_*.npz"):
        _, step, source = path.stem.split("_")
        assert "mean_query/layer_03" in record.arrays(int(step), source)
