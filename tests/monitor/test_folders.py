"""The folder of a run is moved or removed while it goes on, or wanted by several runs."""

import logging
import os
import shutil

import pytest
import torch
from torch.utils.tensorboard import SummaryWriter

from geomon import Monitor, TensorBoard, read, select
from support.loggers import events_of
from support.models import PlainDecoder, batch

FEW = {"metrics": select("variance"), "tokens": 16, "schedule": 1}


class Run:
    """A training, and the folder where it is recorded."""

    def __init__(self, folder, **options):
        self.model, self.folder = PlainDecoder(width=8, layers=1, heads=2), folder
        self.monitor = Monitor(self.model, directory=folder, **FEW, **options)

    def step(self, *steps):
        for step in steps:
            with self.monitor(step), torch.no_grad():
                self.model(batch(8, 4))


def steps(path):
    return [reading.step for reading in read(path)]


def move(run):
    run.folder.rename(run.folder.with_name("moved"))


def remove(run):
    shutil.rmtree(run.folder)


def remove_the_file(run):
    (run.folder / "readings.jsonl").unlink()


def replace(run):
    """Put the record of another run there."""
    other = Run(run.folder.with_name("other"))
    other.step(7)
    other.monitor.close()
    os.replace(other.folder / "readings.jsonl", run.folder / "readings.jsonl")


def begin_another(run):
    run.other = Run(run.folder)
    run.other.step(0)


def restore(run):
    """Put a copy in its place, as a backup does; it is the run's own."""
    copied = run.folder / "copied"
    shutil.copy(run.folder / "readings.jsonl", copied)
    os.replace(copied, run.folder / "readings.jsonl")


# An accident before step 2; steps by file in the end; the file that holds steps 2 and 3, in words.
ACCIDENTS = {
    "moved": (move, {"moved/readings": [0, 1], "run/readings": [2, 3]}, "run/readings"),
    "removed": (remove, {"run/readings": [2, 3]}, "run/readings"),
    "without its file": (remove_the_file, {"run/readings": [2, 3]}, "run/readings"),
    "with another file": (
        replace, {"run/readings": [7], "run/readings.1": [2, 3]}, "run/readings.1",
    ),
    "taken by a later monitor": (
        begin_another, {"run/readings": [0], "run/readings.1": [0, 1], "run/readings.2": [2, 3]},
        "run/readings.2",
    ),
    "restored": (restore, {"run/readings": [0, 1, 2, 3]}, None),
}  # fmt: skip


@pytest.mark.parametrize("name", ACCIDENTS)
def test_a_folder_that_changes_while_a_run_goes_on_is_said_and_no_reading_is_lost(
    tmp_path, caplog, name
):
    happen, found, place = ACCIDENTS[name]
    run = Run(tmp_path / "run")
    run.step(0, 1)
    happen(run)
    caplog.clear()
    run.step(2, 3)
    run.monitor.close()
    assert {name: steps(tmp_path / f"{name}.jsonl") for name in found} == found
    warned = [text for text in caplog.messages if "moved, deleted or taken" in text]
    assert len(warned) == (place is not None)
    for text in warned:
        new = f"from step 2 on, the readings of this run are in a new file, {tmp_path}/{place}"
        assert text.startswith(f"{run.folder}/readings.jsonl was ")
        assert text.endswith(f"{new}.jsonl")
    assert read(run.monitor.path).runs[-1]["model"] == "PlainDecoder"


@pytest.mark.parametrize("first", [0, 1])
def test_two_monitors_in_one_folder_are_refused_at_the_first_step(tmp_path, first):
    runs = [Run(tmp_path / "run"), Run(tmp_path / "x" / ".." / "run")]
    runs[first].step(0) if first else None
    with pytest.raises(ValueError, match=r"two monitors .* in directory=.*/run' at once: give"):
        runs[0].step(0)
    runs[1].monitor.close()
    runs[0].step(5)  # it is alone now


def test_a_monitor_that_a_notebook_makes_again_takes_the_folder(tmp_path):
    """The first one was not closed, and is still referred to by a traceback."""
    first, second = Run(tmp_path), None
    first.step(0, 1)
    second = Run(tmp_path)
    second.step(0, 1, 2)
    second.monitor.close()
    assert steps(tmp_path) == [0, 1, 2]
    assert steps(tmp_path / "readings.1.jsonl") == [0, 1]


def test_a_second_run_in_a_folder_says_where_the_first_is(tmp_path, caplog):
    caplog.set_level(logging.INFO, "geomon")
    for number in range(3):
        caplog.clear()
        run = Run(tmp_path)
        run.step(0)
        run.monitor.close()
        kept = [text for text in caplog.messages if "earlier run" in text]
        name = f"{tmp_path}/readings.jsonl holds an earlier run, which is kept as readings."
        assert kept == [f"{name}{number}.jsonl"] * (number > 0)


@pytest.mark.parametrize("is_shared", [False, True])
def test_tensorboard_keeps_the_runs_of_a_folder_apart_and_joins_a_resume(
    tmp_path, caplog, is_shared
):
    """The training's own files are no run of geomon's."""
    SummaryWriter(tmp_path).close()
    sinks, warned = [TensorBoard(tmp_path, pictures=False, detail=["variance"])], []
    for first in (0, 0, 2, 0):
        caplog.clear()
        sinks = sinks if is_shared else [TensorBoard(tmp_path, pictures=False, detail=["variance"])]
        run = Run(tmp_path, sinks=sinks)
        run.step(first, first + 1)
        run.monitor.close()
        warned.append([text for text in caplog.messages if "TensorBoard" in text])
    found = {
        name: [step for step, _ in events_of(tmp_path / name)["~geomon/variance"]]
        for name in ("", "run_2", "run_3")
    }
    assert found == {"": [0, 1], "run_2": [0, 1, 2, 3], "run_3": [0, 1]}
    assert [len(texts) for texts in warned] == [0, 1, 0, 1]
    assert warned[1][0].endswith(f"the files of this one are in {tmp_path / 'run_2'}")
