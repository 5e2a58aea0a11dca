"""Pictures for loggers, drawn while the model trains: cards of one panel each."""

import sys
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from geomon.record import Reading, Readings
from geomon.show.loggers.history import Part, RunDrawer
from geomon.show.panels import BY_HEAD, BY_LAYER

# Takes the name of a picture, its pixels (uint8 [height, width, 3]) and the step.
Post = Callable[[str, NDArray[np.uint8], int], object]

# First step from which there is more to see of a run than its first reading.
_FIRST_RUN = 16
# Seconds expected for the first picture, where it imports matplotlib and where that is done.
_FIRST_COST, _FIRST_COST_IMPORTED = 0.8, 0.2


class Pictures(RunDrawer):
    """Sink that draws readings and posts the pictures to a logger.

    It draws the first reading and each reading whose step is at least twice that of the last one
    drawn, as many pictures as take at most 0.5 % of the time, the intrinsic dimension first and
    more often; and, when closed, all pictures of the last reading. The cards are the intrinsic
    dimension over training, the profile of anisotropy over depth, maps of layers and steps, and
    matrices of layers and heads. Their names are numbered, because loggers sort them. For a model
    with several stacks, the main one is drawn. Memory and the number of pictures grow with the
    logarithm of the steps. matplotlib is imported with the first picture, so `write` raises an
    ImportError where it is missing.

    Args:
        post: Function of a name, an image (uint8 [height, width, 3]) and a step, for instance
            `lambda name, image, step: writer.add_image(name, image, step, dataformats="HWC")`.
        name: Name of the logger, for messages.
        metrics: Names of metrics whose profile over depth is drawn besides.
    """

    redraws_first = True

    def __init__(
        self,
        post: Post,
        *,
        name: str = "the logger",
        metrics: Collection[str] = (),
    ) -> None:
        imported = "matplotlib" in sys.modules
        super().__init__(
            first_cost=_FIRST_COST_IMPORTED if imported else _FIRST_COST, metrics=metrics
        )
        self._post = post
        self._name = name

    def __str__(self) -> str:
        return f"drawing pictures for {self._name}"

    def _draw(
        self, readings: Readings, reading: Reading, *, fresh: bool, last: bool
    ) -> Iterator[Part]:
        from geomon.show import figures  # imports matplotlib: only when it is needed

        for name, figure in _figures(readings, reading, self._metrics) if fresh else ():

            def post(name: str = name, figure: Callable[[], Any] = figure) -> None:
                self._post(name, figures.as_image(figure()), reading.step)

            yield post


def _figures(
    readings: Readings, reading: Reading, metrics: Collection[str]
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Give the pictures that there are values for: names, and functions that draw them."""
    from geomon.show.figures import cards, heads_figure, profile_figure

    def card(number: int, metric: str, how: str) -> str:
        return f"{number} {readings.text_of(metric).title} {how}".rstrip()

    began = reading.step >= _FIRST_RUN
    if any(each.columns.keys() & set(cards.DIMENSIONS) for each in readings):
        yield card(1, "twonn", ""), partial(cards.dimension_figure, readings)
    for metric in ("anisotropy", *metrics):
        if reading.layers(metric):
            profile = partial(profile_figure, readings, metric)
            yield card(2, metric, "over depth"), profile
    for number, metric in enumerate(BY_LAYER, start=3):
        if began and readings.layers(metric):
            yield (
                card(number, metric, "by layer"),
                partial(cards.layers_figure, readings, metric),
            )
    for number, metric in enumerate(BY_HEAD, start=6):
        if reading.column(metric).by_head():
            text = readings.text_of(metric)
            yield (
                card(number, metric, "by head"),
                partial(heads_figure, reading, metric, text=text),
            )


__all__ = ["Pictures", "Post"]
