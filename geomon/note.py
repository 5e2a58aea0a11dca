"""Notes: remarks for the reader of the numbers, as data that pages turn into sentences."""

import contextlib
from collections.abc import Mapping
from typing import Any

import msgspec


class Note(msgspec.Struct, frozen=True, omit_defaults=True):
    """A remark for the reader of the numbers.

    Attributes:
        kind: Subject of the note; the log has one line of each kind.
        text: The sentence. If there are layers or numbers, a `str.format` template where `{where}`
            is replaced by the layers, and the name of a number by that number.
        stack: Name of the stack of blocks; "" if the model has only one.
        layers: Indices of the layers.
        heads: (layer, head) pairs.
        numbers: Numbers, and words that were found, by name.
        advice: Advice on how to react; only alerts have one. Defaults to "".
        is_error: Whether something failed, so that the log has the whole sentence. Defaults to
            False.
        is_odd: Whether the model or the training is odd, and not the values, so that the log has
            the whole sentence too. Defaults to False.

    Example:
        >>> note = Note("lost", "{lost} rows are not finite{where}", layers=(1, 2),
        ...             numbers={"lost": 3})
        >>> note.words()
        '3 rows are not finite, layer 1, 2'
    """

    kind: str
    text: str
    stack: str = ""
    layers: tuple[int, ...] = ()
    heads: tuple[tuple[int, int], ...] = ()
    numbers: Mapping[str, int | float | str] = {}
    advice: str = ""
    is_error: bool = False
    is_odd: bool = False

    @property
    def is_alert(self) -> bool:
        """Whether the note is an alert."""
        return bool(self.advice)

    def words(self) -> str:
        """Return the sentence."""
        sentence = self.text
        if self.numbers or self.layers:
            where = f", layer {', '.join(map(str, self.layers))}" if self.layers else ""
            given: dict[str, Any] = {"where": where, **self.numbers}
            with contextlib.suppress(LookupError, ValueError, AttributeError):  # a damaged record
                sentence = sentence.format(**given)
        return f"{self.stack}: {sentence}" if self.stack else sentence

    def __str__(self) -> str:
        return self.words()
