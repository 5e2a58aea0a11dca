"""Values that a training logs, kept until the reading of their step is made."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from geomon.failures import failures, ignored
from geomon.monitor.warnings import Warnings
from geomon.record import tags


class LoggedValues:
    """Keeps the values of the present step, and of steps whose readings are being made.

    A tensor is copied on its device and read with the reading, so logging never waits for a device.

    Args:
        awaited: Names whose values a reading waits for, until the next step.
        warnings: Reports values that cannot be read.
    """

    def __init__(self, awaited: Iterable[str], warnings: Warnings) -> None:
        self._awaited = dict.fromkeys(awaited)
        self._given: set[str] = set()  # names that have had a value
        self._warnings = warnings
        self._values: dict[int, dict[str, Any]] = {}

    def put(self, step: int, values: Mapping[str, Any]) -> None:
        """Keep values of a step by name (None if missing), replacing earlier ones."""
        kept = self._values.setdefault(step, {})
        for name, value in values.items():
            try:
                tags.training_tag(name)
            except failures(ValueError) as error:
                self._refuse(name, step, error)
                continue
            kept[name] = None
            try:
                kept[name] = copy_number(value)
            except failures() as error:  # values may be objects of any kind
                self._refuse(name, step, error)
            if value is not None:
                self._given.add(name)

    def wait_after_late(self, step: int, late: Sequence[str]) -> None:
        """Warn about values that came after the reading of their step; later ones wait for them."""
        if not late:
            return
        names = ", ".join(map(repr, late))
        option = "log=(" + "".join(f"{name!r}, " for name in late).rstrip() + ")"
        self._warnings.warn(
            f"{names} of step {step} came after its reading was recorded; later readings will wait "
            f"for it: log inside `with monitor(step)`, or give Monitor {option}",
            kind=f"late {names}",
        )
        for name in late:
            with ignored(ValueError):
                tags.training_tag(name)
                self._awaited[name] = None

    def has(self, step: int, name: str) -> bool:
        """Whether a name has a value at a step, even an unreadable one."""
        return name in self._values.get(step, {})

    def is_complete(self, step: int) -> bool:
        """Whether every value that the reading of a step waits for has come."""
        return self._awaited.keys() <= self._values.get(step, {}).keys()

    def read(self, step: int) -> dict[str, float]:
        """Return the values of a step by name; NaN for values that cannot be read."""
        found = dict.fromkeys(self._awaited, math.nan)
        for name, value in self._values.get(step, {}).items():
            found[name] = math.nan
            try:
                found[name] = math.nan if value is None else float(value)
            except failures() as error:  # errors differ between devices and kinds of numbers
                self._refuse(name, step, error)
        return found

    def forget_before(self, step: int, keep: Collection[int]) -> None:
        """Drop the values of earlier steps, except of steps to keep."""
        for other in [other for other in self._values if other < step and other not in keep]:
            del self._values[other]

    def warn_of_absent(self) -> None:
        """Warn about awaited names without any value in the whole run."""
        absent = [name for name in self._awaited if name not in self._given and name != tags.LOSS]
        if absent:
            names = ", ".join(map(repr, absent))
            self._warnings.warn(
                f"log= asks for {names}, but nothing was logged under that name in this run: "
                "expected a name that the training logs"
            )

    def _refuse(self, name: Any, step: int, error: Exception) -> None:
        self._warnings.warn(
            f"the value logged as {name!r} at step {step} cannot be read and is missing: "
            f"{' '.join(str(error).split()) or type(error).__name__}",
            kind=f"logged {name!r}",
        )


def copy_number(value: Any) -> Tensor | float | None:
    """Copy a value as it is now, because logged values may be changed in place (a running sum)."""
    expected = "expected a number or a tensor of one"
    if value is None:
        return None
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"{expected}, got a tensor of shape {list(value.shape)}")
        return value.detach().clone()
    if isinstance(value, str | bytes):  # float() would accept "1"
        raise TypeError(f"{expected}, got text")
    try:
        return float(value.item() if hasattr(value, "item") else value)
    except failures(TypeError, ValueError) as error:
        raise TypeError(f"{expected}, got {type(value).__name__}") from error


__all__ = ["LoggedValues", "copy_number"]
