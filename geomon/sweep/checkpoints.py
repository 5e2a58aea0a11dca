"""Find the checkpoints of a model, their order, and their training steps."""

import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from geomon.failures import failures

Build = Callable[..., nn.Module]

# The step in the name of a checkpoint: checkpoint-500, step1000, epoch=0-step=150.
_STEP = re.compile(r"(?:checkpoint|step)[-_=]?(\d+)", re.IGNORECASE)
_FILES = "*.ckpt"
_ADAPTER = "adapter_config.json"
# Weights of a whole model; an adapter in the same folder is then ignored.
_WHOLE = ("model*.safetensors", "pytorch_model*.bin")


@dataclass(frozen=True)
class Checkpoint:
    """Weights of a model at one step of its training.

    Attributes:
        name: Name in messages.
        step: Number of optimizer updates already in the weights; -1 if unknown.
        source: Folder, file, or name of the model on the hub.
        revision: Revision of the model, if it is on the hub. Defaults to "main".
        base: Folder or name of the model that an adapter in the folder belongs to. Defaults to
            None, for a folder with a whole model.
    """

    name: str
    step: int
    source: str
    revision: str = "main"
    base: str | None = None

    @property
    def is_file(self) -> bool:
        """Whether the weights are in a file, which does not say the class of the model."""
        return Path(self.source).is_file()


def find_checkpoints(
    model: str | os.PathLike[str] | Build,
    checkpoints: str | os.PathLike[str] | None = None,
    revisions: Sequence[str] = (),
) -> tuple[list[Checkpoint], list[str]]:
    """Find the checkpoints of a model, steps ascending, and remarks on them.

    The step is `global_step` in the `trainer_state.json` of a transformers folder or in a Lightning
    file, or the number in the name (`checkpoint-500`, `step1000`). If any of several lacks a step,
    all are numbered 0, 1, 2 in order. If two have the same step, the first one is taken.

    Args:
        model: Folder or hub name of a model, or a function that builds it.
        checkpoints: Folder with checkpoints. Defaults to None, for the model itself.
        revisions: Revisions of a model on the hub, in training order. Defaults to ().

    Returns:
        The checkpoints, and remarks.

    Raises:
        ValueError: If both a folder and revisions are given, or nothing is found.
    """
    if checkpoints is not None and revisions:
        raise ValueError("pass a folder of checkpoints or revisions of a model, not both")
    if not isinstance(model, str | os.PathLike):
        found = _files(checkpoints)
    elif revisions:
        found = [Checkpoint(one, _step_in(one), os.fspath(model), one) for one in revisions]
    else:
        found = _folders(os.fspath(model), checkpoints)
    unknown, notes = [one.name for one in found if one.step < 0], []
    if unknown:
        found = [replace(one, step=number) for number, one in enumerate(found)]
    if unknown and len(found) > 1:
        notes = [
            "steps are only places in the order of the checkpoints, because the step is unknown "
            f"for {len(unknown)} of {len(found)}, such as {unknown[0]}"
        ]
    steps = {one.step: one for one in reversed(found)}
    return [steps[step] for step in sorted(steps)], notes


def _files(checkpoints: str | os.PathLike[str] | None) -> list[Checkpoint]:
    folder = Path("" if checkpoints is None else checkpoints)
    paths = [folder] if folder.is_file() else sorted(folder.glob(_FILES))
    if checkpoints is None or not paths:
        raise ValueError(
            f"a function that builds a model needs the folder of its {_FILES} files, "
            f"checkpoints=FOLDER (--checkpoints FOLDER), got {checkpoints}; for checkpoint-N "
            "folders of the Trainer, pass the model's folder instead of a function"
        )
    return [Checkpoint(path.name, _step_of_file(path), str(path)) for path in paths]


def _folders(model: str, checkpoints: str | os.PathLike[str] | None) -> list[Checkpoint]:
    """Find a model, or the models and adapters in a folder.

    A Trainer leaves the last adapter, or the finished model, next to its checkpoint-N folders.
    """
    folder = Path(model if checkpoints is None else checkpoints)
    is_finished = checkpoints is None and _is_model(folder) and not _is_adapter(folder)
    inside = [] if is_finished else sorted(filter(_is_model, folder.glob("*")), key=_in_order)
    paths = inside or [folder] * _is_model(folder)
    # Adapters in a different folder than the named model belong to that model.
    has_own = _is_adapter(Path(model)) or Path(model).absolute() == folder.absolute()
    looks_local = model.startswith((".", "/", "~")) or model.count("/") > 1 or folder.exists()
    if not paths and (looks_local or checkpoints is not None):
        raise ValueError(
            f"no checkpoints in {folder}: expected the folder of a transformers model (with a "
            "config.json), of an adapter or of checkpoint-N folders; the name of a model on the "
            f"hub; or, for {_FILES} files of Lightning, module:function, which builds the model"
        )
    if not paths:
        return [Checkpoint(folder.name, _step_in(folder.name), model)]
    return [
        Checkpoint(
            path.name, _step_of_folder(path), str(path),
            base=_base_of(path, None if has_own else model) if _is_adapter(path) else None,
        )
        for path in paths
    ]  # fmt: skip


def _is_model(folder: Path) -> bool:
    return (folder / "config.json").is_file() or _is_adapter(folder)


def _is_adapter(folder: Path) -> bool:
    """Return whether a folder holds a peft adapter, and not the whole model too."""
    has_whole = any(any(folder.glob(pattern)) for pattern in _WHOLE)
    return (folder / _ADAPTER).is_file() and not has_whole


def _base_of(folder: Path, given: str | None) -> str:
    """Return the model that the adapter in a folder belongs to."""
    base = given or json.loads((folder / _ADAPTER).read_text()).get("base_model_name_or_path")
    if not base:
        raise ValueError(
            f"{folder / _ADAPTER} does not say which model the adapter belongs to: name the model, "
            "and the adapters by checkpoints=FOLDER (--checkpoints FOLDER)"
        )
    return str(base)


def _step_of_folder(folder: Path) -> int:
    try:
        return int(json.loads((folder / "trainer_state.json").read_text())["global_step"])
    except (OSError, ValueError, KeyError, TypeError):
        return _step_in(folder.name)


def _step_of_file(path: Path) -> int:
    try:
        return int(read_file(path)["global_step"])
    except (ValueError, LookupError, TypeError):  # reported and skipped later
        return _step_in(path.name)


def _step_in(name: str) -> int:
    """Return the step at the end of a name, or -1."""
    steps = _STEP.findall(name)
    return int(steps[-1]) if steps else -1


def _in_order(path: Path) -> str:
    """Return a key that sorts epoch-9 before epoch-10."""
    return re.sub(r"\d+", lambda number: number[0].zfill(20), path.name)


def one_line(error: BaseException) -> str:
    """Return the message of an error in one line of limited length."""
    return " ".join(str(error).split())[:300]


def read_file(path: str | os.PathLike[str]) -> Any:
    """Read a `torch.save` file without running code in it; its tensors stay on disk."""
    try:
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except OSError:
        raise
    except failures() as error:  # torch has many kinds of errors for broken files
        first = one_line(error).partition(". ")[0]
        raise ValueError(
            f"{path} is not a file of tensors and plain values ({first}): expected a complete "
            "torch.save file, as Lightning writes it, whose hyper-parameters are plain values or "
            "classes that torch.serialization.add_safe_globals allows"
        ) from error
