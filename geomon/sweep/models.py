"""Loads models and state dicts from files and folders."""

import importlib
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from geomon.advice import to_install
from geomon.failures import failures

# Parts around the blocks that a checkpoint of another task lacks. Any other missing weight would be
# random, and is an error.
_HEAD = re.compile(
    r"(?:^|\.)(?:pooler|lm_head|classifier|score|head|heads|masked_spec_embed|mask_token)(?:\.|$)"
)
# Names under which files hold the weights of a model.
_WEIGHTS = ("state_dict", "model", "model_state_dict")
# Weights of a whole model; an adapter in the same folder is then ignored.
_WHOLE = ("model*.safetensors", "pytorch_model*.bin")


def is_model(folder: Path) -> bool:
    """Return whether a folder holds a model of transformers, or an adapter."""
    return (folder / "config.json").is_file() or is_adapter(folder)


def is_adapter(folder: Path) -> bool:
    """Return whether a folder holds a peft adapter, and not the whole model too."""
    has_whole = any(any(folder.glob(pattern)) for pattern in _WHOLE)
    return (folder / "adapter_config.json").is_file() and not has_whole


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


def state_in(path: Path) -> Mapping[str, Any]:
    """Return the state dict in a file of Lightning or of a plain training loop."""
    content = read_file(path)
    held: Mapping[str, Any] = content if isinstance(content, dict) else {}
    for name in _WEIGHTS:
        if isinstance(held.get(name), Mapping):
            return cast("Mapping[str, Any]", held[name])
    if not (held and all(isinstance(value, torch.Tensor) for value in held.values())):
        raise ValueError(
            f"{path} holds no weights "
            f"({', '.join(map(str, list(held)[:5])) or type(content).__name__}): expected a state "
            f"dict, or a dict with one as {' or '.join(_WEIGHTS)}"
        )
    return held


def hub_model(source: str, revision: str = "main") -> nn.Module:
    """Load a model of transformers from a folder or the hub; raise if blocks lack weights."""
    transformers = import_transformers()
    with _quiet(transformers):
        model, report = transformers.AutoModel.from_pretrained(
            source, revision=revision, output_loading_info=True, trust_remote_code=False
        )
    lacking = sorted(name for name in report["missing_keys"] if _HEAD.search(name) is None)
    if lacking:
        raise ValueError(
            f"{source} lacks {len(lacking)} of the weights of {type(model).__name__}, such as "
            f"{lacking[0]}: they would be random; expected a checkpoint of this model"
        )
    loaded: nn.Module = model
    return loaded


def merged_model(base: str, adapter: Path) -> nn.Module:
    """Load a model merged with an adapter, which gives the same outputs up to rounding.

    The model has the class named in its configuration, because names of an adapter's weights
    include the path through its head.
    """
    transformers = import_transformers()
    try:
        peft = importlib.import_module("peft")
    except ImportError as error:
        raise ImportError(
            f"{adapter} holds an adapter, which needs peft ({error}): pip install peft; or merge "
            "it with its model and save that (merge_and_unload(), save_pretrained())"
        ) from error
    with _quiet(transformers), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # like the reports of a load
        # If nothing of the adapter was loaded, the result would silently be the plain model.
        warnings.filterwarnings("error", message=".*missing adapter keys")
        try:
            config = transformers.AutoConfig.from_pretrained(base, trust_remote_code=False)
            name = next(iter(config.architectures or ()), "")
            family = getattr(transformers, name, transformers.AutoModel)
            adapted = peft.PeftModel.from_pretrained(family.from_pretrained(base), str(adapter))
            model: nn.Module = adapted.merge_and_unload().base_model
        except failures() as error:
            raise ValueError(
                f"it cannot be merged with its model, {base} ({one_line(error)}): if the model has "
                "moved, name it, and the adapters by --checkpoints FOLDER, or "
                "trainer_checkpoints(folder, base=model); only adapters that add to the model's "
                "weights can be merged (LoRA, for example)"
            ) from error
    return model


def one_line(error: BaseException) -> str:
    """Return the message of an error in one line of limited length."""
    return " ".join(str(error).split())[:300]


def import_transformers() -> Any:
    """Import transformers."""
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise ImportError(
            f"models of transformers need that package ({error}): {to_install('huggingface')}"
        ) from error


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Hide progress bars and reports of a load, and restore both settings afterwards."""
    logging: Any = transformers.utils.logging
    verbosity, has_bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if has_bar:
            logging.enable_progress_bar()
