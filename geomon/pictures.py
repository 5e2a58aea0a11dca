"""Pictures for loggers: the profile over depth and the heads, drawn as training goes on."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from geomon import tags
from geomon.record import Reading, Readings, heads

Post = Callable[[str, NDArray[np.uint8], int], object]

_PROFILE = "anisotropy"


class Pictures:
    """A sink that draws, and posts pictures.

    It draws at its first reading and each time the step has at least doubled since, and the last
    reading when closed: a handful of pictures per run, and as many profiles in memory. matplotlib
    is imported with the first picture.

    Args:
        post: Takes a name, an image (uint8 [height, width, 3]) and a step, for instance
            `lambda name, image, step: writer.add_image(name, image, step, dataformats="HWC")`.
        metrics: Of heads, each drawn as a matrix of layers and heads.

    Raises:
        ImportError: From `write`, where matplotlib is missing.
    """

    def __init__(
        self, post: Post, metrics: Sequence[str] = ("qk_cosine", "attention_entropy")
    ) -> None:
        self._post = post
        self._metrics = tuple(metrics)
        self._profiles: list[Reading] = []
        self._last: Reading | None = None

    def write(self, reading: Reading) -> None:
        """Draw the reading if its step has doubled since the last one drawn."""
        self._last = reading
        drawn = self._profiles[-1].step if self._profiles else None
        if drawn is None or reading.step >= max(2 * drawn, drawn + 1):
            self._draw(reading)

    def close(self) -> None:
        """Draw the last reading if it was not drawn; may be called more than once."""
        last, self._last = self._last, None
        if last is not None and last.step > self._profiles[-1].step:
            self._draw(last)

    def _draw(self, reading: Reading) -> None:
        self._profiles.append(replace(reading, values=_profile_of(reading)))
        from geomon import figures  # matplotlib: not before there is something to draw

        if self._profiles[-1].values:
            profile = figures.profile_figure(Readings([], self._profiles), _PROFILE)
            self._show(f"profile/{_PROFILE}", profile, reading.step)
        for metric in self._metrics:
            if heads(reading, metric):
                self._show(f"heads/{metric}", figures.heads_figure(reading, metric), reading.step)

    def _show(self, name: str, figure: Any, step: int) -> None:
        from geomon import figures

        self._post(name, figures.as_image(figure), step)


def _profile_of(reading: Reading) -> dict[str, float]:
    """The values of the profile alone: a reading of a large model holds tens of thousands."""
    parsed = {tag: tags.parse(tag) for tag in reading.values if tag.startswith(f"{_PROFILE}/")}
    return {
        tag: reading.values[tag]
        for tag, parts in parsed.items()
        if parts is not None and parts.layer is not None and not parts.part
    }
