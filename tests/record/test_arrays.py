"""Arrays of a reading, which figures need and no value holds, are in a file next to the record."""

import io
import itertools
import os
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from geomon.record import FILE_NAME, Record, read
from support.histories import (
    History,
    array_of,
    arrays,
    begin,
    check,
    fill_the_disk,
    reading,
    write,
)
from support.readings import reading_of


def began(folder, step=0):
    record = Record(folder)
    record.begin(step, {"model": "m"})
    return record


@settings(max_examples=20)
@given(
    st.dictionaries(
        st.tuples(
            st.sampled_from(["", "decoder", "a.b|c"]),
            st.sampled_from(["mean_query", "keys"]),
            st.integers(0, 10),
        ),
        arrays_of.arrays(
            st.sampled_from([np.float16, np.float32, np.int64]),
            arrays_of.array_shapes(max_dims=3, max_side=4),
        ),
        min_size=1,
    )
)
def test_arrays_come_back_as_they_were(tmp_path_factory, content):
    record = began(tmp_path_factory.mktemp("run"))
    record.write(reading(128))
    record.write_arrays(reading(128), content)
    (path,) = record.arrays.path.iterdir()
    with zipfile.ZipFile(path) as archive, np.load(path) as file:  # as numpy reads it
        assert archive.testzip() is None
        facts = {
            (x.date_time, x.compress_type, x.create_version, x.extract_version, x.flag_bits,
             x.create_system, x.volume, x.internal_attr, x.external_attr, x.extra, x.comment)
            for x in archive.infolist()
        }  # fmt: skip
        assert facts == {((1980, 1, 1, 0, 0, 0), 0, 20, 20, 0x800, 0, 0, 0, 0, b"", b"")}
        theirs = dict(file)
    end = struct.unpack("<4s4H2LH", path.read_bytes()[-22:])
    count, size, start = end[4], end[5], end[6]
    assert end == (b"PK\5\6", 0, 0, len(content), count, size, start, 0)
    assert (count, size + start + 22) == (len(content), path.stat().st_size)
    ours = read(record.path).arrays(128)
    np.savez(path, **theirs)  # as earlier versions wrote it
    for found in (ours, read(record.path).arrays(128)):
        assert len(found) == len(content)
        for (stack, name, layer), values in content.items():
            same = found[f"{name}/{stack}{'_' * bool(stack)}layer_{layer:02d}"]
            assert same.dtype == values.dtype
            np.testing.assert_array_equal(same, values)


def test_arrays_of_a_stack_have_the_tags_of_a_model_with_one(tmp_path):
    record = began(tmp_path)
    both = reading_of({f"a/{stack}_layer_01": 1.0 for stack in ("encoder", "decoder")}, 4)
    record.write(both)
    stacks = enumerate(("encoder", "decoder", ""))
    record.write_arrays(both, {(stack, "keys", 3): np.full(2, n) for n, stack in stacks})
    run = read(tmp_path)
    tags = {"keys/encoder_layer_03": 0, "keys/decoder_layer_03": 1, "keys/layer_03": 2}
    assert {tag: values[0] for tag, values in run.arrays(4).items()} == tags
    for number, stack in enumerate(("encoder", "decoder")):
        (found,) = run.of_stack(stack).arrays(4).items()
        assert (found[0], found[1].tolist()) == ("keys/layer_03", [number] * 2)


def put(*steps, source="probe"):
    return write(*steps, source=source, with_arrays=True)


def put_alone(number):
    """Arrays of step 30, without a line: in place of those that are there."""
    return lambda folder: folder.record.write_arrays(reading(30, source="probe"), arrays(number))


def lose(name):
    """The process was killed before it had written this."""
    return lambda folder: (folder.path / "arrays" / name).unlink()


def leave(name, content):
    """Somebody else's file."""

    def event(folder):
        (folder.path / "arrays").mkdir(exist_ok=True)
        (folder.path / "arrays" / name).write_bytes(content)

    return event


ANEW = [FILE_NAME, "arrays", "readings.1.jsonl", "arrays.1", "readings.2.jsonl", "arrays.2"]
BOTH, THEIRS = [FILE_NAME, "arrays"], [FILE_NAME, "arrays", "arrays.1"]
# Events; points of the record and names in the folder; numbers in arrays, by step and source, and
# the points of a branch that was given up.
FOLDERS = {
    "runs that begin anew keep the arrays of the old ones": (
        [event for _ in range(3) for event in (begin(0), put(0))], [(0, 3)], ANEW, {(0, None): 3.0}
    ),
    "a resumed run goes on in the same folder": (
        [begin(0), put(0, 10, 20), lose("step_000020_probe.npz"), begin(21), put(30)],
        [(0, 1), (10, 1), (20, 1), (30, 2)], BOTH,
        {(0, None): 1.0, (10, None): 1.0, (30, None): 2.0},
    ),
    "arrays of a branch that was given up are kept apart": (
        [begin(0), put(0, 10, 20, 30), begin(15), write(20, source="probe"), put(30)],
        [(0, 1), (10, 1), (20, 2), (30, 2)], THEIRS,
        {(0, None): 1.0, (10, None): 1.0, (30, None): 2.0}, [(20, 1), (30, 1)],
    ),
    "sources are kept apart": (
        [begin(0), put(30), put(30, source="inline"), put_alone(4.5)], [(30, 1), (30, 1)], BOTH,
        {(30, None): 1.0, (30, "inline"): 1.0, (30, "probe"): 4.5},
    ),
    "arrays without their record are kept": (
        [leave("step_000000_probe.npz", b"theirs"), begin(0), put(0, 130)], [(0, 1), (130, 1)],
        THEIRS, {(0, None): 1.0, (130, None): 1.0},
    ),
    "what is of somebody else is kept": (
        [leave("weights.bin", b"weights"), leave(".weights.npz.part", b"half"),
         leave(".step_000008_probe.npz.part", b"half of it"), begin(0), put(0)], [(0, 1)], BOTH,
        {(0, None): 1.0},
    ),
    "none stand beside a line that waits": (
        [begin(0), fill_the_disk(0), put(0)], [], [FILE_NAME], {}
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FOLDERS)
def test_arrays_are_those_of_the_readings_that_stand(tmp_path, name):
    events, expected, files, numbers, *abandoned = FOLDERS[name]
    failed = 2 if "waits" in name else 0  # the line, and the end
    history = History(events, expected, *abandoned, rewound=None, files=files, failed=failed)
    check(history, tmp_path)
    for (step, source), number in numbers.items():
        assert array_of(tmp_path, step, source) == number
    if "begin anew" in name:
        assert [array_of(tmp_path / f"readings.{n}.jsonl", 0) for n in (1, 2)] == [1.0, 2.0]
    if abandoned:
        with pytest.raises(FileNotFoundError, match="no arrays of step 20"):
            array_of(tmp_path, 20)
        kept = sorted(os.listdir(tmp_path / "arrays.1"))
        assert kept == ["step_000020_probe.npz", "step_000030_probe.npz"]
    if "without their record" in name:
        assert (tmp_path / "arrays.1" / "step_000000_probe.npz").read_bytes() == b"theirs"
    if "somebody else" in name:
        left = sorted(path.name for path in (tmp_path / "arrays").iterdir())
        assert left == [".weights.npz.part", "step_000000_probe.npz", "weights.bin"]


def test_only_some_of_the_readings_close_together_have_arrays(tmp_path):
    folder = began(tmp_path).arrays
    folder.path.mkdir()
    for step in range(0, 8_001, 10):
        if folder.takes(step, "probe"):
            (folder.path / f"step_{step:06d}_probe.npz").touch()
    kept = folder.steps("probe")
    assert kept[:22] == [*range(0, 220, 10)]
    assert 220 not in kept
    assert 60 < len(kept) < 130
    assert max(b / a for a, b in itertools.pairwise(kept) if a > 200) < 1.1


@pytest.mark.parametrize("error", [OSError("full"), KeyboardInterrupt("stop")])
def test_a_write_that_fails_leaves_what_was_there(tmp_path, monkeypatch, error):
    folder = began(tmp_path).arrays
    folder.write(4, "probe", arrays(1.0))

    class Full(io.FileIO):
        def write(self, content):
            super().write(content[:100])
            raise error

    with monkeypatch.context() as full:
        full.setattr(Path, "open", lambda path, mode: Full(str(path), mode))
        for step in (4, 8):
            with pytest.raises(type(error), match=str(error)):
                folder.write(step, "probe", arrays(2.0))
    assert os.listdir(folder.path) == ["step_000004_probe.npz"]
    assert folder.read(4, "probe")["mean_query/layer_01"][0] == 1.0


def test_arrays_that_are_missing_or_damaged_are_one_clear_line(tmp_path):
    check(History([begin(0), put(0)], [(0, 1)], files=BOTH), tmp_path)
    with pytest.raises(FileNotFoundError, match=r"no arrays of step 7 at .*arrays=True keeps them"):
        read(tmp_path).arrays(7)
    with pytest.raises(FileNotFoundError, match=r"no arrays of source '\.\./x'"):
        read(tmp_path).arrays(0, "../x")
    path = tmp_path / "arrays" / "step_000000_probe.npz"
    for content in (b"", b"half of it", path.read_bytes()[:-30], b"\x80\x04N."):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"cannot be read .* the record works without it"):
            read(tmp_path).arrays(0)


def test_pipes_and_links_are_not_opened(tmp_path):
    """To open a pipe takes until somebody writes into it."""
    folder, other = began(tmp_path).arrays, tmp_path / "elsewhere.txt"
    other.write_text("precious")
    folder.path.mkdir()
    os.mkfifo(folder.path / "step_000000_probe.npz")
    os.mkfifo(folder.path / ".step_000001_probe.npz.part")
    (folder.path / ".step_000002_probe.npz.part").symlink_to(other)
    with pytest.raises(ValueError, match="not a regular file"):
        folder.read(0, "probe")
    for step in range(3):
        folder.write(step, "probe", arrays(1.0))
        assert folder.read(step, "probe")["mean_query/layer_01"][0] == 1.0
    assert other.read_text() == "precious"
