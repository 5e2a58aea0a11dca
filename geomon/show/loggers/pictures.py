"""Pictures for loggers, drawn while the model trains: cards of one panel each."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from geomon.record import Reading, Readings
from geomon.record.sinks import Affords
from geomon.show.loggers.history import RunDrawer

# Takes the name of a picture, its pixels (uint8 [height, width, 3]) and the step.
Post = Callable[[str, NDArray[np.uint8], int], object]

# First step from which there is more to see of a run than its first reading.
_FIRST_RUN = 16
# Seconds expected for the first drawing, which imports matplotlib.
_FIRST_COST = 2.0


class Pictures(RunDrawer):
    """Sink that draws readings and posts the pictures to a logger.

    It draws the first reading, each reading whose step is at least twice that of the last one
    drawn, both as far as that takes at most 2 % of the time, and, when closed, the last reading.
    The cards are the intrinsic dimension over training, the profile of anisotropy over depth, maps
    of layers and steps, and matrices of layers and heads; at the end the figure of the whole run
    besides. Their names are numbered, because loggers sort them. For a model with several stacks,
    the main one is drawn. Memory and the number of pictures grow with the logarithm of the steps.
    matplotlib is imported with the first picture, so `write` raises an ImportError where it is
    missing.

    Args:
        post: Function of a name, an image (uint8 [height, width, 3]) and a step, for instance
            `lambda name, image, step: writer.add_image(name, image, step, dataformats="HWC")`.
        name: Name of the logger, for messages.
        affords: Function of a number of seconds that returns whether drawing may take them now; if
            not, the next reading is tried.
    """

    def __init__(
        self,
        post: Post,
        *,
        name: str = "the logger",
        affords: Affords = lambda seconds: True,
    ) -> None:
        super().__init__(affords=affords, first_cost=_FIRST_COST)
        self._post = post
        self._name = name

    def __str__(self) -> str:
        return f"drawing pictures for {self._name}"

    def _draw(self, readings: Readings, reading: Reading, *, fresh: bool, last: bool) -> None:
        from geomon.show import figures  # imports matplotlib: only when it is needed

        failure: Exception | None = None
        for name, figure in _figures(readings, reading, fresh=fresh, last=last):
            image = figures.as_image(figure)
            try:
                self._post(name, image, reading.step)
            except Exception as error:  # the next pictures may be taken
                failure = failure or error
        if failure is not None:
            raise failure


def _figures(
    readings: Readings, reading: Reading, *, fresh: bool, last: bool
) -> Iterator[tuple[str, Any]]:
    """Draw the pictures that there are values for, by their names."""
    from geomon.show.figures import cards, geometry_figure, heads_figure, profile_figure
    from geomon.show.figures.panels import layers_and_heads

    began = reading.step >= _FIRST_RUN
    if fresh:
        if any(readings.series(tag)[0] for tag in cards.DIMENSIONS):
            yield "Geometry/1 intrinsic dimension", cards.dimension_figure(readings)
        if reading.layers("anisotropy"):
            yield "Geometry/2 anisotropy over depth", profile_figure(readings, "anisotropy")
        maps = (
            ("3 intrinsic dimension by layer", "twonn"),
            ("4 anisotropy by layer", "anisotropy"),
            ("5 attention entropy by layer", "attention_entropy"),
        )
        for name, metric in maps:
            if began and readings.layers(metric):
                yield f"Geometry/{name}", cards.layers_figure(readings, metric)
        heads = (
            ("6 query and key by head", "qk_cosine"),
            ("7 attention entropy by head", "attention_entropy"),
        )
        for name, metric in heads:
            if layers_and_heads(reading.values, metric)[0]:
                yield f"Geometry/{name}", heads_figure(reading, metric)
    if last and began:
        yield "Geometry/8 whole run", geometry_figure(readings)


__all__ = ["Pictures", "Post"]
