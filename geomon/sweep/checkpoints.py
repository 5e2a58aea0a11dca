"""Checkpoints: weights of a model at steps of its training, and functions that find them."""

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from geomon.sweep.models import (
    hub_model,
    is_adapter,
    is_model,
    merged_model,
    read_file,
    state_in,
)

# The step in the name of a checkpoint: checkpoint-500, step1000, epoch=0-step=150.
_STEP = re.compile(r"(?:checkpoint|step)[-_=]?(\d+)", re.IGNORECASE)
_FILES = "*.ckpt"


@dataclass(frozen=True)
class Checkpoint:
    """Weights of a model at one step of its training.

    Attributes:
        step: Number of optimizer updates already in the weights.
        load: Function that returns the weights: a state dict, or a model that has them.
        name: Name in messages. Defaults to "", for its step alone.
        source: Folder or name of the training, which all checkpoints of a record share. Defaults to
            "".

    Example:
        >>> Checkpoint(500, lambda: torch.load("step_500.pt")).step
        500
    """

    step: int
    load: Callable[[], Mapping[str, Any] | nn.Module]
    name: str = ""
    source: str = ""

    @property
    def words(self) -> str:
        """The name with the step."""
        return f"{self.name} (step {self.step})" if self.name else f"step {self.step}"


def lightning_checkpoints(folder: str | os.PathLike[str]) -> list[Checkpoint]:
    """Find the `*.ckpt` files of Lightning, or of a loop that saves a state dict.

    The step is `global_step` in the file, or the number in its name (`epoch=0-step=150.ckpt`). No
    code in the files runs. A loop's file is a state dict, or a dict with one as `state_dict`,
    `model` or `model_state_dict`.

    Args:
        folder: Folder with the files, or one of them.

    Raises:
        ValueError: If there are none, or one of several names no step.
    """
    place = Path(folder)
    paths = [place] if place.is_file() else sorted(place.glob(_FILES))
    if not paths:
        raise ValueError(f"no {_FILES} files in {place}: expected the checkpoints of Lightning")
    return _in_order(
        _Found(_step_of_file(path), partial(state_in, path), path.name, place) for path in paths
    )


def trainer_checkpoints(
    folder: str | os.PathLike[str], base: str | os.PathLike[str] | None = None
) -> list[Checkpoint]:
    """Find the `checkpoint-N` folders of the HF Trainer: models of transformers, or peft adapters.

    The step is `global_step` in the folder's `trainer_state.json`, or the number in its name. If
    the folder itself holds a finished model, only that model is read.

    Args:
        folder: Folder with such folders, or one of them.
        base: Folder or name of the model that adapters belong to. Defaults to None, for the one
            that they name. Adapters are merged with it.

    Raises:
        ValueError: If there are none, an adapter names no model, or one of several names no step.
    """
    place = Path(folder)
    is_finished = is_model(place) and not is_adapter(place)
    paths = [] if is_finished else sorted(filter(is_model, place.glob("*")))
    if not paths and is_model(place):
        paths = [place]
    if not paths:
        raise ValueError(
            f"no checkpoints in {place}: expected the folder of a transformers model (with a "
            "config.json), of an adapter, or of checkpoint-N folders"
        )
    return _in_order(
        _Found(_step_of_folder(path), _loads(path, base), path.name, place) for path in paths
    )


def hub_checkpoints(model: str, revisions: Sequence[str] = ("main",)) -> list[Checkpoint]:
    """List revisions of a model on the hub.

    Args:
        model: Name of the model.
        revisions: Revisions whose names hold their step, such as "step1000". Defaults to the model
            as it is now.

    Raises:
        ValueError: If one of several revisions names no step.
    """
    return _in_order(
        _Found(_step_in(each), partial(hub_model, model, each), each, model) for each in revisions
    )


class _Found(NamedTuple):
    """A checkpoint whose step may be unknown, None."""

    step: int | None
    load: Callable[[], Mapping[str, Any] | nn.Module]
    name: str
    place: str | Path


def _in_order(found: Iterable[_Found]) -> list[Checkpoint]:
    """Return checkpoints by step; of several with one step, the first."""
    every = [*found]
    by_step: dict[int, Checkpoint] = {}
    for each in every:
        step = 0 if each.step is None and len(every) == 1 else each.step
        if step is None:
            raise ValueError(
                f"the step of {each.name} is unknown: expected it in the name (checkpoint-500, "
                "step1000) or in the checkpoint; in Python, pass a Checkpoint(step, load) for each"
            )
        by_step.setdefault(step, Checkpoint(step, each.load, each.name, _absolute(each.place)))
    return [by_step[step] for step in sorted(by_step)]


def _absolute(place: str | Path) -> str:
    return os.path.abspath(place) if isinstance(place, Path) else place


def _loads(folder: Path, base: str | os.PathLike[str] | None) -> Callable[[], nn.Module]:
    """Return the function that loads the model in a folder."""
    if not is_adapter(folder):
        return partial(hub_model, str(folder))
    file = folder / "adapter_config.json"
    named = base or json.loads(file.read_text()).get("base_model_name_or_path")
    if not named:
        raise ValueError(
            f"{file} does not say which model the adapter belongs to: name the model, and the "
            "adapters by --checkpoints FOLDER, or trainer_checkpoints(folder, base=model)"
        )
    return partial(merged_model, os.fspath(named), folder)


def _step_of_folder(folder: Path) -> int | None:
    try:
        return int(json.loads((folder / "trainer_state.json").read_text())["global_step"])
    except (OSError, ValueError, KeyError, TypeError):
        return _step_in(folder.name)


def _step_of_file(path: Path) -> int | None:
    try:
        return int(read_file(path)["global_step"])
    except (ValueError, LookupError, TypeError):  # reported when it is loaded
        return _step_in(path.name)


def _step_in(name: str) -> int | None:
    """Return the last step in a name, or None."""
    steps = _STEP.findall(name)
    return int(steps[-1]) if steps else None
