"""The sweep: one model and one monitor, into which each checkpoint's weights are loaded."""

import gc
import hashlib
import logging
import os
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from geomon.failures import failures
from geomon.metrics import METRICS, Evaluator
from geomon.monitor import Monitor, check_count
from geomon.note import Note
from geomon.record import FILE_NAME, Readings, Sink, read
from geomon.record.printable import printable
from geomon.sweep.checkpoints import Build, Checkpoint, find_checkpoints, one_line, read_file
from geomon.sweep.inputs import make_inputs
from geomon.sweep.models import load_checkpoint, resolve_build

log = logging.getLogger("geomon.sweep")

# Prefix of a scan's arguments in the description of a run.
_ASKED = "training/scan/"
# Most letters of a setting that a record keeps.
_MOST_LETTERS = 200


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
    """Read the geometry of a model at its checkpoints, as if it had been watched in training.

    The weights of each checkpoint are loaded into one model, which a `Monitor` probes on the same
    inputs: values, alerts, record and sinks work as in a live run with that probe. A step that is
    already in the record is not read again, so an interrupted scan resumes. A checkpoint that fails
    is named in a warning and in the next reading's notes, left out, and tried again by the next
    scan; if it can be read then, later ones are read again too.

    Args:
        model: Folder of a transformers model, of a peft adapter, or of `checkpoint-N` folders of
            either; name of a model on the hub; or, for `*.ckpt` files of Lightning, the function
            that builds the model from the hyper-parameters in the first file, itself or as text
            "module:function".
        checkpoints: Folder with `checkpoint-N` folders or `*.ckpt` files. Defaults to None, for the
            model itself.
        revisions: Revisions of a model on the hub, in training order. Defaults to ().
        text: File with the text that a text model reads.
        inputs: Fixed inputs, which models without a tokenizer and models of images or sounds need:
            a tensor, a dict of keyword arguments, a tuple of arguments, a function of the model, or
            the path of a file written by `torch.save`.
        sequences: Largest number of sequences from the text. Defaults to 64.
        length: Largest number of tokens in a sequence of the text. Defaults to 128.
        directory: Folder of the record. Defaults to "scan".
        metrics: Metrics to measure: a dict from a name to a function of views. Defaults to
            `METRICS`.
        tokens: Number of rows of hidden states in one split of the estimate. Defaults to 4096.
        splits: Largest number of splits; with at least two, their deviation is recorded too.
            Defaults to 1.
        queries: Number of rows of a split from which distances to all its rows are measured, or
            None for all. Defaults to 1024.
        seed: Seed of the private generator that samples rows. Defaults to 0.
        blocks: Regular expression that matches the whole names of the blocks, if the search does
            not find them.
        device: Device for the model, such as "cuda". Defaults to the first accelerator, or else the
            CPU.
        sinks: Objects with `write(reading)` and `close()` that get every new reading too. Defaults
            to ().

    Returns:
        All readings of the record.

    Raises:
        ValueError: If `checkpoints` is empty, none of them can be read, no inputs can be made
            from the text, the folder holds a different record, or an argument is out of range.
        FileNotFoundError: If the text file does not exist.
        ImportError: If transformers is missing but needed.
    """
    for name, value in (("sequences", sequences), ("length", length), ("tokens", tokens),
                        ("splits", splits)):  # fmt: skip
        check_count(name, value)
    if text is not None and inputs is not None:
        raise ValueError("pass a text or inputs, not both")
    build = _build_of(model)
    content = None if text is None else Path(text).read_bytes()
    batch = read_file(inputs) if isinstance(inputs, str | os.PathLike) else inputs
    found, notes = find_checkpoints(model if build is None else build, checkpoints, revisions)
    asked = {
        "model": _name_of(model), "checkpoints": checkpoints and os.path.abspath(checkpoints),
        "inputs": _digest(batch if content is None else content), "sequences": sequences,
        "length": length, "blocks": blocks,
    }  # fmt: skip
    settings = {name: str(value)[-_MOST_LETTERS:] for name, value in asked.items()}
    options: dict[str, Any] = {
        "metrics": metrics, "tokens": tokens, "splits": splits, "queries": queries, "seed": seed,
    }  # fmt: skip
    recorded = _recorded(Path(directory), settings, options)
    remarks = _Remarks()
    monitor: Monitor | None = None
    with ExitStack() as stack:
        for checkpoint, network in _load_each(found, recorded, build, remarks):
            if monitor is None:
                accelerator = torch.accelerator.current_accelerator(check_available=True)
                network.eval().to(device or accelerator or "cpu")
                if batch is None:
                    batch, said = make_inputs(network, checkpoint, content, sequences, length)
                    notes += said
                options |= {"blocks": blocks, "probe": batch, "background": False, "schedule": 1}
                monitor = Monitor(network, **options, directory=directory, sinks=sinks,
                                  settings={"scan": settings})  # fmt: skip
                stack.enter_context(monitor).account.clock = lambda: 0.0  # no training is waiting
                remarks.add(notes)
            # Steps of a record ascend, so steps after one that is read now are read again.
            recorded -= {step for step in recorded if step > checkpoint.step}
            monitor.outbox.note(remarks.take())
            monitor.probe(checkpoint.step)
            if monitor.latest is None or monitor.latest.step != checkpoint.step:
                # The monitor has warned; find the reason for this checkpoint.
                again = Monitor(network, **options, directory=None, strict=True)
                with remarks.of_failure(checkpoint), again:
                    again.probe(checkpoint.step)
                    raise ValueError("it gave no reading")
    if monitor is None:
        for sink in sinks:
            sink.close()
    if remarks.failures and not recorded and (monitor is None or monitor.latest is None):
        others = len(remarks.failures) - 1
        more = f", and {others} more failed too" if others else ""
        raise ValueError(f"no checkpoint could be read: {remarks.failures[0]}{more}")
    return read(directory)


class _Remarks:
    """Remarks on checkpoints, logged at once and added to the notes of the next reading.

    `failures` lists the checkpoints that were left out, each with its reason.
    """

    def __init__(self) -> None:
        self.failures: list[str] = []
        self._said: list[Note] = []
        self._taken = 0

    def add(self, texts: Sequence[str]) -> None:
        """Log remarks that were not made before."""
        for note in (Note(text, text) for text in texts):
            if note not in self._said:
                self._said.append(note)
                log.warning("%s", printable(note.text))

    def take(self) -> list[Note]:
        """Return the remarks since the last call."""
        new, self._taken = self._said[self._taken :], len(self._said)
        return new

    @contextmanager
    def of_failure(self, checkpoint: Checkpoint) -> Iterator[None]:
        """Leave a checkpoint out if the body of the `with` fails."""
        try:
            yield
        except failures() as error:
            words = one_line(error)
            if not isinstance(error, ValueError | ImportError):
                words = f"{type(error).__name__}: {words}"
            if isinstance(error, IndexError):
                words += (
                    "; sequences may be longer than the model allows (length=, --length), or hold "
                    "tokens that it does not know"
                )
            if isinstance(error, OSError) and not Path(checkpoint.source).exists():
                words = f"there is no folder {checkpoint.source} here, and from the hub: {words}"
            self.failures.append(f"{checkpoint.name} (step {checkpoint.step}): {words}")
            self.add([f"a checkpoint is left out: {self.failures[-1]}"])


def _load_each(
    found: Sequence[Checkpoint], recorded: Container[int], build: Build | None, remarks: _Remarks
) -> Iterator[tuple[Checkpoint, nn.Module]]:
    """Load checkpoints that are not recorded into one model, leaving out those that fail."""
    network: nn.Module | None = None
    for checkpoint in found:
        if checkpoint.step in recorded:
            continue
        gc.collect()  # modules refer to each other in cycles
        with remarks.of_failure(checkpoint):
            network, notes = load_checkpoint(checkpoint, build, network)
            remarks.add(notes)
            yield checkpoint, network


def _recorded(directory: Path, settings: Mapping[str, str], options: Mapping[str, Any]) -> set[int]:
    """Return the steps of the same scan in the folder.

    Raises ValueError if the record is not of a scan, or of a different one.
    """
    readings = read(directory) if (directory / FILE_NAME).is_file() else Readings([], [])
    if not readings.readings:
        return set()
    before = readings.runs[0] if readings.runs else {}
    if f"{_ASKED}model" not in before:
        raise ValueError(
            f"{directory} holds the record of a training: choose another folder, "
            "directory=FOLDER (--directory FOLDER)"
        )
    asked = {**{f"{_ASKED}{name}": value for name, value in settings.items()}, **options}
    held = {name: before.get(name) for name in asked}
    for each in (asked, held):
        each["metrics"] = list(each["metrics"] or ())
    differing = [name.removeprefix(_ASKED) for name in asked if asked[name] != held[name]]
    if differing:
        raise ValueError(
            f"{directory} holds a scan with other {' and '.join(differing)}: choose another "
            "folder, directory=FOLDER (--directory FOLDER)"
        )
    return {reading.step for reading in readings}


def _build_of(model: str | os.PathLike[str] | Build) -> Build | None:
    if isinstance(model, nn.Module):
        raise ValueError(
            "this is a model, and a scan would replace its weights: pass a function that builds "
            "it, or use measure(model, inputs) for this model only"
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


def _digest(inputs: Any) -> str:
    """Compute a text that identifies inputs; a function is identified by its name."""
    return hashlib.sha256(msgspec.json.encode(inputs, enc_hook=_plain)).hexdigest()[:32]


def _plain(part: Any) -> Any:
    if isinstance(part, Tensor):
        content = part.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        return str(part.dtype), list(part.shape), hashlib.sha256(content.data).hexdigest()
    if isinstance(part, Mapping):
        return dict(part)
    return getattr(part, "__qualname__", type(part).__name__)


__all__ = ["scan"]
