import runpy
from pathlib import Path

import pytest

from geomon import read

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true")
def test_an_example_runs_and_its_record_and_curves_are_there(tmp_path, path):
    runpy.run_path(str(path))["main"](steps=2, folder=str(tmp_path))
    (record,) = tmp_path.rglob("readings.jsonl")
    readings = read(record)
    steps = [reading.step for reading in readings]
    assert steps in ([0], [0, 1])  # a callback knows the last one, which is read too
    assert all(reading.tokens == 4096 for reading in readings)
    assert readings.series("twonn/mean")[0] == steps
    # The Trainer's own events, and beside them those of geomon.
    boards = 2 if path.stem == "hf_trainer" else 1
    assert len(list(tmp_path.rglob("events.out.tfevents.*"))) == boards
    assert len(path.read_text().splitlines()) <= 50
