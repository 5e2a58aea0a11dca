import os

import pytest

from geomon.record import FILE_NAME, Follower


@pytest.mark.parametrize("name", ["", FILE_NAME])
def test_the_follower_reads_on_where_it_stopped(make_readings, tmp_path, name):
    readings = make_readings()
    follower = Follower(tmp_path / name)
    assert follower.look() == []  # the record does not exist yet
    path = tmp_path / FILE_NAME
    with path.open("a") as file:
        file.write('{"run": {}}\n' + readings[0].line() + "\n" + readings[1].line()[:50])
    assert [reading.step for reading in follower.look()] == [0]  # the torn line is left for later
    with path.open("a") as file:
        file.write(readings[1].line()[50:] + "\n")
    assert [reading.step for reading in follower.look()] == [16]
    assert follower.look() == []
    assert len(follower.readings()) == 2


def test_the_follower_begins_anew_with_a_new_record(make_readings, tmp_path):
    readings = make_readings()
    path = tmp_path / FILE_NAME
    path.write_text("".join(reading.line() + "\n" for reading in readings))
    follower = Follower(tmp_path)
    assert len(follower.look()) == len(readings)
    path.rename(tmp_path / "readings.1.jsonl")
    path.write_text(readings[0].line() + "\n")
    assert [reading.step for reading in follower.look()] == [0]
    assert len(follower.readings()) == 1


@pytest.mark.parametrize("errors", [[0.2], [0.2] * 3, [0.2] * 6, [0.2, 0.1, 0.1]], ids=str)
def test_the_follower_begins_anew_with_a_file_written_in_its_place(make_readings, tmp_path, errors):
    first, second = make_readings(), make_readings(error=0.2)
    path = tmp_path / FILE_NAME
    path.write_text("".join(reading.line() + "\n" for reading in first.readings[:3]))
    follower = Follower(tmp_path)
    assert len(follower.look()) == 3
    inode = path.stat().st_ino
    lines = [(second if error == 0.2 else first)[n].line() for n, error in enumerate(errors)]
    path.write_text("".join(line + "\n" for line in lines))
    assert path.stat().st_ino == inode
    assert [reading.values["twonn/mean/margin"] for reading in follower.look()] == errors
    assert len(follower.readings()) == len(errors)
    assert follower.readings().mixed_at is None


def test_the_follower_goes_on_with_a_file_whose_time_alone_has_changed(make_readings, tmp_path):
    path = tmp_path / FILE_NAME
    path.write_text("".join(reading.line() + "\n" for reading in make_readings()))
    follower = Follower(tmp_path)
    before = follower.look()
    os.utime(path, (1, 1))
    assert follower.look() == []
    assert follower.readings().readings == before


def test_the_follower_counts_lines_and_tells_runs_that_write_at_once(make_readings, tmp_path):
    readings = make_readings()
    path = tmp_path / FILE_NAME
    follower = Follower(tmp_path)
    for index in (0, 1, 0):
        with path.open("a") as file:
            file.write(readings[index].line() + "\n")
        follower.look()
    assert follower.readings().mixed_at == 3
    with path.open("a") as file:
        file.write("hello\n")
    with pytest.raises(ValueError, match="line 4 of"):
        follower.look()
    assert follower.look() == []
    path.write_text(path.read_text().replace("hello", readings[2].line()))
    assert [reading.step for reading in follower.look()] == [0, 16, 0, 32]


def test_a_line_that_is_being_written_is_not_too_long_because_of_those_before(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("geomon.record.follow.MAX_LINE", 1000)
    path = tmp_path / FILE_NAME
    path.write_text('{"run": {"model": "a"}}\n' * 60 + '{"run": {"mod')
    follower = Follower(tmp_path)
    assert follower.look() == []
    with path.open("a") as file:
        file.write("x" * 1000)
    with pytest.raises(ValueError, match="long"):
        follower.look()


def test_a_line_that_is_nested_too_deeply_is_refused(tmp_path):
    (tmp_path / FILE_NAME).write_text('{"run": {"a": ' + "[" * 100_000 + "\n")
    with pytest.raises(ValueError, match="nested too deeply"):
        Follower(tmp_path).look()
