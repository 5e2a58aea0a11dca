"""Trainings of an experiment run side by side, and none is made twice."""

import pytest

from geomon.record import Reading, Record
from recipes.study import (
    RunError,
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
        record.write(Reading(step, 0.0, 0.0, name, "eval", 8, 1, "float32", values))
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
