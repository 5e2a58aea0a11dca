"""Finds the model, the checkpoints and the inputs that the command line names."""

import os
import pkgutil
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from torch import nn

from geomon.sweep.checkpoints import (
    Checkpoint,
    hub_checkpoints,
    lightning_checkpoints,
    trainer_checkpoints,
)
from geomon.sweep.inputs import text_windows
from geomon.sweep.models import read_file

_IMPORT_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def find_named(
    model: str, checkpoints: Path | None, revisions: Sequence[str]
) -> tuple[nn.Module | None, list[Checkpoint]]:
    """Find the checkpoints of a named model; also return the model if a named function builds it.

    Args:
        model: Folder of a model or of checkpoints, hub name, or `module:function`.
        checkpoints: Folder with checkpoints, or None for the model itself.
        revisions: Revisions of a model on the hub.

    Raises:
        ValueError: If nothing is found, or both a folder and revisions are given.
    """
    if checkpoints is not None and revisions:
        raise ValueError("pass a folder of checkpoints or revisions of a model, not both")
    build = None if Path(model).exists() else _imported(model)
    if build is not None:
        if checkpoints is None:
            raise ValueError(f"{model} needs the folder of its *.ckpt files, --checkpoints FOLDER")
        found = lightning_checkpoints(checkpoints)
        first = checkpoints if checkpoints.is_file() else checkpoints / found[0].name
        return _built(build, first), found
    if revisions:
        return None, hub_checkpoints(model, revisions)
    looks_local = model.startswith((".", "/", "~")) or model.count("/") > 1
    if checkpoints is None and not looks_local and not Path(model).exists():
        return None, hub_checkpoints(model)
    return None, trainer_checkpoints(checkpoints or model, None if checkpoints is None else model)


def read_inputs(
    model: str, inputs: Path | None, text: Path | None, tokenizer: str | None, sizes: dict[str, int]
) -> Any:
    """Read a batch from a file, or cut a text into windows of tokens.

    Args:
        model: Name of the model, which is the tokenizer's if none is named.
        inputs: File with a batch, saved by `torch.save`.
        text: File with a text.
        tokenizer: Folder or hub name of a tokenizer, or "bytes".
        sizes: Largest number of sequences, and of tokens in each.

    Raises:
        ValueError: If not exactly one file is given, or the tokenizer does not exist.
    """
    if (inputs is None) == (text is None):
        raise ValueError(
            "pass one of --text FILE, for a model that reads text, and --inputs FILE, a batch "
            "saved by torch.save, for any model"
        )
    if inputs is not None:
        return read_file(inputs)
    assert text is not None
    is_function = not Path(model).exists() and _IMPORT_PATH.fullmatch(model) is not None
    windows = text_windows(text, tokenizer or model, **sizes)
    return windows if is_function else {"input_ids": windows}


def _imported(name: str) -> Callable[..., Any] | None:
    """Import a function that builds a model; None if the name is not `module:function`."""
    if _IMPORT_PATH.fullmatch(name) is None:
        return None
    try:
        found: Any = pkgutil.resolve_name(name)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"{name} cannot be imported ({error}): expected module:function, with a function that "
            "builds the model"
        ) from error
    if not callable(found) or isinstance(found, nn.Module):
        raise ValueError(f"{name} is not a function: expected one that builds the model")
    return cast("Callable[..., Any]", found)


def _built(build: Callable[..., Any], file: str | os.PathLike[str]) -> nn.Module:
    """Build a model with the hyper-parameters in a file of Lightning."""
    content = read_file(file)
    settings = content.get("hyper_parameters", {}) if isinstance(content, dict) else {}
    try:
        model = build(**settings)
    except TypeError as error:
        kept = ", ".join(map(str, settings)) or "none"
        raise ValueError(
            f"the model of {Path(file).name} cannot be built ({error}): the function is called "
            f"with the hyper-parameters in the file ({kept}); name one that takes these"
        ) from error
    if not isinstance(model, nn.Module):
        raise ValueError(f"the function built a {type(model).__name__}: expected a torch module")
    return model
