import errno
import itertools
import os

import numpy as np
import pytest
from full_disk import FullDisk
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of
from tagged import reading_of

from geomon.record import FILE_NAME, Reading, Record, read, tags
from geomon.record.arrays import ArrayFolder, ArrayPlace


def reading(step: int, source: str = "probe") -> Reading:
    return reading_of({"m/layer_00": 1.0, "m/layer_01": 2.0, "m/mean": 2.0}, step, source, time=1.0)


def some(number: float, stack: str = "") -> dict[ArrayPlace, np.ndarray]:
    return {ArrayPlace(stack, "mean_query", 1): np.full((2, 3), number, np.float32)}


def began(folder, step: int = 0, **facts) -> Record:
    record = Record(folder)
    record.begin(step, {"model": "m"}, **facts)
    return record


def write(record: Record, step: int, number: float, source: str = "probe") -> None:
    record.write(reading(step, source))
    record.write_arrays(reading(step, source), some(number))


def number_of(folder, step: int, source: str | None = None) -> float:
    return float(read(folder).arrays(step, source)["mean_query/layer_01"][0, 0])


@settings(max_examples=20)
@given(
    st.dictionaries(
        st.builds(
            ArrayPlace,
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
    folder = ArrayFolder(tmp_path_factory.mktemp("run") / "arrays")
    folder.write(128, "probe", content)
    found = folder.read(128, "probe")
    by_tag = {tags.in_stack(tags.layer_tag(p.name, p.layer), p.stack): p for p in content}
    assert found.keys() == by_tag.keys()
    for tag, place in by_tag.items():
        assert found[tag].dtype == content[place].dtype
        np.testing.assert_array_equal(found[tag], content[place])


def test_a_run_that_begins_anew_keeps_the_arrays_of_the_old_ones(tmp_path):
    for number in (1.0, 2.0, 3.0):
        write(began(tmp_path), 0, number)
    assert number_of(tmp_path, 0) == 3.0
    assert number_of(tmp_path / "readings.1.jsonl", 0) == 1.0
    assert number_of(tmp_path / "readings.2.jsonl", 0) == 2.0
    (tmp_path / FILE_NAME).unlink()  # arrays without their record
    record = began(tmp_path)
    write(record, 130, 4.0)
    assert ArrayFolder(tmp_path / "arrays").steps("probe") == [130]
    assert ArrayFolder(tmp_path / "arrays.3").steps("probe") == [0]


def test_a_resumed_run_goes_on_in_the_same_folder(tmp_path):
    record = began(tmp_path)
    for step in (0, 10, 20):
        write(record, step, step)
    (tmp_path / "arrays" / "step_000020_probe.npz").unlink()  # killed before it was written
    resumed = began(tmp_path, 15)
    write(resumed, 20, 1.5)
    write(resumed, 30, 2.5)
    assert [number_of(tmp_path, step) for step in (0, 10, 20, 30)] == [0, 10, 1.5, 2.5]
    assert not (tmp_path / "arrays.1").exists()
    write(resumed, 30, 3.5, "inline")
    resumed.write_arrays(reading(30), some(4.5))  # in place of those before
    found = [number_of(tmp_path, 30, source) for source in (None, "inline", "probe")]
    assert found == [3.5, 3.5, 4.5]


def test_of_readings_close_together_only_some_have_arrays(tmp_path):
    record = began(tmp_path)
    for step in range(0, 8_001, 10):
        record.arrays.path.mkdir(exist_ok=True)
        if record.arrays.takes(step, "probe"):
            (record.arrays.path / f"step_{step:06d}_probe.npz").touch()
    kept = record.arrays.steps("probe")
    assert kept[:22] == [*range(0, 220, 10)]
    assert 220 not in kept
    assert 60 < len(kept) < 130
    assert max(b / a for a, b in itertools.pairwise(kept) if a > 200) < 1.1


def test_what_is_of_somebody_else_is_kept(tmp_path):
    theirs = tmp_path / "arrays"
    theirs.mkdir()
    np.savez(theirs / "step_000000_probe.npz", own=np.arange(3))
    (theirs / "weights.bin").write_bytes(b"weights")
    content = (theirs / "step_000000_probe.npz").read_bytes()
    write(began(tmp_path), 0, 1.0)
    assert (tmp_path / "arrays.1" / "step_000000_probe.npz").read_bytes() == content
    assert (theirs / "weights.bin").read_bytes() == b"weights"
    assert number_of(tmp_path, 0) == 1.0


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt()])
def test_a_write_that_fails_leaves_what_was_there(tmp_path, monkeypatch, error):
    folder = ArrayFolder(tmp_path / "arrays")
    folder.write(4, "probe", some(1.0))

    def fails(file, **content):
        file.write(b"half of it")
        raise error

    monkeypatch.setattr(np, "savez", fails)
    for step in (4, 8):
        with pytest.raises(type(error)):
            folder.write(step, "probe", some(2.0))
    assert os.listdir(folder.path) == ["step_000004_probe.npz"]
    assert folder.read(4, "probe")["mean_query/layer_01"][0, 0] == 1.0


def test_the_rest_of_a_killed_write_is_no_array_and_is_removed(tmp_path):
    """Kills in the middle of readings: test_kills.py."""
    record = began(tmp_path)
    write(record, 0, 1.0)
    record.close()
    rest = record.arrays.path / ".step_000008_probe.npz.part"
    others = record.arrays.path / ".weights.npz.part"
    for path in (rest, others):
        path.write_bytes(b"half of it")
    assert record.arrays.steps("probe") == [0]
    Record(tmp_path)
    assert sorted(os.listdir(record.arrays.path)) == [others.name, "step_000000_probe.npz"]


def test_no_arrays_stand_beside_a_line_that_waits(tmp_path, monkeypatch):
    record = began(tmp_path)
    with monkeypatch.context() as patch:
        FullDisk(patch)
        with pytest.raises(OSError, match="No space"):
            record.write(reading(0))
        record.write_arrays(reading(0), some(1.0))
    assert not (tmp_path / "arrays").exists()


def test_what_is_not_there_or_damaged_is_one_clear_line(tmp_path):
    write(began(tmp_path), 0, 1.0)
    with pytest.raises(FileNotFoundError, match=r"no arrays of step 7 at .*arrays=True keeps them"):
        read(tmp_path).arrays(7)
    with pytest.raises(FileNotFoundError, match=r"no arrays of source '\.\./x'"):
        read(tmp_path).arrays(0, "../x")
    path = tmp_path / "arrays" / "step_000000_probe.npz"
    for content in (b"", b"half of it", path.read_bytes()[:-30], b"\x80\x04N."):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"cannot be read .* the record works without it"):
            read(tmp_path).arrays(0)


def test_of_several_stacks_one_is_read_under_plain_tags(tmp_path):
    record = began(tmp_path)
    record.write(both := reading_of({"m/encoder_layer_01": 1.0, "m/decoder_layer_01": 2.0}))
    record.write_arrays(both, some(1.0, "encoder") | some(2.0, "decoder"))
    found = read(tmp_path)
    assert list(found.of_stack("encoder").arrays(0)) == ["mean_query/layer_01"]
    names = [f"mean_query/{stack}_layer_01" for stack in ("encoder", "decoder")]
    assert list(found.arrays(0)) == names


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no pipes")
def test_a_pipe_holds_no_arrays(tmp_path):
    """To open one takes until somebody writes into it."""
    folder = ArrayFolder(tmp_path)
    os.mkfifo(tmp_path / "step_000000_probe.npz")
    os.mkfifo(tmp_path / ".step_000001_probe.npz.part")
    with pytest.raises(ValueError, match="not a regular file"):
        folder.read(0, "probe")
    for step in (0, 1):
        folder.write(step, "probe", some(1.0))
        assert folder.read(step, "probe")["mean_query/layer_01"][0, 0] == 1.0


def test_a_link_in_place_of_a_part_is_not_written_through(tmp_path):
    other = tmp_path / "elsewhere.txt"
    other.write_text("precious")
    folder = ArrayFolder(tmp_path / "arrays")
    folder.path.mkdir()
    (folder.path / ".step_000001_probe.npz.part").symlink_to(other)
    folder.write(1, "probe", some(1.0))
    assert other.read_text() == "precious"
    assert folder.steps("probe") == [1]
