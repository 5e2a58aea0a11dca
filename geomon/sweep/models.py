"""Load the weights of checkpoints into one model, without changing anything else."""

import importlib
import pkgutil
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from geomon.advice import to_install
from geomon.failures import failures
from geomon.sweep.checkpoints import Build, Checkpoint, one_line, read_file

# Parts around the blocks that a checkpoint of another task lacks. Any other missing weight would be
# random, and is an error.
_HEAD = re.compile(
    r"(?:^|\.)(?:pooler|lm_head|classifier|score|head|heads|masked_spec_embed|mask_token)(?:\.|$)"
)
# Names under which files hold the weights of a model.
_WEIGHTS = ("state_dict", "model", "model_state_dict")
_IMPORT_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def resolve_build(name: str) -> Build | None:
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
    return cast("Build", found)


def load_checkpoint(
    checkpoint: Checkpoint, build: Build | None, model: nn.Module | None = None
) -> tuple[nn.Module, list[str]]:
    """Load a checkpoint into a model, or into a new one on the CPU; also return remarks.

    The random state stays the same.
    """
    notes: list[str] = []
    with torch.random.fork_rng():
        if build is not None:
            content = read_file(checkpoint.source)
            weights = _weights_of(content, checkpoint)
            model = _built(build, content, checkpoint) if model is None else model
        else:
            if checkpoint.base is None:
                loaded = _of_transformers(checkpoint)
            else:
                loaded, notes = _of_adapter(checkpoint, checkpoint.base)
            weights = loaded.state_dict()
            model = loaded if model is None else model
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise ValueError(
            f"the weights of {checkpoint.name} do not fit the model that was built: "
            f"{one_line(error)}"
        ) from error
    return model, notes


def _weights_of(content: Any, checkpoint: Checkpoint) -> Mapping[str, Any]:
    """Find the state dict in a file of Lightning or of a plain training loop."""
    held: Mapping[str, Any] = content if isinstance(content, dict) else {}
    for name in _WEIGHTS:
        if isinstance(held.get(name), Mapping):
            return cast("Mapping[str, Any]", held[name])
    if not (held and all(isinstance(value, torch.Tensor) for value in held.values())):
        raise ValueError(
            f"{checkpoint.source} holds no weights "
            f"({', '.join(map(str, list(held)[:5])) or type(content).__name__}): expected a state "
            f"dict, or a dict with one as {' or '.join(_WEIGHTS)}"
        )
    return held


def _built(build: Build, content: Mapping[str, Any], checkpoint: Checkpoint) -> nn.Module:
    settings = content.get("hyper_parameters", {})
    try:
        model = build(**settings)
    except TypeError as error:
        kept = ", ".join(map(str, settings)) or "none"
        raise ValueError(
            f"the model of {checkpoint.name} cannot be built ({error}): the function is called "
            f"with the hyper-parameters in the file ({kept}); pass one that takes these"
        ) from error
    if not isinstance(model, nn.Module):
        raise ValueError(f"the function built a {type(model).__name__}: expected a torch module")
    return model


def _of_transformers(checkpoint: Checkpoint) -> nn.Module:
    transformers = import_transformers()
    with _quiet(transformers):
        model, report = transformers.AutoModel.from_pretrained(
            checkpoint.source, revision=checkpoint.revision, output_loading_info=True,
            trust_remote_code=False,
        )  # fmt: skip
    lacking = sorted(name for name in report["missing_keys"] if _HEAD.search(name) is None)
    if lacking:
        raise ValueError(
            f"{checkpoint.name} lacks {len(lacking)} of the weights of {type(model).__name__}, "
            f"such as {lacking[0]}: they would be random; expected a checkpoint of this model"
        )
    loaded: nn.Module = model
    return loaded


def _of_adapter(checkpoint: Checkpoint, base: str) -> tuple[nn.Module, list[str]]:
    """Load a model merged with an adapter, which gives the same outputs up to rounding.

    The model has the class named in its configuration, because names of an adapter's weights
    include the path through its head.
    """
    transformers = import_transformers()
    try:
        peft = importlib.import_module("peft")
    except ImportError as error:
        raise ImportError(
            f"{checkpoint.source} holds an adapter, which needs peft ({error}): pip install peft; "
            "or merge it with its model and save that (merge_and_unload(), save_pretrained())"
        ) from error
    with _quiet(transformers), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # like the reports of a load
        # If nothing of the adapter was loaded, the result would silently be the plain model.
        warnings.filterwarnings("error", message=".*missing adapter keys")
        try:
            config = transformers.AutoConfig.from_pretrained(base, trust_remote_code=False)
            name = next(iter(config.architectures or ()), "")
            family = getattr(transformers, name, transformers.AutoModel)
            adapted = peft.PeftModel.from_pretrained(
                family.from_pretrained(base), checkpoint.source
            )
            merged = adapted.merge_and_unload()
        except failures() as error:
            raise ValueError(
                f"the adapter {checkpoint.name} cannot be merged with its model, {base} "
                f"({one_line(error)}): if the model has moved, name it, and the adapters by "
                "checkpoints=FOLDER (--checkpoints FOLDER); only adapters that add to the model's "
                "weights can be merged (LoRA, for example)"
            ) from error
    return merged.base_model, [f"measured: {base} merged with its adapter"]


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
