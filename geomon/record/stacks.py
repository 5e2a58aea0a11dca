"""One stack of a model with several: pages show an encoder-decoder one stack at a time."""

from collections.abc import Iterable
from dataclasses import replace

from geomon.record import tags
from geomon.record.reading import Reading, Readings


def stacks_of(readings: Iterable[Reading]) -> list[str]:
    """Names of the stacks, in order of appearance; [""] where the model has one.

    Args:
        readings: Of a run.
    """
    names = dict.fromkeys(tag for reading in readings for tag in reading.values)
    parsed = filter(None, map(tags.parse, names))
    return list(dict.fromkeys(tag.stack for tag in parsed if tag.layer is not None)) or [""]


def main_stack(names: Iterable[str]) -> str:
    """The stack that a page shows when none is asked for: the one that predicts.

    Example:
        >>> main_stack(["encoder", "decoder", "cross"]), main_stack(["text_model", "vision_model"])
        ('decoder', 'text_model')
    """
    known = list(names)
    return next((name for name in ("", "decoder") if name in known), known[0])


def of_stack(readings: Readings, stack: str | None = None) -> Readings:
    """The readings of one stack, under the tags that a model with one stack has.

    Args:
        readings: Of a run.
        stack: Its name; None for the main one.

    Raises:
        ValueError: There is no such stack.
    """
    names = stacks_of(readings)
    chosen = main_stack(names) if stack is None else stack
    if chosen not in names:
        known = ", ".join(map(repr, names)) if names != [""] else "the model has one stack"
        raise ValueError(f"no stack is called {chosen!r}: {known}")
    if names == [""]:
        return readings
    return Readings(readings.runs, [_of_stack(one, chosen, names) for one in readings])


def _of_stack(reading: Reading, stack: str, names: list[str]) -> Reading:
    parted = {tag: tags.out_of_stack(tag, names) for tag in reading.values}
    kept = {
        plain: reading.values[tag]
        for tag, (own, plain) in parted.items()
        if own == stack or tags.is_of_run(tag)
    }
    return replace(reading, values=kept)


__all__ = ["main_stack", "of_stack", "stacks_of"]
