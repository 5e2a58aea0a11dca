"""A record with one corrupted line is refused with path and line, and set aside by the next run."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geomon.record import FILE_NAME, Follower, Record, read
from support.readings import reading_of

GOOD = [b'{"run": {"model": "Decoder", "from_step": 0}}'] + [
    reading_of({"twonn/layer_01": 8.1, "twonn/layer_02": 7.9}, step).line().encode()
    for step in (0, 10, 20)
]
HUGE = 10**400


def changed(name: str, value: object) -> bytes:
    """A reading with another value in one field."""
    return json.dumps(json.loads(GOOD[2]) | {name: value}).encode()


def of_column(value: object) -> bytes:
    """A reading with another value in a column."""
    content = json.loads(GOOD[2])
    content["stacks"][""]["twonn"]["layers"][0] = value
    return json.dumps(content).encode()


def without(name: str) -> bytes:
    content = json.loads(GOOD[2])
    del content[name]
    return json.dumps(content).encode()


FIELDS = ("step", "tokens", "world_size", "time", "seconds", "source", "mode", "dtype", "stacks")
DEEP = 20_000
LINES = {
    **{f"no {name}": without(name) for name in FIELDS},
    **{f"{name}: a list": changed(name, [1.0]) for name in FIELDS},
    **{f"{name}: none": changed(name, None) for name in FIELDS},
    **{f"{name}: text": changed(name, "a word") for name in (*FIELDS[:5], "stacks", "notes")},
    **{f"step: {value}": changed("step", value) for value in (True, -1, 1.5, 2**63, HUGE)},
    "tokens: below 0": changed("tokens", -1),
    "training: text": changed("training", {"loss": "a"}),
    "a depth of text": changed("stacks", {"": {"a": {"layers": 3}}}),
    "seconds: huge": changed("seconds", -HUGE),
    "notes: numbers": changed("notes", [3]),
    "notes: no words": changed("notes", [{"kind": "a"}]),
    "stacks: no column": changed("stacks", {"": {"a": [1.0]}}),
    **{f"a value: {value}"[:20]: of_column(value) for value in (True, "1.0", [1.0], {}, HUGE)},
    **{
        f"a number: {word.decode()[:9]}": of_column("@").replace(b'"@"', word)
        for word in (b"NaN", b"Infinity", b"-Infinity", b"1e999", b"9" * 5000)
    },
    "brackets": b"[" * DEEP,
    "brackets, closed": b"[" * DEEP + b"1" + b"]" * DEEP,
    "objects inside": changed("tokens", "@").replace(b'"@"', b'{"a":' * DEEP + b"1" + b"}" * DEEP),
    **{
        f"JSON: {line.decode()}": line
        for line in (b"", b" ", b"5", b"[]", b"{}", b"null", b'{"run": 5}', b'{"run": null}')
    },
    "a reading in a list": b"[" + GOOD[2] + b"]",
    "the end is lost": GOOD[2][:-9],
    "the beginning is lost": GOOD[2][9:],
    "two readings": GOOD[2] + b", " + GOOD[2],
    "no UTF-8": GOOD[2][:20] + b"\xf8\xff" + GOOD[2][20:],
    "a control character": changed("mode", "eval").replace(b"eval", b"\x1b[2J"),
    "noise": bytes(range(11, 256)),
}  # fmt: skip


def check(folder: Path, number: int) -> None:
    """Every reader refuses the record and names the line; a writer puts it aside, unchanged."""
    path = folder / FILE_NAME
    content = path.read_bytes()
    follower = Follower(folder)
    for reader in (lambda: read(folder), follower.look, lambda: Record(folder).begin(0, {})):
        with pytest.raises(ValueError, match=f"line {number} of ") as refused:
            reader()
        text = str(refused.value)
        assert str(path) in text
        assert text.isprintable()
        assert len(text) < 1000
    record = Record(folder)
    with pytest.raises(ValueError, match="is not a line of a record"):
        record.begin(30, {})
    record.write(reading_of({"a/mean": 1.0}, 30))
    record.close()
    assert (folder / "readings.1.jsonl").read_bytes() == content
    assert [reading.step for reading in read(folder)] == [30]


@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
def test_a_corrupted_line_is_refused_and_the_record_is_set_aside(tmp_path, line):
    lines = [*GOOD[:2], line, *GOOD[3:]]
    (tmp_path / FILE_NAME).write_bytes(b"".join(line + b"\n" for line in lines))
    check(tmp_path, 3)


@pytest.mark.parametrize("end", [b"\n", b""])
def test_a_line_longer_than_any_of_a_record_is_refused(tmp_path, monkeypatch, end):
    monkeypatch.setattr("geomon.record.follow.MAX_LINE", 1000)
    (tmp_path / FILE_NAME).write_bytes(GOOD[1] + b"\n" + b'{"step": ' + b" " * 1000 + end)
    check(tmp_path, 2)


@given(changes=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1,
                        max_size=5))  # fmt: skip
@settings(deadline=None, derandomize=True, max_examples=200)
def test_changed_bytes_are_read_or_refused_and_raise_nothing_else(tmp_path_factory, changes):
    content = bytearray(b"".join(line + b"\n" for line in GOOD))
    for place, byte in changes:
        content[place % len(content)] = byte
    path = tmp_path_factory.mktemp("changed") / FILE_NAME
    path.write_bytes(content)
    try:
        read(path.parent)
        text = ""
    except ValueError as error:
        text = str(error)
    assert text == "" or (text.startswith("line ") and str(path) in text)
