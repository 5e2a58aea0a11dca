"""Settings of a training as the description of its run holds them."""

import argparse
import contextlib
import dataclasses
import enum
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

# Most settings of a run.
_MOST_SETTINGS = 100
_DEEPEST = 3  # dicts in one another
# Longest whole number: one of more than 4,300 digits cannot be written.
_MOST_BITS = 1024
# Words of a name, however they are joined: "apiKeys" has two.
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
# Ends of words that name a secret whatever it looks like, and of others that count things as well:
# a number under these is no secret.
_SECRETS = (
    "secret", "secrets", "password", "passwords", "passwd", "pwd", "passphrase", "credential",
    "credentials", "auth", "authorization", "authentication", "bearer", "cookie", "cookies",
    "private",
)  # fmt: skip
_SECRET_TEXTS = (
    *_SECRETS, "token", "tokens", "key", "keys", "pass", "sig", "signature", "jwt", "webhook",
)  # fmt: skip
# Texts that look like a secret: by how they begin, or as a long code.
_SECRET_TEXT = re.compile(
    r"(?:^|[\s=:\"',])(?:hf_|gh[a-z]_|github_pat_|glpat-|sk-|xox[a-z]-|AKIA|AIza|eyJ|Bearer\s|Basic\s)"
    r"|-----BEGIN"
    r"|://[^/\s]*@"  # a password in an address
    r"|\b(?=[A-Za-z]*\d)(?=\d*[A-Za-z])[A-Za-z\d]{32,}"
)
_QUERY = re.compile(r"[?&;#]([^=?&;#\s]+)=")  # names of what an address is asked with
# The path of a file from the root of a machine, or from somebody's home.
_WHOLE_PATH = re.compile(r"(?:~?[/\\]|[A-Za-z]:[/\\])\S")


def flat_settings(settings: Mapping[str, Any]) -> dict[str, bool | int | float | str]:
    """Flatten settings into those that a description of a run holds.

    What is no number and no text is left out. So are values in dicts that are nested more than
    three deep, what cannot be read, and secrets: a text counts as one by how it looks or by any
    part of its path, a number by the parts that name nothing else. Of the path of a file only the
    last part is kept: the folders before it are those of a machine. A number that is not finite
    becomes a text, as JSON has none.

    Args:
        settings: Numbers, texts and dicts (also dataclasses and namespaces) of these, by name.

    Returns:
        Numbers and texts, under "training/<name>", at most 100.

    Example:
        >>> flat_settings({"optimizer": {"lr": 0.1, "betas": (0.9, 0.99)}, "trial": 7})
        {'training/optimizer/lr': 0.1, 'training/trial': 7}
    """

    def walk(
        content: Mapping[Any, Any], before: tuple[str, ...]
    ) -> Iterator[tuple[str, bool | int | float | str]]:
        for name, value in readable_items(content):
            try:
                path = *before, str(name)
                inner = _as_mapping(value)
                plain = _plain(path, value) if inner is None else None
            except Exception:  # whatever the value does when it is asked for its text
                continue
            if inner is not None and len(path) < _DEEPEST:
                yield from walk(inner, path)
            elif plain is not None:
                yield "/".join(("training", *path)), plain

    return dict(itertools.islice(walk(settings, ()), _MOST_SETTINGS))


def readable_items(settings: Any) -> Iterator[tuple[Any, Any]]:
    """Iterate over the settings that can be read.

    A configuration may have values that are missing, or that refer to one that is: asked for these,
    OmegaConf raises. That must not end a training.

    Args:
        settings: A mapping; of anything else nothing is read.
    """
    if not isinstance(settings, Mapping):
        return
    with contextlib.suppress(Exception):  # the names cannot be read either
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


def _plain(path: Sequence[str], given: Any) -> bool | int | float | str | None:
    """Return a number or a text as JSON has them; None for anything else, and for a secret."""
    value = given.value if isinstance(given, enum.Enum) else given
    if isinstance(value, np.generic) or (isinstance(value, Tensor) and value.ndim == 0):
        value = value.item()  # a tensor without values raises
    names = " ".join(path)
    if _names(names, _SECRETS) or _is_secret(names):
        return None
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value if value.bit_length() <= _MOST_BITS else None
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if not isinstance(value, str) or _names(names, _SECRET_TEXTS) or _is_secret(value):
        return None
    text = re.split(r"[/\\]", value.rstrip("/\\"))[-1] if _WHOLE_PATH.match(value) else value
    return text[:200].encode(errors="replace").decode()


def _names(text: str, secrets: tuple[str, ...]) -> bool:
    return any(word.lower().endswith(secrets) for word in _WORDS.findall(text))


def _is_secret(value: str) -> bool:
    asked = " ".join(_QUERY.findall(value))
    return bool(_SECRET_TEXT.search(value)) or _names(asked, _SECRET_TEXTS)
