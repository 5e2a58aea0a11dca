"""Arrays that a run keeps with its record (`Monitor(arrays=True)`), at a few steps."""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from geomon import Readings
from geomon.analysis import single_source

Floats = NDArray[np.float64]
Arrays = dict[str, Floats]


class MissingError(ValueError):
    """A run cannot give a figure; the message says in one line what is missing."""


def arrays_over_training(run: Readings, name: str, most: int | None = None) -> dict[int, Arrays]:
    """Read the arrays of at most so many readings that have an array of some name.

    Args:
        run: Readings of a run, of one stack.
        name: Name of the array, "mean_query" say.
        most: Largest number of readings: the first, the last and some between, which are denser
            after the first. Defaults to None, for all.

    Returns:
        Arrays in float64 by tag, by step.
    """
    selected = single_source(run)
    if run.folder is None or not selected:
        return {}
    kept = set(run.folder.steps(selected[0].source))
    steps = [reading.step for reading in selected if reading.step in kept]
    found = {}
    for step in steps if most is None else spread(steps, most):
        arrays = run.arrays(step, selected[0].source)
        if layers_with(arrays, name):
            found[step] = {tag: np.asarray(each, dtype=np.float64) for tag, each in arrays.items()}
    return found


def layers_with(arrays: Iterable[str], name: str) -> list[int]:
    """List the layers that have an array of a name.

    Args:
        arrays: Tags of arrays.
        name: Name of the array.
    """
    start = f"{name}/layer_"
    return sorted(int(tag.removeprefix(start)) for tag in arrays if tag.startswith(start))


def spread(steps: Sequence[int], most: int) -> list[int]:
    """Choose the first step, the last and some between, evenly spaced in their logarithm.

    Args:
        steps: Steps, ascending.
        most: Largest number of steps chosen.

    Example:
        >>> spread([0, 1, 2, 3, 4, 6, 8, 11, 16, 23, 32], 4)
        [0, 2, 8, 32]
    """
    logarithms = np.log1p(np.array(steps) - min(steps, default=0))
    targets = np.linspace(0, logarithms.max(initial=0), most)
    near = {int(np.abs(logarithms - target).argmin()) for target in targets if len(steps)}
    return [*steps] if len(steps) <= most else [steps[index] for index in sorted(near)]


def spread_evenly(layers: Sequence[int], most: int) -> list[int]:
    """Choose at most so many layers, evenly spaced, the first and the last among them.

    Args:
        layers: Numbers of layers, ascending.
        most: Largest number of layers chosen, at least 2.

    Example:
        >>> spread_evenly([1, 2, 3, 4, 5, 6, 7], 3)
        [1, 4, 7]
    """
    places = np.linspace(0, len(layers) - 1, min(most, len(layers))).astype(int)
    return [layers[place] for place in places]
