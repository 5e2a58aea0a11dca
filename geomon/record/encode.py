"""Encode any content as one line of JSON in UTF-8."""

from collections.abc import Mapping
from typing import Any

import msgspec

from geomon.failures import failures
from geomon.record.safe_text import text_of

_MOST = 2**63  # some JSON readers reject integers from here on


def encode_line(content: object) -> str:
    r"""Encode content as one line of JSON, with null for numbers that are not finite.

    Lone surrogates (as in some file names), which UTF-8 cannot encode, are written with
    backslashes, and objects that JSON does not know as text.

    Example:
        >>> encode_line({"file": "a\udce9", "kind": complex})
        '{"file":"a\\\\udce9","kind":"<class \'complex\'>"}'
    """
    try:
        return msgspec.json.encode(content).decode()
    except failures(TypeError, ValueError, OverflowError):
        return msgspec.json.encode(_plain(content)).decode()


def _plain(value: Any) -> Any:
    """Convert a value to types that JSON knows."""
    if isinstance(value, msgspec.Struct):
        return _plain(msgspec.to_builtins(value))
    if isinstance(value, Mapping):
        return {_text(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if value is None or isinstance(value, bool) or type(value) is float:
        return value
    return value if type(value) is int and abs(value) < _MOST else _text(value)


def _text(value: object) -> str:
    """Return a value as text that UTF-8 can encode."""
    return text_of(value).encode(errors="backslashreplace").decode()
