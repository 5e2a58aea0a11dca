import json
import math
import os
import signal
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geomon.record import FILE_NAME, Reading, Record, heads, layers_of, read

NUMBERS = st.floats(allow_nan=False, allow_infinity=False)


def reading(step: int, source: str = "inline", **values: float) -> Reading:
    return Reading(step, 1.0, 0.5, source, "train", 64, 1, "float32", values or {"a/mean": 1.0})


@given(values=st.dictionaries(st.text(min_size=1), NUMBERS), step=st.integers(0))
def test_a_line_gives_the_reading_back_to_the_last_bit(values, step):
    before = Reading(step, 1.5, 0.1, "probe", "eval", 3, 2, "bfloat16", values, ["a note"])
    line = before.line()
    assert "\n" not in line
    assert Reading.from_json(json.loads(line)) == before


def test_values_that_are_no_numbers_become_null():
    line = reading(0, x=math.nan, y=math.inf, z=1.0).line()
    assert json.loads(line)["values"] == {"x": None, "y": None, "z": 1.0}
    assert math.isnan(Reading.from_json(json.loads(line)).values["x"])


def test_record_goes_on_after_a_resume(tmp_path):
    record = Record(tmp_path)
    assert record.begin(0, {"model": "m"}) == set()
    record.write(reading(0))
    record.write(reading(5, "probe"))
    resumed = Record(tmp_path)
    assert resumed.begin(4, {"model": "m"}) == {(0, "inline"), (5, "probe")}
    resumed.write(reading(8))
    found = read(tmp_path)
    assert [r.step for r in found] == [0, 5, 8]
    assert [run["from_step"] for run in found.runs] == [0, 4]


def test_a_run_that_starts_over_keeps_the_old_record(tmp_path):
    for _ in range(3):
        record = Record(tmp_path)
        record.begin(0, {})
        record.write(reading(0))
        record.write(reading(1))
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["readings.1.jsonl", "readings.2.jsonl", FILE_NAME]
    assert all(len(read(tmp_path / name)) == 2 for name in names)


@pytest.mark.parametrize("torn", ['{"step": 3, "ti', '{"step": 3}', '{"run": {"a'])
def test_a_torn_last_line_is_passed_over_and_mended(tmp_path, torn):
    record = Record(tmp_path)
    record.begin(0, {})
    record.write(reading(0))
    with record.path.open("a") as file:
        file.write(torn)
    assert [r.step for r in read(tmp_path)] == [0]
    resumed = Record(tmp_path)
    resumed.begin(1, {})
    resumed.write(reading(2))
    assert [r.step for r in read(tmp_path)] == [0, 2]


def test_series_are_in_order_and_without_gaps(tmp_path):
    record = Record(tmp_path)
    record.begin(0, {})
    for step, value in ((0, 1.0), (4, math.nan), (2, 3.0)):
        record.write(reading(step, **{"t/mean": value}))
    assert read(tmp_path).series("t/mean") == ([0, 2], [1.0, 3.0])
    assert read(tmp_path).series("no such tag") == ([], [])


def test_heads_and_layers():
    values = {f"q/layer_{layer:02d}/head_{head}": 10.0 * layer + head
              for layer in (1, 2) for head in range(3)}  # fmt: skip
    assert heads(reading(0, **values), "q") == [[10, 11, 12], [20, 21, 22]]
    assert heads(reading(0, **values), "other") == []
    assert layers_of(values, "q") == [1, 2]


def test_bad_places_get_one_clear_line(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no record at .*readings\.jsonl"):
        read(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot be written"):
        Record(tmp_path / "file" / "inside")
    (tmp_path / FILE_NAME).write_text("no json\n")
    with pytest.raises(ValueError, match="line 1 of"):
        read(tmp_path)


_WRITER = """
import sys
from geomon.record import Reading, Record
record = Record(sys.argv[1])
record.begin(0, {})
step = 0
while True:
    values = {"x" * 50: 1.0 * step}
    record.write(Reading(step, 0.0, 0.0, "inline", "train", 1, 1, "float32", values))
    print(step, flush=True)
    step += 1
"""


def test_a_killed_process_loses_no_reading_that_was_shown(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", _WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "0\n"
    time.sleep(0.2)
    os.kill(process.pid, signal.SIGKILL)
    shown = [0, *map(int, process.stdout.read().splitlines()[:-1])]
    process.wait()
    process.stdout.close()
    assert len(shown) > 20
    assert [r.step for r in read(tmp_path)][: len(shown)] == shown
