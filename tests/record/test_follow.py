"""Who follows a record that grows sees each line once, and what is written in its place anew."""

import os

import pytest

from geomon.record import FILE_NAME, Follower, read
from support.histories import reading

RUN, LINES = '{"run": {}}\n', [reading(step).line() + "\n" for step in (0, 16, 32, 48)]
OTHERS = [reading(step, 2.0).line() + "\n" for step in (0, 16, 32, 48, 64, 80)]
ALL = "".join(LINES)


def append(text):
    def act(path):
        with path.open("a") as file:
            file.write(text)

    return act


def overwrite(text):
    """In the same file."""
    return lambda path: path.write_text(text)


def put_in_its_place(text):
    def act(path):
        path.rename(path.with_name("readings.1.jsonl"))
        path.write_text(text)

    return act


def nothing(path):
    pass


# Changes of the file, and the steps that are new after each, or the words of the error.
COURSES = {
    "it grows, also in the middle of a line": [
        (nothing, []), (append(RUN + LINES[0] + LINES[1][:50]), [0]), (append(LINES[1][50:]), [16]),
        (nothing, []),
    ],
    "a new record": [(append(ALL), [0, 16, 32, 48]), (put_in_its_place(LINES[0]), [0])],
    **{
        f"written anew in its place: {len(text)}": [
            (append("".join(LINES[:3])), [0, 16, 32]), (overwrite(text), steps),
        ]
        for text, steps in (
            (OTHERS[0], [0]), ("".join(OTHERS[:3]), [0, 16, 32]),
            ("".join(OTHERS), [0, 16, 32, 48, 64, 80]),
            (OTHERS[0] + "".join(LINES[1:]), [0, 16, 32, 48]),
        )
    },
    "its time alone has changed": [
        (append(ALL), [0, 16, 32, 48]), (lambda path: os.utime(path, (1, 1)), []),
    ],
    "the run goes back between two looks": [
        (append(LINES[0]), [0]),
        (append("".join(LINES[1:]) + '{"run": {"rewound_to": 32}}\n' + OTHERS[2]), [16, 32]),
    ],
    "two runs write at once, and a line is none": [
        (append(LINES[0]), [0]), (append(LINES[1]), [16]), (append(LINES[0]), [0]),
        (append("hello\n"), "line 4 of"), (nothing, []),
        (overwrite(LINES[0] + LINES[1] + LINES[0] + LINES[2]), [0, 16, 0, 32]),
    ],
    "a line that is being written, behind many": [
        (append('{"run": {"model": "a"}}\n' * 60 + '{"run": {"mod'), []),
        (append("x" * 1000), "long"),
    ],
    "nested too deeply": [(append('{"run": {"a": ' + "[" * 100_000 + "\n"), "nested too deeply")],
}  # fmt: skip


@pytest.mark.parametrize("name", ["", FILE_NAME], ids=["folder", "file"])
@pytest.mark.parametrize("course", COURSES)
def test_a_follower_sees_each_line_once(tmp_path, monkeypatch, course, name):
    if "being written" in course:
        monkeypatch.setattr("geomon.record.follow.MAX_LINE", 1000)
    path, follower = tmp_path / FILE_NAME, Follower(tmp_path / name)
    for act, expected in COURSES[course]:
        act(path)
        if isinstance(expected, str):
            with pytest.raises(ValueError, match=expected):
                follower.look()
            continue
        assert [each.step for each in follower.look()] == expected
        if path.exists() and expected:
            found, followed = read(path), follower.readings()
            assert found.readings == followed.readings
            at = 3 if "two runs" in course and len(found) > 2 else None
            assert found.mixed_at == followed.mixed_at == at
