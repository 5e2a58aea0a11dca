"""Trainings of an experiment run side by side, and none is made twice."""

import pytest

from recipes.study import (
    RunError,
    is_finished,
    mark_finished,
    new_folder,
    run_side_by_side,
    seconds_on_two_cores,
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
