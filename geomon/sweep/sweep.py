"""The scan: one model and one monitor, into which each checkpoint's weights are loaded."""

import gc
import hashlib
import logging
import os
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
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
from geomon.note_kinds import NoteKind
from geomon.record import FILE_NAME, Readings, Sink, printable, read
from geomon.sweep.checkpoints import Checkpoint
from geomon.sweep.models import one_line

log = logging.getLogger("geomon.sweep")

# Prefix of a scan's arguments in the description of a run.
_ASKED = "training/scan/"
# Most letters of a setting that a record keeps.
_MOST_LETTERS = 200


def scan(
    model: nn.Module | None,
    checkpoints: Iterable[Checkpoint],
    inputs: Any,
    *,
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
    scan; if it can be read then, later ones are read again too. The random state stays the same.

    Args:
        model: Model into which weights are loaded; afterwards it holds the last checkpoint's
            weights, in eval mode, on the device. None if each checkpoint loads a model; the first
            model then takes the weights of the others.
        checkpoints: Checkpoints of one training, in any order.
        inputs: Fixed inputs: a tensor, a dict of keyword arguments, a tuple of arguments, or a
            function of the model.
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
        ValueError: If there are no checkpoints, none of them can be read, the folder holds a
            different record, or an argument is out of range.
    """
    check_count("tokens", tokens)
    check_count("splits", splits)
    found = _in_order(checkpoints)
    asked = {"inputs": _digest(inputs), "source": found[0].source, "blocks": blocks}
    settings = {name: str(value)[-_MOST_LETTERS:] for name, value in asked.items()}
    options: dict[str, Any] = {
        "metrics": metrics, "tokens": tokens, "splits": splits, "queries": queries, "seed": seed,
    }  # fmt: skip
    recorded = _recorded(Path(directory), settings, options)
    options |= {"blocks": blocks, "probe": inputs, "background": False, "schedule": 1}
    remarks = _Remarks()
    monitor: Monitor | None = None
    with ExitStack() as stack:
        for checkpoint, network in _load_each(found, recorded, model, remarks):
            if monitor is None:
                _prepare(network, device)
                monitor = Monitor(network, **options, directory=directory, sinks=sinks,
                                  settings={"scan": settings})  # fmt: skip
                stack.enter_context(monitor).account.clock = lambda: 0.0  # no training is waiting
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
    if not recorded and (monitor is None or monitor.latest is None):
        remarks.raise_failures()
    return read(directory)


def _in_order(checkpoints: Iterable[Checkpoint]) -> list[Checkpoint]:
    """Return the last checkpoint of each step, steps ascending; raises ValueError without any."""
    by_step = {each.step: each for each in checkpoints}
    if not by_step:
        raise ValueError("there are no checkpoints: expected a Checkpoint(step, load) for each")
    return [by_step[step] for step in sorted(by_step)]


def _prepare(network: nn.Module, device: str | None) -> None:
    """Move a model to a device (by default the first accelerator), in eval mode."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    network.eval().to(device or accelerator or "cpu")


class _Remarks:
    """Remarks on checkpoints that are left out: logged at once, and notes of the next reading.

    `failures` lists these checkpoints, each with its reason.
    """

    def __init__(self) -> None:
        self.failures: list[str] = []
        self._taken = 0

    def take(self) -> list[Note]:
        """Return the remarks since the last call."""
        new, self._taken = self.failures[self._taken :], len(self.failures)
        kind = NoteKind.CHECKPOINT_LEFT_OUT
        return [Note(kind, f"a checkpoint is left out: {each}", about=each) for each in new]

    def raise_failures(self) -> None:
        """Raise a ValueError that names the first failure and the number of others, if any."""
        if self.failures:
            others = len(self.failures) - 1
            more = f", and {others} more failed too" if others else ""
            raise ValueError(f"no checkpoint could be read: {self.failures[0]}{more}")

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
                    "; sequences may be longer than the model allows (--length), or hold tokens "
                    "that it does not know"
                )
            self.failures.append(f"{checkpoint.words}: {words}")
            log.warning("a checkpoint is left out: %s", printable(self.failures[-1]))


def _load_each(
    found: Sequence[Checkpoint],
    recorded: Container[int],
    model: nn.Module | None,
    remarks: _Remarks,
) -> Iterator[tuple[Checkpoint, nn.Module]]:
    """Load checkpoints that are not recorded into one model, leaving out those that fail."""
    for checkpoint in found:
        if checkpoint.step in recorded:
            continue
        gc.collect()  # modules refer to each other in cycles
        with remarks.of_failure(checkpoint):
            model = _loaded(checkpoint, model)
            yield checkpoint, model


def _loaded(checkpoint: Checkpoint, model: nn.Module | None) -> nn.Module:
    """Load a checkpoint into the model, or return the model that it loads if there is none yet."""
    with torch.random.fork_rng():
        weights = checkpoint.load()
    if isinstance(weights, nn.Module):
        model, weights = weights if model is None else model, weights.state_dict()
    if not isinstance(weights, Mapping):
        raise ValueError(
            f"it loads a {type(weights).__name__}: expected a state dict, or a model with weights"
        )
    if model is None:
        raise ValueError(
            "it loads a state dict, and there is no model for it: pass one, scan(model, ...)"
        )
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise ValueError(f"its weights do not fit the model: {one_line(error)}") from error
    return model


def _recorded(directory: Path, settings: Mapping[str, str], options: Mapping[str, Any]) -> set[int]:
    """Return the steps of the same scan in the folder.

    Raises ValueError if the record is not of a scan, or of a different one.
    """
    readings = read(directory) if (directory / FILE_NAME).is_file() else Readings([], [])
    if not readings.readings:
        return set()
    before = readings.runs[0] if readings.runs else {}
    if f"{_ASKED}inputs" not in before:
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
