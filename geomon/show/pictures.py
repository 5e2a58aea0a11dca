"""Pictures for loggers, drawn while the model trains: curves, the profile over depth, heads."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from geomon.record import Reading, Readings, tags
from geomon.record.sinks import Post

_PROFILE = "anisotropy"
_OVERVIEW = ("twonn", "twonn_distinct", "gride", _PROFILE, "qk_cosine", "attention_entropy")
# Smallest ratio of the steps of two readings kept for the curves. Four readings for each octave of
# steps make about a hundred in a long run; 0.99 allows for rounded steps.
_KEPT_RATIO = 2 ** (1 / 4) * 0.99
# First step at which the figure of the whole run is drawn: before it, the curves are flat.
_FIRST_OVERVIEW = 16
# Seconds expected for the first drawing, which imports matplotlib.
_FIRST_COST = 3.0


class Pictures:
    """Sink that draws readings and posts the pictures to a logger.

    It draws the first reading, each reading whose step is at least twice that of the last one
    drawn, and, when closed, the last reading: the whole run in one figure ("Overview/geometry",
    which loggers sort first), the profile over depth, and the heads. For a model with several
    stacks, the main one is drawn. Memory and the number of pictures grow with the logarithm of the
    steps. matplotlib is imported with the first picture, so `write` raises an ImportError where it
    is missing.

    Args:
        post: Function of a name, an image (uint8 [height, width, 3]) and a step, for instance
            `lambda name, image, step: writer.add_image(name, image, step, dataformats="HWC")`.
        metrics: Names of metrics of heads, each drawn as a matrix of layers and heads.
        affords: Function of a number of seconds that returns whether drawing may take them now; if
            not, the next reading is tried.
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
        self._failure: Exception | None = None

    def write(self, reading: Reading) -> None:
        """Draw the reading if its step is at least twice that of the last one drawn.

        Raises:
            ImportError: matplotlib is missing.
            Exception: What `post` has raised, once it was given every picture.
        """
        reading = Readings([], [reading]).of_stack()[0]
        self._last = reading
        due = not self._drawn or reading.step >= max(1, 2 * self._drawn[-1].step)
        if due or reading.step >= _KEPT_RATIO * self._curves[-1].step:
            self._curves.append(_select_overview(reading))
        if due and self._affords(self._cost):
            self._draw(reading)

    def close(self) -> None:
        """Draw the last reading if it was not drawn; may be called more than once."""
        last, self._last = self._last, None
        undrawn = last is not None and (not self._drawn or last.step > self._drawn[-1].step)
        if last is not None and undrawn and self._affords(self._cost):
            if last.step > self._curves[-1].step:
                self._curves.append(_select_overview(last))
            self._draw(last)

    def _draw(self, reading: Reading) -> None:
        began = time.perf_counter()
        from geomon.show import figures  # imports matplotlib: only when it is needed
        from geomon.show.figures import panels

        self._drawn.append(self._curves[-1])
        self._failure = None
        if reading.step >= _FIRST_OVERVIEW:
            figure = figures.geometry_figure(Readings([], self._curves))
            self._post_figure("Overview/geometry", figure, reading.step)
        if any(tag.startswith(f"{_PROFILE}/layer") for tag in reading.values):
            profile = figures.profile_figure(Readings([], self._drawn), _PROFILE)
            self._post_figure(f"profile/{_PROFILE}", profile, reading.step)
        for metric in self._metrics:
            layers, _ = panels.layers_and_heads(reading.values, metric)
            if layers:
                self._post_figure(
                    f"heads/{metric}", figures.heads_figure(reading, metric), reading.step
                )
        self._cost = time.perf_counter() - began
        if self._failure is not None:
            raise self._failure

    def _post_figure(self, name: str, figure: Any, step: int) -> None:
        from geomon.show import figures

        image = figures.as_image(figure)
        try:
            self._post(name, image, step)
        except Exception as error:  # the next pictures may be taken
            self._failure = self._failure or error


def _select_overview(reading: Reading) -> Reading:
    """Reduce a reading to the values of the overview: a large model's has tens of thousands."""
    parsed = {tag: tags.parse(tag) for tag in reading.values}
    selected = {tag for tag, parts in parsed.items() if parts and parts.metric in _OVERVIEW}
    return replace(reading, values={tag: reading.values[tag] for tag in selected})
