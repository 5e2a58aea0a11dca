"""Notes: remarks for the reader of the numbers, as data that pages turn into sentences."""

import contextlib
from collections.abc import Mapping
from typing import Any

import msgspec

# Most characters of the first line of an alert.
_LONGEST = 100


class Note(msgspec.Struct, frozen=True, omit_defaults=True):
    """A remark for the reader of the numbers.

    Attributes:
        kind: A `NoteKind`, or the name of the rule of an alert.
        text: The sentence. If there are layers or numbers, a `str.format` template where `{where}`
            is replaced by the layers, and the name of a number by that number.
        more: Details that follow the sentence, such as advice; a template too. Defaults to "".
        about: Subject among notes of one kind, such as the name of a module. Defaults to "".
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
    more: str = ""
    about: str = ""

    @property
    def key(self) -> str:
        """Stack, kind and subject, which equal notes share: the log has one line of each."""
        return ": ".join(filter(None, (self.stack, self.kind, self.about)))

    @property
    def is_alert(self) -> bool:
        """Whether the note is an alert."""
        return bool(self.advice)

    def words(self) -> str:
        """Return the sentence with its details."""
        return "; ".join(filter(None, (self._headline, self._filled(self.more))))

    def lines(self, opening: str = "") -> tuple[str, str]:
        """Return the sentence as a line of at most 100 characters, and the details.

        Args:
            opening: First words of the line. Defaults to "".
        """
        line, more = f"{opening}{self._headline}", self._filled(self.more)
        if len(line) <= _LONGEST:
            return line, more
        end = max(line.rfind(" ", len(opening) + 1, _LONGEST - 3), 0) or _LONGEST - 4
        return f"{line[:end]} ...", "; ".join(filter(None, (f"... {line[end:].strip()}", more)))

    @property
    def _headline(self) -> str:
        sentence = self._filled(self.text)
        return f"{self.stack}: {sentence}" if self.stack else sentence

    def _filled(self, template: str) -> str:
        """Put the layers and numbers into a template."""
        if not (self.numbers or self.layers):
            return template
        where = f", layer {', '.join(map(str, self.layers))}" if self.layers else ""
        given: dict[str, Any] = {"where": where, **self.numbers}
        with contextlib.suppress(LookupError, ValueError, AttributeError):  # a damaged record
            return template.format(**given)
        return template

    def __str__(self) -> str:
        return self.words()
