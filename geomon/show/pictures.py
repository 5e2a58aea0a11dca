"""Pictures for loggers: the profile over depth and the heads, drawn as training goes on."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from geomon.record import tags
from geomon.record.reading import Reading, Readings, heads
from geomon.record.stacks import of_stack

Post = Callable[[str, NDArray[np.uint8], int], object]

_PROFILE = "anisotropy"
_OVERVIEW = ("twonn", "twonn_distinct", "gride", _PROFILE, "qk_cosine", "attention_entropy")
# Readings kept for the curves: four to an octave of steps, so that a long run has a hundred.
_APART = 2 ** (1 / 4) * 0.99
# Step from which the run in one figure is drawn: before, its curves are flat.
_CURVES_FROM = 16
# Seconds that are expected of the first drawing, which imports matplotlib.
_FIRST_COST = 3.0


class Pictures:
    """A sink that draws, and posts pictures.

    It draws at its first reading and each time the step has at least doubled since, and the last
    reading when closed: the run in one figure ("Overview/geometry", which loggers sort first), the
    profile over depth and the heads; of a model with several stacks those of the main one. Memory
    and the number of pictures grow with the logarithm of the steps. matplotlib is imported with the
    first picture.

    Args:
        post: Takes a name, an image (uint8 [height, width, 3]) and a step, for instance
            `lambda name, image, step: writer.add_image(name, image, step, dataformats="HWC")`.
        metrics: Of heads, each drawn as a matrix of layers and heads.
        affords: Whether so many seconds may be taken for drawing now; if not, the next reading is
            tried.

    Raises:
        ImportError: From `write`, where matplotlib is missing.
    """

    def __init__(
        self,
        post: Post,
        metrics: Sequence[str] = ("qk_cosine", "attention_entropy"),
        *,
        affords: Callable[[float], bool] = lambda seconds: True,
    ) -> None:
        self._post = post
        self._metrics = tuple(metrics)
        self._affords = affords
        self._cost = _FIRST_COST
        self._curves: list[Reading] = []
        self._drawn: list[Reading] = []
        self._last: Reading | None = None

    def write(self, reading: Reading) -> None:
        """Draw the reading if its step has doubled since the last one drawn."""
        reading = of_stack(Readings([], [reading]))[0]
        self._last = reading
        due = not self._drawn or reading.step >= max(1, 2 * self._drawn[-1].step)
        if due or reading.step >= _APART * self._curves[-1].step:
            self._curves.append(_thinned(reading))
        if due and self._affords(self._cost):
            self._draw(reading)

    def close(self) -> None:
        """Draw the last reading if it was not drawn; may be called more than once."""
        last, self._last = self._last, None
        waiting = last is not None and (not self._drawn or last.step > self._drawn[-1].step)
        if last is not None and waiting and self._affords(self._cost):
            if last.step > self._curves[-1].step:
                self._curves.append(_thinned(last))
            self._draw(last)

    def _draw(self, reading: Reading) -> None:
        began = time.perf_counter()
        from geomon.show import figures  # matplotlib: not before there is something to draw

        self._drawn.append(self._curves[-1])
        if reading.step >= _CURVES_FROM:
            figure = figures.geometry_figure(Readings([], self._curves))
            self._show("Overview/geometry", figure, reading.step)
        if any(tag.startswith(f"{_PROFILE}/layer") for tag in reading.values):
            profile = figures.profile_figure(Readings([], self._drawn), _PROFILE)
            self._show(f"profile/{_PROFILE}", profile, reading.step)
        for metric in self._metrics:
            if heads(reading, metric):
                self._show(f"heads/{metric}", figures.heads_figure(reading, metric), reading.step)
        self._cost = time.perf_counter() - began

    def _show(self, name: str, figure: Any, step: int) -> None:
        from geomon.show import figures

        self._post(name, figures.as_image(figure), step)


def _thinned(reading: Reading) -> Reading:
    """The reading with the values that are drawn: of a large model it holds tens of thousands."""
    parsed = {tag: tags.parse(tag) for tag in reading.values}
    drawn = {tag for tag, parts in parsed.items() if parts and parts.metric in _OVERVIEW}
    return replace(reading, values={tag: reading.values[tag] for tag in drawn})
