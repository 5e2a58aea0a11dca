"""The sweep: every checkpoint loaded, probed on the same inputs and freed, one after another."""

import gc
import hashlib
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import nn

from geomon.metrics import METRICS, Evaluator
from geomon.monitor import Monitor, check_count
from geomon.note import Note
from geomon.record import FILE_NAME, Reading, Readings, Record, Sink, read
from geomon.record.printable import printable
from geomon.record.sinks import Memory
from geomon.sweep.checkpoints import Build, Checkpoint, find_checkpoints
from geomon.sweep.inputs import InputError, Inputs, InputSize, digest, make_inputs
from geomon.sweep.models import load_model, resolve_build

# A logger of its own below the monitor's, whose repetitions are left out (see `_said_once`).
log = logging.getLogger("geomon.sweep")

# Key under which the description of a run holds what a scan was asked for.
_SCAN = "scan"


def scan(
    model: str | os.PathLike[str] | Build,
    *,
    checkpoints: str | os.PathLike[str] | None = None,
    revisions: Sequence[str] = (),
    text: str | os.PathLike[str] | None = None,
    inputs: Any = None,
    sequences: int = 64,
    length: int = 128,
    directory: str | os.PathLike[str] = "scan",
    metrics: Mapping[str, Callable[..., Any]] = METRICS,
    tokens: int = 4096,
    splits: int = 1,
    queries: int | None = Evaluator.queries,
    seed: int = 0,
    blocks: str | None = None,
    device: str | None = None,
    sinks: Sequence[Sink] = (),
) -> Readings:
    """Read the geometry of a model at its checkpoints, as if it had been watched while it trained.

    Each checkpoint is loaded, probed on the same inputs and freed before the next one. Tags and
    record are those of a live run with a probe. A step that the record holds is not read again, so
    an interrupted scan resumes where it was. A checkpoint that fails is named in a warning and in
    the next reading's notes, is left out, and is tried again by the next scan.

    Args:
        model: Folder of a transformers model, of an adapter of one (peft) or of `checkpoint-N`
            folders of either, name of a model on the hub, or for `*.ckpt` files of Lightning the
            function that builds the model from the hyper-parameters in the file, itself or as text
            "module:function".
        checkpoints: Folder with `checkpoint-N` folders or `*.ckpt` files; None for the model
            itself.
        revisions: Revisions of a model on the hub, in the order of the training.
        text: File with the text that a model of text reads.
        inputs: Fixed inputs, where they are not to be made: a tensor, a dict of keyword arguments,
            a tuple of arguments, or a function of the model.
        sequences: Largest number of sequences of the text, or of images or sounds.
        length: Largest number of tokens in a sequence.
        directory: Folder of the record.
        metrics: Metrics to measure: a dict from a name to a function of views.
        tokens: Number of rows of hidden states in one split of the estimate.
        splits: Largest number of splits; with two or more their deviation is recorded too.
        queries: Number of rows of a split from which distances to all its rows are measured; None
            for all.
        seed: Seed of the private generators that sample rows and draw images and sounds.
        blocks: Regular expression that matches the whole names of the blocks, where the search does
            not find them.
        device: Device that the models are moved to, for instance "cuda"; None for the first
            accelerator, or else the processor.
        sinks: Objects with `write(reading)` and `close()` that get every new reading too.

    Returns:
        All readings of the record.

    Raises:
        ValueError: There are no checkpoints, none of them can be read, the folder holds the record
            of something else, or an argument is out of range.
        FileNotFoundError: There is no file of that text.
        ImportError: transformers is missing, and the model is one of it.
    """
    for name, value in (("sequences", sequences), ("length", length), ("tokens", tokens),
                        ("splits", splits)):  # fmt: skip
        check_count(name, value)
    build = _build_of(model)
    if text is not None and inputs is not None:
        raise ValueError("give a text or inputs, not both")
    content = None if text is None else Path(text).read_bytes()
    found, notes = find_checkpoints(model if build is None else build, checkpoints, revisions)
    asked = {
        "model": _name_of(model),
        "checkpoints": None if checkpoints is None else os.path.abspath(checkpoints),
        "text": None if content is None else hashlib.sha256(content).hexdigest(),
        "inputs": None if inputs is None else digest(inputs),
        "sequences": sequences, "length": length, "metrics": list(metrics), "tokens": tokens,
        "splits": splits, "queries": queries, "seed": seed, "blocks": blocks,
    }  # fmt: skip
    options = {"metrics": metrics, "tokens": tokens, "splits": splits, "queries": queries,
               "seed": seed, "blocks": blocks}  # fmt: skip
    size = InputSize(sequences, length, seed)
    batch = None if inputs is None else Inputs(inputs, [])
    with _Sweep(Path(directory), asked, notes, sinks) as sweep, _said_once():
        missing = [one for one in found if one.step not in sweep.recorded]
        for checkpoint in missing:
            gc.collect()  # modules refer to each other in circles
            with sweep.attempt(checkpoint):
                given = batch or (content, size)
                probed = _probe(checkpoint, build, device, options, given)
                batch = probed.inputs
                sweep.publish(probed)
    return read(directory)


class _Probed(NamedTuple):
    """What came of one checkpoint: its reading, the run in words, notes and inputs."""

    reading: Reading
    run: dict[str, Any]
    notes: list[str]
    inputs: Inputs


class _Sweep:
    """The record of a scan, its sinks, and what failed.

    Args:
        directory: Folder of the record.
        asked: What the scan was asked for, which a scan that goes on has to equal.
        notes: Notes that hold for every reading.
        sinks: Where readings go besides the record.

    Attributes:
        recorded: Steps that the record held already.
    """

    def __init__(
        self, directory: Path, asked: dict[str, Any], notes: list[str], sinks: Sequence[Sink]
    ) -> None:
        self._asked, self._notes, self._sinks = asked, notes, list(sinks)
        self._failed: list[Note] = []  # of which no reading has said so yet
        self._failures: list[str] = []
        self._begun = False  # whether a reading was made
        earlier = _earlier(directory, asked)
        self.recorded = {reading.step for reading in earlier}
        self._record = Record(directory)

    def __enter__(self) -> "_Sweep":
        return self

    def __exit__(self, kind: type[BaseException] | None, *more: object) -> None:
        with self._record_is_written():
            self._record.close()
        for sink in self._sinks:
            self._call(sink, sink.close)
        if kind is None and self._failures and not self._begun and not self.recorded:
            others = len(self._failures) - 1
            more_failed = f", and so with {others} more" if others else ""
            raise ValueError(f"no checkpoint could be read: {self._failures[0]}{more_failed}")

    @contextmanager
    def attempt(self, checkpoint: Checkpoint) -> Iterator[None]:
        """Leave a checkpoint out if it fails: a warning now, a note in the next reading."""
        try:
            yield
        except (InputError, _RecordError):  # it would be so at each checkpoint
            raise
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            own = isinstance(error, ValueError | ImportError)
            words = reason if own else f"{type(error).__name__}: {reason}"
            if isinstance(error, IndexError):
                words += (
                    "; sequences may be longer than the model takes (length=, --length), or hold "
                    "tokens that it does not know"
                )
            if isinstance(error, OSError) and not Path(checkpoint.source).exists():
                words = f"there is no folder {checkpoint.source} here, and from the hub: {words}"
            failure = f"{checkpoint.name} (step {checkpoint.step}): {words[:500]}"
            self._failures.append(failure)
            text = "left out, because it failed: {failure}"
            self._failed.append(Note("checkpoint left out", text, numbers={"failure": failure}))
            log.warning("%s", printable(f"a checkpoint is left out: {failure}"))

    def publish(self, probed: _Probed) -> None:
        """Write a reading: the record first, then the sinks."""
        reading, run = probed.reading, probed.run
        said = [*self._failed, *(Note(text, text) for text in (*self._notes, *probed.notes))]
        own = msgspec.structs.replace(reading, notes=(*said, *reading.notes))
        with self._record_is_written():
            if not self._begun:
                description = {**run, "schedule": "checkpoints", _SCAN: self._asked}
                self._record.begin(reading.step, description, resumes=bool(self.recorded))
                self._begun = True
            self._record.write(own)
        self._failed = []
        for sink in self._sinks:
            self._call(sink, lambda sink=sink: sink.write(own))

    @contextmanager
    def _record_is_written(self) -> Iterator[None]:
        """Have an error of the record name its file."""
        try:
            yield
        except OSError as error:
            raise _RecordError(error.errno, error.strerror, str(self._record.path)) from error

    def _call(self, sink: Sink, action: Any) -> None:
        try:
            action()
        except Exception as error:
            log.warning(
                "%s", printable(f"{type(sink).__name__} failed; the record goes on: {error}")
            )


class _RecordError(OSError):
    """The record cannot be written: no other checkpoint would fare better."""


def _earlier(directory: Path, asked: dict[str, Any]) -> Sequence[Reading]:
    """Return the readings that the folder holds of the same scan.

    Raises:
        ValueError: The record is not that of a scan, or of another one.
    """
    readings = read(directory) if (directory / FILE_NAME).is_file() else Readings([], [])
    if not readings.readings:
        return []
    before = readings.runs[0].get(_SCAN) if readings.runs else None
    if not isinstance(before, Mapping):
        raise ValueError(
            f"{directory} holds the record of a training: choose another folder, "
            "directory=FOLDER (--directory FOLDER)"
        )
    differing = [name for name, value in asked.items() if before.get(name) != value]
    if differing:
        raise ValueError(
            f"{directory} holds a scan with other {' and '.join(differing)}: choose another "
            "folder, directory=FOLDER (--directory FOLDER)"
        )
    return readings.readings


def _build_of(model: str | os.PathLike[str] | Build) -> Build | None:
    if isinstance(model, nn.Module):
        raise ValueError(
            "the model is one already, and a scan would replace its weights: give a function that "
            "builds it, or measure(model, inputs) for this one alone"
        )
    if callable(model):
        return model
    name = os.fspath(model)
    return None if Path(name).exists() else resolve_build(name)


def _name_of(model: Any) -> str:
    if callable(model):
        return f"{model.__module__}:{getattr(model, '__qualname__', type(model).__name__)}"
    name = os.fspath(model)
    return os.path.abspath(name) if Path(name).exists() else name


def _probe(
    checkpoint: Checkpoint,
    build: Build | None,
    device: str | None,
    options: dict[str, Any],
    inputs: Inputs | tuple[bytes | None, InputSize],
) -> _Probed:
    """Load a model and read it on inputs, made here if need be; it is freed on return."""
    model, notes = load_model(checkpoint, build)
    chosen = device or torch.accelerator.current_accelerator(check_available=True) or "cpu"
    model = model.eval().to(chosen)
    if not isinstance(inputs, Inputs):
        inputs = make_inputs(model, checkpoint, *inputs)
    reading, run = _read(model, checkpoint.step, inputs.batch, options)
    return _Probed(reading, run, [*notes, *inputs.notes], inputs)


@contextmanager
def _said_once() -> Iterator[None]:
    """Leave out the warnings of a monitor that differ from earlier ones in numbers alone.

    Each checkpoint has a monitor of its own, and would warn of the same things.
    """
    said: set[str] = set()

    def is_new(record: logging.LogRecord) -> bool:
        kind = re.sub(r"\d+", "", record.getMessage())
        return kind not in said and not said.add(kind)  # type: ignore[func-returns-value]

    monitors = logging.getLogger("geomon")
    monitors.addFilter(is_new)
    try:
        yield
    finally:
        monitors.removeFilter(is_new)


def _read(
    model: nn.Module, step: int, inputs: Any, options: dict[str, Any]
) -> tuple[Reading, dict[str, Any]]:
    """Read a model, and describe the run.

    Raises:
        Exception: What the model or the reading failed with.
    """
    memory = Memory()
    monitor = Monitor(model, **options, probe=inputs, directory=None, sinks=[memory])
    monitor.probe(step)
    monitor.close()
    if not memory.readings:  # the monitor has warned; the reason belongs to the checkpoint
        with_reason = Monitor(model, **options, directory=None, background=False, strict=True)
        with_reason.probe(step, inputs)
        raise ValueError("no reading came of it")
    return memory.readings[0], monitor.describe()


__all__ = ["scan"]
