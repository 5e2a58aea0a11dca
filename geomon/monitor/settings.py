"""Settings of a training as the description of its run holds them."""

import argparse
import dataclasses
import enum
import itertools
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor

# Most settings of a run.
_MOST_SETTINGS = 100
# Longest whole number: one of more than 4,300 digits cannot be written.
_MOST_BITS = 1024
# Texts that no page should show, by their names, and an address with a password in it.
_SECRET_NAME = re.compile(
    r"(?:^|[_.-])(?:tokens?|secrets?|passw(?:or)?d|credentials?|(?:api|access|private|auth)[_-]?key)"
    r"(?:$|[_.-])",
    re.IGNORECASE,
)
_SECRET_URL = re.compile(r"://[^/\s]*@")
# The path of a file from the root of a machine, or from somebody's home.
_WHOLE_PATH = re.compile(r"(?:~?[/\\]|[A-Za-z]:[/\\])\S")


def flat_settings(settings: Mapping[str, Any]) -> dict[str, bool | int | float | str]:
    """Flatten settings into those that a description of a run holds.

    What is no number and no text is left out. So are secrets, values in dicts that are nested more
    than three deep, and what cannot be read. Of the path of a file only the last part is kept: the
    folders before it are those of a machine. A number that is not finite becomes a text, as JSON
    has none.

    Args:
        settings: Numbers, texts and dicts (also dataclasses and namespaces) of these, by name.

    Returns:
        Numbers and texts, under "training/<name>", at most 100.

    Example:
        >>> flat_settings({"optimizer": {"lr": 0.1, "betas": (0.9, 0.99)}, "trial": 7})
        {'training/optimizer/lr': 0.1, 'training/trial': 7}
    """

    def walk(
        content: Mapping[Any, Any], before: str, depth: int
    ) -> Iterator[tuple[str, bool | int | float | str]]:
        for name, value in readable_items(content):
            inner = _as_mapping(value)
            plain = _plain(str(name), value) if inner is None else None
            if inner is not None and depth:
                yield from walk(inner, f"{before}/{name}", depth - 1)
            elif plain is not None:
                yield f"{before}/{name}", plain

    return dict(itertools.islice(walk(settings, "training", 2), _MOST_SETTINGS))


def readable_items(settings: Any) -> Iterator[tuple[Any, Any]]:
    """Iterate over the settings that can be read.

    A configuration may have values that are missing, or that refer to one that is: asked for these,
    OmegaConf raises. That must not end a training.

    Args:
        settings: A mapping; of anything else nothing is read.
    """
    if not isinstance(settings, Mapping):
        return
    for name in settings:
        try:
            value = settings[name]
        except Exception:
            continue
        yield name, value


def _as_mapping(value: Any) -> Mapping[Any, Any] | None:
    if isinstance(value, argparse.Namespace):
        return vars(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = (field.name for field in dataclasses.fields(value))
        return {name: getattr(value, name, None) for name in fields}
    return value if isinstance(value, Mapping) else None


def _plain(name: str, given: Any) -> bool | int | float | str | None:
    """Return a number or a text as JSON has them; None for anything else."""
    value = given.value if isinstance(given, enum.Enum) else given
    if isinstance(value, np.generic) or (isinstance(value, Tensor) and value.ndim == 0):
        try:
            value = value.item()
        except Exception:  # a tensor without values, say
            return None
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value) if value.bit_length() <= _MOST_BITS else None
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if not isinstance(value, str) or _SECRET_NAME.search(name) or _SECRET_URL.search(value):
        return None
    text = re.split(r"[/\\]", value.rstrip("/\\"))[-1] if _WHOLE_PATH.match(value) else value
    return text[:200].encode(errors="replace").decode()
