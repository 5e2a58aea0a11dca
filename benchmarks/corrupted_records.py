"""What becomes of corrupted records: python -m benchmarks.corrupted_records.

A good record is corrupted in one line, at random but reproducibly. Reading it has to end in a
ValueError that names the path and the line, and a run that goes on in the folder has to put the
file aside, unchanged, and to begin a fresh one. Besides, random bytes of good records are changed:
what is read then may still be a record, and nothing but a ValueError may be raised.
"""

import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from geomon.note import Note
from geomon.record import FILE_NAME, Follower, Reading, Record, read
from geomon.record.columns import Column
from geomon.record.follow import MAX_LINE
from geomon.record.printable import printable

COUNTS = ("step", "tokens", "world_size")
NUMBERS = ("time", "seconds")
TEXTS = ("source", "mode", "dtype")
FIELDS = (*COUNTS, *NUMBERS, *TEXTS, "stacks")


def _reading(step: int, chance: random.Random) -> Reading:
    layers = [chance.uniform(1, 20) for _ in range(8)]
    note = Note("few rows", "estimates stand on {rows} rows", numbers={"rows": 64})
    return Reading(
        step, 1.7e9 + step, 0.5, "probe", "eval", 8192, 1, "float32",
        {"": {"twonn": Column(layers=layers)}}, notes=(note,),
    )  # fmt: skip


def good_lines(chance: random.Random) -> list[bytes]:
    """A record of one run, without the ends of the lines."""
    lines = [json.dumps({"run": {"model": "Decoder", "from_step": 0, "layers": ["blocks.0"]}})]
    lines += [_reading(10 * index, chance).line() for index in range(chance.randint(2, 6))]
    return [line.encode() for line in lines]


def corrupted(chance: random.Random, lines: list[bytes]) -> tuple[str, int, list[bytes]]:
    """Corrupt one line of a record.

    Returns:
        The kind of corruption, the number of the line, and the lines.
    """
    name = chance.choice(list(KINDS))
    index = chance.randrange(1, len(lines))
    return name, index + 1, [*lines[:index], KINDS[name](chance, lines[index]), *lines[index + 1 :]]


def _field(chance: random.Random, line: bytes) -> bytes:
    """Give one field a value of another type."""
    content = json.loads(line)
    name = chance.choice([*FIELDS, "notes"])
    pool: list[Any] = [True, False, [], [1.0], {"a": []}, [None]]
    if name not in TEXTS:
        pool += ["a word", "3", ""]
    if name in COUNTS:
        pool += [-1, 3.0, 1.5, None, 10**400, 2**63]
    if name in NUMBERS:
        pool += [None, 10**400, -(10**400)]
    if name in TEXTS:
        pool += [None, 0, 1.5]
    if name == "notes":
        pool = [True, "a word", 3, {}, None, [3], [None], [["nested"]], ["words"], [{"kind": "a"}]]
    if name == "stacks":
        pool = [True, "a word", 3, [], [["a", 1.0]], None, {"": []}, {"": {"a": [1.0]}}]
    content[name] = chance.choice(pool)
    return json.dumps(content).encode()


def _value(chance: random.Random, line: bytes) -> bytes:
    """Give one of the values, or all of a column, another type than a number."""
    content = json.loads(line)
    column = content["stacks"][""]["twonn"]
    wrong = [True, "1.0", [1.0], [], {}, {"a": 1.0}, 10**400]
    column["layers"][chance.randrange(len(column["layers"]))] = chance.choice(wrong)
    if chance.random() < 0.3:
        column["layers"] = chance.choice([True, "1.0", {}, 1.0, None])
    return json.dumps(content).encode()


def _constant(chance: random.Random, line: bytes) -> bytes:
    """Write a number that JSON does not have, or that no float holds."""
    content = json.loads(line)
    layers = content["stacks"][""]["twonn"]["layers"]
    place, keys = chance.choice(((content, [*NUMBERS, "step"]), (layers, range(len(layers)))))
    place[chance.choice(keys)] = "@"
    word = chance.choice([b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-1e999", b"9" * 5000])
    return json.dumps(content).encode().replace(b'"@"', word)


def _missing(chance: random.Random, line: bytes) -> bytes:
    content = json.loads(line)
    del content[chance.choice(FIELDS)]
    return json.dumps(content).encode()


def _nested(chance: random.Random, line: bytes) -> bytes:
    """Nest brackets deeper than a parser can follow: alone, or in place of a value."""
    depth = chance.choice([5_000, 20_000, 100_000])
    opening, closing = chance.choice([(b"[", b"]"), (b'{"a":', b"}")])
    nested = opening * depth + (b"1" + closing * depth) * chance.randint(0, 1)
    return chance.choice([nested, line.replace(b"8192", nested)])


def _shape(chance: random.Random, line: bytes) -> bytes:
    """Write JSON that is neither a reading nor the description of a run."""
    return chance.choice(
        [b"", b" ", b"5", b"[]", b"{}", b"null", b"true", b'"run"', b"[" + line + b"]",
         b'{"run": 5}', b'{"run": null}', b'{"run": []}', b'{"run": "a"}', b'{"run": NaN}']
    )  # fmt: skip


def _cut(chance: random.Random, line: bytes) -> bytes:
    """Lose the end, the beginning, or the middle of a line."""
    start = chance.randrange(1, len(line) - 1)
    return chance.choice([line[:start], line[start:], line[:start] + line[start + 1 :][::-1]])


def _joined(chance: random.Random, line: bytes) -> bytes:
    """Lose the end of a line: two stand in one."""
    return line + chance.choice([b"", b" ", b","]) + line


def _not_utf8(chance: random.Random, line: bytes) -> bytes:
    place = chance.randrange(len(line) + 1)
    return line[:place] + bytes(chance.choices(range(0xF8, 0x100), k=3)) + line[place:]


def _control(chance: random.Random, line: bytes) -> bytes:
    """Put control characters, which JSON escapes, into a text."""
    word = chance.choice([b"\x1b[2J", b"\x00", b"\x07", b"\x1b]0;title\x07", b"\x08"])
    return line.replace(b"eval", word)


def _noise(chance: random.Random, line: bytes) -> bytes:
    return chance.randbytes(chance.randint(1, 400)).replace(b"\n", b"\r") + b"\xff"


KINDS: dict[str, Callable[[random.Random, bytes], bytes]] = {
    "a field of another type": _field,
    "a value of another type": _value,
    "a number that is none": _constant,
    "a missing field": _missing,
    "nested too deeply": _nested,
    "JSON of another shape": _shape,
    "a line that was cut": _cut,
    "two lines in one": _joined,
    "bytes that are no UTF-8": _not_utf8,
    "control characters": _control,
    "noise": _noise,
}


def check(folder: Path, number: int) -> None:
    """Check that a corrupted record is refused by every reader, and set aside by a writer."""
    path = folder / FILE_NAME
    content = path.read_bytes()
    follower = Follower(folder)
    for reader in (lambda: read(folder), follower.look, lambda: Record(folder).begin(0, {})):
        try:
            reader()
        except ValueError as error:
            text = str(error)
            assert f"line {number} of {path} " in text, text[:500]
            assert text == printable(text), text[:500]
            assert len(text) < 1000, len(text)
        else:
            raise AssertionError("it was taken for a record")
    record = Record(folder)
    try:
        record.begin(30, {})
    except ValueError:
        record.write(_reading(30, random.Random(0)))
    record.close()
    assert (folder / "readings.1.jsonl").read_bytes() == content, "it was changed"
    assert [reading.step for reading in read(folder)] == [30], "there is no fresh record"


def check_noise(folder: Path) -> bool:
    """Check that a record of changed bytes is read or refused; returns whether it was refused."""
    try:
        read(folder)
    except ValueError as error:
        text = str(error)
        assert text.startswith("line "), text
        assert str(folder / FILE_NAME) in text, text
        return True
    return False


def run(count: int, seed: int) -> tuple[Counter[str], int]:
    """Corrupt and check; raises an AssertionError at the first record that is not refused well.

    Returns:
        The corrupted records by kind, and how many of as many with changed bytes were refused.
    """
    chance = random.Random(seed)
    kinds: Counter[str] = Counter()
    refused = 0
    with tempfile.TemporaryDirectory() as place:
        for index in range(count):
            folder = Path(place, str(index))
            folder.mkdir()
            name, number, lines = corrupted(chance, good_lines(chance))
            (folder / FILE_NAME).write_bytes(b"".join(line + b"\n" for line in lines))
            try:
                check(folder, number)
            except BaseException as error:
                error.add_note(f"record {index} of seed {seed}: {name}, line {number}")
                raise
            kinds[name] += 1
            content = bytearray(b"".join(line + b"\n" for line in good_lines(chance)))
            for _ in range(chance.randint(1, 5)):
                content[chance.randrange(len(content))] = chance.randrange(256)
            (folder / FILE_NAME).write_bytes(content)
            refused += check_noise(folder)
            for path in folder.iterdir():
                path.unlink()
    return kinds, refused


def check_long_line() -> None:
    """Check a line that is longer than any of a record, with its end and without."""
    for end in (b"\n", b""):
        with tempfile.TemporaryDirectory() as place:
            (first, *_) = good_lines(random.Random(0))
            long = b'{"step": ' + b" " * MAX_LINE + end
            Path(place, FILE_NAME).write_bytes(first + b"\n" + long)
            check(Path(place), 2)


def main(
    records: Annotated[int, typer.Option(help="Number of corrupted records.")] = 2000,
    seed: Annotated[int, typer.Option(help="Seed of the corruptions.")] = 0,
) -> None:
    """Corrupt records and read them."""
    kinds, refused = run(records, seed)
    check_long_line()
    for name, count in sorted(kinds.items()):
        print(f"{count:6,} of {count:6,} refused, path and line named, set aside: {name}")
    print(f"     2 of      2: a line of more than {MAX_LINE:,} bytes")
    print(f"{refused:,} of {records:,} with 1 to 5 changed bytes refused, the others are records")


if __name__ == "__main__":
    sys.exit(typer.run(main))
