"""Checkpoints of a model: which there are, in which order, and at which step of the training."""

import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

Build = Callable[..., nn.Module]

# What the name of a checkpoint says about its step: checkpoint-500, step1000, epoch=0-step=150.
_STEP = re.compile(r"(?:checkpoint|step)[-_=]?(\d+)", re.IGNORECASE)
_FILES = "*.ckpt"
_ADAPTER = "adapter_config.json"
# Weights of a whole model, beside which an adapter counts for nothing.
_WHOLE = ("model*.safetensors", "pytorch_model*.bin")


@dataclass(frozen=True)
class Checkpoint:
    """Weights of a model at one step of its training.

    Attributes:
        name: What messages call the checkpoint.
        step: Number of optimizer updates already in the weights; -1 where nothing says it.
        source: Folder, file, or name of the model on the hub.
        revision: Revision of the model, where it is on the hub.
        base: Folder or name of the model to which an adapter in the folder belongs; None if the
            folder holds a whole model.
    """

    name: str
    step: int
    source: str
    revision: str = "main"
    base: str | None = None

    @property
    def is_file(self) -> bool:
        """Whether the weights stand in a file, which does not say of which class the model is."""
        return Path(self.source).is_file()


def find_checkpoints(
    model: str | os.PathLike[str] | Build,
    checkpoints: str | os.PathLike[str] | None = None,
    revisions: Sequence[str] = (),
) -> tuple[list[Checkpoint], list[str]]:
    """Find the checkpoints of a model, steps ascending.

    The step is that of `trainer_state.json` in a folder of transformers, `global_step` in a file of
    Lightning, or the number in the name (`checkpoint-500`, `step1000`). Where one of several names
    no step, all are numbered 0, 1, 2 in order. Of two with the same step, the first is taken.
    """
    name = os.fspath(model) if isinstance(model, str | os.PathLike) else None
    if checkpoints is None and name is not None and not revisions:
        checkpoints = _run_folder(Path(name))
    if checkpoints is not None:
        if revisions:
            raise ValueError("give a folder of checkpoints or revisions of a model, not both")
        folder = Path(checkpoints)
        found = _files(folder) if name is None else _folders(folder, name)
    elif name is None:
        raise ValueError(
            "a function that builds a model needs the folder of its *.ckpt files: "
            "checkpoints=FOLDER (--checkpoints FOLDER)"
        )
    else:
        found = _of_model(name, revisions)
    return _ordered(found)


def _run_folder(folder: Path) -> Path | None:
    """Return the folder itself where it holds the checkpoints of a run and no model.

    A Trainer that fine-tunes an adapter leaves the last one beside its checkpoint-N folders.
    """
    whole = (folder / "config.json").is_file() and not _is_adapter(folder)
    return folder if not whole and any(_models_in(folder)) else None


def _models_in(folder: Path) -> Iterable[Path]:
    return (path for path in folder.glob("*") if _is_model(path))


def _is_model(folder: Path) -> bool:
    return (folder / "config.json").is_file() or _is_adapter(folder)


def _is_adapter(folder: Path) -> bool:
    """Return whether a folder holds an adapter of peft, and not the whole model too."""
    has_whole = any(any(folder.glob(pattern)) for pattern in _WHOLE)
    return (folder / _ADAPTER).is_file() and not has_whole


def _base_of(folder: Path, given: str | None = None) -> str | None:
    """Return the model to which the adapter in a folder belongs; None if it holds none."""
    if not _is_adapter(folder):
        return None
    if given is not None:
        return given
    try:
        base = json.loads((folder / _ADAPTER).read_text())["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError):
        base = None
    if not base:
        raise ValueError(
            f"{folder / _ADAPTER} does not say which model the adapter belongs to: name the model, "
            "and the adapters by checkpoints=FOLDER (--checkpoints FOLDER)"
        )
    return str(base)


def _files(path: Path) -> list[Checkpoint]:
    paths = [path] if path.is_file() else sorted(path.glob(_FILES))
    if not paths:
        raise ValueError(
            f"no checkpoints in {path}: expected {_FILES} files of Lightning; for checkpoint-N "
            "folders of the Trainer name the model's folder, and no function"
        )
    return [Checkpoint(file.name, _step_of_file(file), str(file)) for file in paths]


def _folders(run: Path, model: str) -> list[Checkpoint]:
    paths = sorted(_models_in(run), key=_in_order) or [run] * _is_adapter(run)
    if not paths:
        raise ValueError(
            f"no checkpoints in {run}: expected checkpoint-N folders of the Trainer; for {_FILES} "
            "files of Lightning name the function that builds the model, module:function"
        )
    # Adapters that stand elsewhere than the model that was named are of that model.
    own = _is_adapter(Path(model)) or Path(model).absolute() == run.absolute()
    base = None if own else model
    return [
        Checkpoint(path.name, _step_of_folder(path), str(path), base=_base_of(path, base))
        for path in paths
    ]


def _of_model(model: str, revisions: Sequence[str]) -> list[Checkpoint]:
    folder = Path(model)
    if revisions:
        return [Checkpoint(name, _step_in(name), model, name) for name in revisions]
    if folder.is_dir() and not _is_model(folder):
        raise ValueError(
            f"no model in {folder}: expected the folder of a transformers model, with a "
            "config.json in it, of an adapter, or of checkpoint-N folders"
        )
    looks_local = model.startswith((".", "/", "~")) or model.count("/") > 1 or folder.is_file()
    if not folder.is_dir() and looks_local:
        raise ValueError(
            f"no model at {model}: expected the folder of a transformers model, the name of one on "
            "the hub, or a function that builds a model, as module:function"
        )
    return [Checkpoint(folder.name, _step_of_folder(folder), model, base=_base_of(folder))]


def _ordered(found: list[Checkpoint]) -> tuple[list[Checkpoint], list[str]]:
    unknown = [one.name for one in found if one.step < 0]
    if not unknown:
        steps: dict[int, Checkpoint] = {}
        for one in found:
            steps.setdefault(one.step, one)
        return [steps[step] for step in sorted(steps)], []
    numbered = [replace(one, step=number) for number, one in enumerate(found)]
    if len(found) == 1:
        return numbered, []
    note = (
        "the step is the place in the order of the checkpoints: no step is known of "
        f"{len(unknown)} of {len(found)}, such as {unknown[0]}"
    )
    return numbered, [note]


def _step_of_folder(folder: Path) -> int:
    try:
        return int(json.loads((folder / "trainer_state.json").read_text())["global_step"])
    except (OSError, ValueError, KeyError, TypeError):
        return _step_in(folder.name)


def _step_of_file(path: Path) -> int:
    try:
        return int(read_file(path)["global_step"])
    except (ValueError, KeyError, TypeError):  # named and skipped when its turn comes
        return _step_in(path.name)


def _step_in(name: str) -> int:
    """Return the step that a name ends with, or -1."""
    steps = _STEP.findall(name)
    return int(steps[-1]) if steps else -1


def _in_order(path: Path) -> str:
    """Return a key that sorts epoch-9 before epoch-10."""
    return re.sub(r"\d+", lambda number: number[0].zfill(20), path.name)


def one_line(error: BaseException) -> str:
    """Return the words of an error in one line, cut where they would fill a page."""
    return " ".join(str(error).split())[:300]


def read_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a checkpoint of Lightning without running code in it; its tensors stay on the disk."""
    try:
        content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # torch has a kind for each way in which a file can be broken
        first = one_line(error).partition(". ")[0]
        raise ValueError(
            f"{path} is no checkpoint of tensors and plain values ({first}): expected a whole file "
            "of Lightning, whose hyper-parameters are plain values or classes that "
            "torch.serialization.add_safe_globals allows"
        ) from error
    if not isinstance(content, dict):
        raise ValueError(
            f"{path} holds a {type(content).__name__}: expected a dict with state_dict"
        )
    return content
