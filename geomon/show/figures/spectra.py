"""Spectra: eigenvalues of the covariance of the hidden states, by rank."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from geomon.analysis import single_source
from geomon.record import Readings, tags
from geomon.show.colours import LAYERS, STEPS, ramp
from geomon.show.figures import axes
from geomon.show.panels import NotMeasuredError

_MOST_STEPS = 7


def spectra_figure(readings: Readings) -> Figure:
    """Draw shares of the variance by rank: of each layer at the last step, of two over training.

    Args:
        readings: Readings of a run.

    Raises:
        NotMeasuredError: No eigenvalues stand beside the record.
    """
    by_step = axes.arrays_by_step(readings, "eigenvalues", _MOST_STEPS)
    if not by_step:
        raise NotMeasuredError(
            "no eigenvalues stand beside the record: a Monitor with arrays=True keeps them where "
            "effective_rank or participation_ratio is measured"
        )
    last = max(by_step)
    layers = axes.array_layers(by_step[last], "eigenvalues", readings)
    shown = list(dict.fromkeys([layers[len(layers) // 2], layers[-1]]))
    figure = axes.new_figure(0.6 + 4.6 * (1 + len(shown)), 4.2)
    first, *others = figure.subplots(1, 1 + len(shown), squeeze=False, sharey=True)[0]
    of_layers = {str(n): _shares(readings, last, by_step[last], n) for n in layers}
    _draw(first, of_layers, LAYERS, "layer")
    axes.caption(first, "a", f"Every layer at step {last:,}")
    for letter, panel, layer in zip("bc", others, shown, strict=False):
        over = {str(step): _shares(readings, step, by_step[step], layer) for step in by_step}
        _draw(panel, over, STEPS, "step")
        axes.caption(panel, letter, f"Layer {layer} over training")
    first.set_ylabel("share of the variance (logarithmic)", fontsize=10)
    return figure


def _shares(
    readings: Readings, step: int, arrays: dict[str, NDArray[np.generic]], layer: int
) -> NDArray[np.float64]:
    """Eigenvalues as shares of the whole variance, of which a part may lie beyond those kept."""
    tag = tags.layer_tag("eigenvalues", layer)
    values = np.asarray(arrays.get(tag, []), dtype=np.float64)
    recorded = [
        reading.column("variance").at(layer)
        for reading in single_source(readings)
        if reading.step == step
    ]
    total = recorded[0] if recorded and recorded[0] >= values.sum() else values.sum()
    return values / total if total > 0 else values[:0]


def _draw(
    panel: Axes, spectra: dict[str, NDArray[np.float64]], colours: Sequence[str], label: str
) -> None:
    known = {name: values[values > 1e-9] for name, values in spectra.items()}
    chosen = ramp(colours, len(known))
    for colour, values in zip(chosen, known.values(), strict=True):
        panel.plot(np.arange(1, len(values) + 1), values, color=axes.ink(colour), lw=1.6)
    axes.plain(panel)
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.set_xlabel("rank of the eigenvalue (logarithmic)", fontsize=10)
    axes.colour_bar(panel, list(known), chosen, label)
