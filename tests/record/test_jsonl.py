import json
import math
import os
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from geomon.note import Note
from geomon.record import (
    FILE_NAME,
    Course,
    Follower,
    RaisedAlert,
    Reading,
    Readings,
    Record,
    read,
)
from support.readings import reading_of


def reading(step: int, source: str = "inline") -> Reading:
    return reading_of({"a/mean": 1.0}, step, source, time=1.0)


def steps(record: Readings) -> list[int]:
    return [each.step for each in record]


def test_a_run_is_described_with_its_first_reading(tmp_path):
    record, began = Record(tmp_path), time.time()
    record.begin(0, {"metrics": ["a"], "model": 200_000 * "x"})  # longer than is read at once
    assert record.path.read_text() == ""
    record.write(reading(0))
    with record.path.open("a") as file:
        file.write('{"run": {"a')
    resumed = Record(tmp_path)
    resumed.begin(6, {"metrics": ["a", "b"]})
    resumed.write(reading(8))
    found = read(tmp_path)
    described = [(run["from_step"], run["metrics"]) for run in found.runs]
    assert described == [(0, ["a"]), (6, ["a", "b"])]
    assert not any("rewound_to" in run for run in found.runs)
    assert began <= found.runs[0]["time"] <= found.runs[1]["time"] <= time.time()
    kinds = ["run" in json.loads(line) for line in record.path.read_text().splitlines()]
    assert kinds == [True, False, True, False]


@pytest.mark.parametrize("text", ["notes of mine", "a\r\nb", '{"other": 1}', "5"])
def test_a_file_of_somebody_elses_is_not_cut_where_it_has_no_last_line_end(tmp_path, text):
    (tmp_path / FILE_NAME).write_bytes(text.encode())
    record = Record(tmp_path)
    with pytest.raises(ValueError, match="is not a line of a record"):
        record.begin(0, {})
    record.write(reading(0))
    assert (tmp_path / "readings.1.jsonl").read_bytes() == text.encode()


def test_records_below_a_folder_that_holds_none_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"with a readings.jsonl in it$"):
        read(tmp_path)
    for name in ("b/version_0", "a", "c/d/too_deep"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / FILE_NAME).touch()
    with pytest.raises(FileNotFoundError, match=f"; there is one in {tmp_path}/a, {tmp_path}/b/v"):
        read(tmp_path)
    for number in range(9):
        (tmp_path / f"seed_{number}").mkdir()
        (tmp_path / f"seed_{number}" / FILE_NAME).touch()
    with pytest.raises(FileNotFoundError, match=r"in (\S+, ){3}\S+$"):
        read(tmp_path)


def test_facts_of_a_run_that_json_does_not_know_are_written_as_text(tmp_path):
    record = Record(tmp_path)

    class Silent:
        def __repr__(self):
            raise RuntimeError("no text")

    numbers = {"largest": 2**63 - 1, "larger": 2**63}  # which some JSON readers reject
    record.begin(0, {"seed": np.int64(3), "schedule": object, "other": Silent(), **numbers})
    record.write(reading(0))
    run = read(tmp_path).runs[0]
    assert (run["seed"], run["other"]) == ("3", "<Silent>")
    assert (run["largest"], run["larger"]) == (2**63 - 1, str(2**63))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no pipes")
@pytest.mark.parametrize("name", [FILE_NAME, ".readings.lock"])
def test_a_pipe_is_no_record(tmp_path, name):
    """To open one takes until somebody writes into it."""
    os.mkfifo(tmp_path / name)
    with pytest.raises(ValueError, match=f"{name}: it is not a regular file"):
        Record(tmp_path)
    if name == FILE_NAME:
        with pytest.raises(FileNotFoundError, match="no record"):
            read(tmp_path)
        with pytest.raises(ValueError, match="expected a regular file"):
            Follower(tmp_path).look()


@pytest.mark.parametrize(
    ("order", "mixed"),
    [
        (["run", 0, 1, 2], None),
        (["run", 0, 2, "run", 1, 3], None),  # another schedule after a resume
        (["run", 0, (0, "probe"), 1], None),
        (["run", "run", 0, 0, 5, 5], 4),
        (["run", 0, 10, 20, "run", 15, 30, 16], 8),  # the earlier process still writes
    ],
)
def test_pages_can_tell_that_two_runs_wrote_at_once(tmp_path, order, mixed):
    lines = [
        '{"run": {}}' if item == "run" else reading(*np.atleast_1d(np.array(item, object))).line()
        for item in order
    ]
    (tmp_path / FILE_NAME).write_text("".join(f"{line}\n" for line in lines))
    assert read(tmp_path).mixed_at == mixed
    assert read(tmp_path).of_stack().mixed_at == mixed


REMOTE, NO_PATH = r"is remote storage, .* directory='runs/a'", r"is not a path \(.*pass a folder"


@pytest.mark.parametrize(
    ("directory", "words"),
    [
        ("s3://bucket/run", f"'s3://bucket/run' {REMOTE}"), ("gs://b", f"'gs://b' {REMOTE}"),
        ("memory://b/run", f"'memory://b/run' {REMOTE}"),
        (Path("memory://b/run"), f"'memory://b/run' {REMOTE}"), ("az:/b", f"'az://b' {REMOTE}"),
        ("\0", NO_PATH), ("a\0b", NO_PATH), ("\ud800", NO_PATH),
    ],
)  # fmt: skip
@pytest.mark.parametrize("use", [Record, read, lambda folder: Follower(Path(folder))])
def test_a_remote_folder_is_refused_in_one_sentence(tmp_path, monkeypatch, directory, words, use):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=words) as refusal:
        use(directory)
    assert "\n" not in str(refusal.value)
    assert not list(tmp_path.iterdir())


def test_a_folder_may_be_named_as_a_file_of_this_machine(tmp_path):
    Record(f"file://{tmp_path}/a%20b").close()
    assert (tmp_path / "a b" / FILE_NAME).is_file()
    assert steps(read(f"file://{tmp_path}/a%20b")) == []


SURROGATE = "fichier\udce9.txt"


def test_text_that_is_not_utf_8_makes_no_record_unreadable(tmp_path):
    name = SURROGATE
    record = Record(tmp_path)
    record.begin(0, {"model": name, name: 1, "deep": {"a": [name, {name: (1.5, None, True)}]}})
    whole = reading_of(
        {f"m{name}/layer_01/head_0": 1.0, f"m{name}/mean": math.nan, f"training/{name}": 2.0},
        dtype=name, notes=[name],
    )  # fmt: skip
    record.write(whole)
    course = Course(name, (0, 1), (1.0, math.nan))
    record.write_alert(RaisedAlert(1, 1.0, name, Note(name, name, advice=name), (course,)))
    record.close()
    found = read(tmp_path)
    shown = "fichier\\udce9.txt"
    assert found.runs[0]["model"] == shown
    assert found.runs[0][shown] == 1
    assert found.runs[0]["deep"] == {"a": [shown, {shown: [1.5, None, True]}]}
    assert found[0].values[f"m{shown}/layer_01/head_0"] == 1.0
    assert math.isnan(found[0].values[f"m{shown}/mean"])
    assert found[0].training == {shown: 2.0}
    assert (found[0].dtype, found[0].words()) == (shown, [shown])
    (alert,) = found.raised
    assert (alert.words(), alert.courses[0].tag) == (shown, shown)


@given(st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(st.characters()),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters()) | st.integers(), inner)
    | st.tuples(inner, inner) | st.sets(st.integers()), max_leaves=8,
))  # fmt: skip
def test_any_facts_leave_a_record_that_can_be_read(tmp_path_factory, fact):
    record = Record(tmp_path_factory.mktemp("run"))
    record.begin(0, {"fact": fact})
    record.write(reading(0))
    record.close()
    assert steps(read(record.path)) == [0]


@pytest.mark.parametrize("line", ['{"check": {"step": 1}}', '{"x":[]}'])
def test_lines_that_only_a_newer_geomon_knows_are_passed_over(tmp_path, line):
    def write(version):
        run = json.dumps({"run": {"geomon": version}})
        lines = (run, reading(0).line(), line, reading(1).line())
        (tmp_path / FILE_NAME).write_text("".join(f"{each}\n" for each in lines))

    write("9999.0")
    found = read(tmp_path)
    assert (steps(found), found.mixed_at) == ([0, 1], None)
    assert "newer geomon (9999.0)" in found.remarks()[0]
    write("0.0.1")
    with pytest.raises(ValueError, match="line 3 of"):
        read(tmp_path)
