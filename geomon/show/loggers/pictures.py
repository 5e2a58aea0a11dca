"""Pictures for loggers, drawn during training: one card per panel."""

from collections.abc import Callable, Collection, Iterator

import numpy as np
from numpy.typing import NDArray

from geomon.record import Readings
from geomon.show.collect import cards_of
from geomon.show.loggers.history import Part, RunDrawer
from geomon.show.panels import Lines, Matrix

# Function of a picture's name, its pixels (uint8 [height, width, 3]) and the step.
Post = Callable[[str, NDArray[np.uint8], int], object]


class Pictures(RunDrawer):
    """Sink that draws readings and posts the pictures to a logger.

    The pictures show the main stack of a model: the intrinsic dimension over training, anisotropy
    over depth, maps of layers and steps, and matrices of layers and heads. Their names are
    numbered, because loggers sort them. They are drawn at the first reading, each time the step has
    doubled, and at the end. `write` raises an ImportError with the first picture if matplotlib is
    missing.

    Args:
        post: Function of a name, an image (uint8 [height, width, 3]) and a step, for instance
            `lambda name, image, step: writer.add_image(name, image, step, dataformats="HWC")`.
        name: Name of the logger, for messages. Defaults to "the logger".
        metrics: Names of further metrics to draw over training and over depth. Defaults to ().
    """

    def __init__(
        self, post: Post, *, name: str = "the logger", metrics: Collection[str] = ()
    ) -> None:
        super().__init__(f"drawing pictures for {name}", metrics=metrics)
        self._post = post

    def _draw(self, readings: Readings, step: int) -> Iterator[Part]:
        from geomon.show.figures import as_image, card  # imports matplotlib: only when needed

        for name, panel in cards_of(readings, self._metrics):

            def post(name: str = name, panel: Lines | Matrix = panel) -> None:
                self._post(name, as_image(card(panel)), step)

            yield post
