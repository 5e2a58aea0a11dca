"""Trainings of an experiment run side by side, and none is made twice."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tagged import reading_of

import recipes
from geomon.record import Record, read
from geomon.record.arrays import ArrayPlace
from recipes.study import (
    RunError,
    begin_training,
    finish_training,
    is_finished,
    mark_finished,
    new_folder,
    read_kinds,
    run_side_by_side,
    seconds_of_kinds,
    seconds_on_two_cores,
    seed_folder,
    seed_folders,
    train_kinds,
)


def test_a_complete_training_is_known_by_its_settings(tmp_path):
    settings = {"seed": 0, "steps": 3, "size": {"layers": 2}}
    assert not is_finished(tmp_path / "a", settings)
    mark_finished(tmp_path / "a", settings, 1.5)
    assert is_finished(tmp_path / "a", dict(settings))
    with pytest.raises(RunError, match=r"another size, steps: choose another folder by --out"):
        is_finished(tmp_path / "a", settings | {"steps": 4, "size": {"layers": 3}})


def leave_broken_off(folder) -> None:
    """Leave the records and arrays of two trainings that did not reach their ends."""
    reading = reading_of({"twonn/mean": 2.0}, 0)
    for _ in range(2):  # the second puts the record of the first aside
        record = Record(folder)
        record.begin(0, {})
        record.write(reading)
        record.write_arrays(reading, {ArrayPlace("", "mean_query", 1): np.ones(3)})
        record.close()


def test_a_training_that_was_broken_off_leaves_nothing_to_the_next_one(tmp_path):
    for folder in (tmp_path / "a", tmp_path / "a" / "held_out"):
        leave_broken_off(folder)
    own = [tmp_path / "a" / "notes.txt", tmp_path / "a" / "arrays" / "mine.npz"]
    for path in own:
        path.write_text("of the user")
    assert len(list((tmp_path / "a").rglob("*.npz"))) == 5
    other = tmp_path / "b"
    leave_broken_off(other)
    settings = {"steps": 3}
    began = begin_training(tmp_path / "a", settings)
    assert began is not None
    assert sorted(path for path in (tmp_path / "a").rglob("*") if path.is_file()) == sorted(own)
    assert len(read(other)) == 1
    finish_training(tmp_path / "a", settings, began)
    assert 0 <= seconds_on_two_cores([tmp_path / "a"]) < 60
    leave_broken_off(tmp_path / "a")
    assert begin_training(tmp_path / "a", settings) is None  # what is complete is kept
    assert len(read(tmp_path / "a")) == 1


def test_the_records_of_a_training_that_goes_on_elsewhere_are_not_deleted(tmp_path):
    leave_broken_off(tmp_path)
    program = f"""
from geomon.record import Record
record = Record({str(tmp_path)!r})
print(flush=True)
input()
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        process.stdout.readline()
        with pytest.raises(RunError, match=r"is in use, process .*: choose another folder"):
            begin_training(tmp_path, {})
        process.communicate(b"\n")
    assert len(read(tmp_path)) == 1


def test_every_experiment_begins_its_trainings_by_the_one_mechanism():
    own_way = re.compile(r"\b(is_finished|mark_finished|unlink|rmtree)\b")
    for path in Path(recipes.__file__).parent.glob("*/*.py"):
        if path.parent.name not in ("study", "enwik8"):
            assert not own_way.search(path.read_text()), path


def test_folders_are_counted_up(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("x", "x-2", "x-3"):
        folder = new_folder("x")
        assert folder.name == name
        folder.mkdir(parents=True)


@pytest.mark.parametrize("processes", [1, 2])
def test_every_job_is_done_once(tmp_path, processes):
    jobs = [(tmp_path / str(number), {"number": number}, 2.0) for number in range(3)]
    reported = []
    run_side_by_side(
        mark_finished, jobs, processes=processes, report=lambda *done: reported.append(done)
    )
    assert reported == [(1, 3), (2, 3), (3, 3)]
    assert all(is_finished(folder, settings) for folder, settings, _ in jobs)
    assert seconds_on_two_cores(folder for folder, _, _ in jobs) == 3.0


def test_the_first_error_ends_the_experiment(tmp_path):
    jobs = [(tmp_path, {"a": 1}), (tmp_path, {"a": 2})]
    mark_finished(tmp_path, {"a": 2}, 1.0)
    with pytest.raises(RunError, match="another a"):
        run_side_by_side(is_finished, jobs, processes=1, report=print)


def test_a_function_that_other_processes_do_not_have_is_refused(tmp_path):
    def own(*arguments):
        raise AssertionError

    own.__module__ = "recipes.x.__main__"  # as a command's own function is called in a test
    with pytest.raises(ValueError, match="main module"):
        run_side_by_side(own, [(1,)], processes=1, report=print)


def test_each_kind_is_trained_from_each_seed_and_read_in_order(tmp_path):
    def train(name, step, seed, folder):
        record = Record(folder)
        record.begin(0, {})
        values = {"seed/mean": float(seed)}
        record.write(reading_of(values, step, name))
        record.close()
        mark_finished(folder, {"seed": seed}, 2.0 + (name == "b"))

    made = []
    train_kinds(
        train, ("a", "b"), 7, seeds=11, folder=tmp_path, processes=1,
        report=lambda *done: made.append(done),
    )  # fmt: skip
    assert made[-1] == (22, 22)
    assert seed_folders(tmp_path) == [seed_folder(tmp_path, seed) for seed in range(11)]
    runs = read_kinds(tmp_path, ("b", "a"))
    assert list(runs) == ["b", "a"]
    for name, found in runs.items():
        assert [(run[0].source, run[0].step) for run in found] == [(name, 7)] * 11
        assert [run[0].values["seed/mean"] for run in found] == list(range(11))
    assert seconds_of_kinds(tmp_path, ("a", "b")) == 11 * (2 + 3) / 2
    assert read_kinds(tmp_path / "empty", ("a",)) == {"a": []}
