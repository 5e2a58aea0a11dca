"""What is shown of the watched runs: the chosen run, metric, layer, heads and reading."""

from collections.abc import Sequence
from typing import NamedTuple

from geomon.record import Reading
from geomon.show.terminal import charts
from geomon.show.terminal.history import Watched
from geomon.show.terminal.quantities import Quantity, loss_of

DIMENSION = Quantity("twonn", has_mean=True)
_START: charts.Colour = (150, 150, 150)


class Profile(NamedTuple):
    """A metric over depth at one reading.

    Attributes:
        name: Name in the legend.
        reading: The reading.
        colour: Colour of its line.
        marker: Marker of its line.
    """

    name: str
    reading: Reading
    colour: charts.Colour
    marker: str


class Choices:
    """The watched runs, and what of them is shown.

    Args:
        runs: The runs, at least one.
        coloured: Whether the terminal shows colours.

    Attributes:
        logarithmic: Whether the axis of steps is logarithmic.
        step: Step of the reading whose layers and heads are shown; None for the newest.
    """

    def __init__(self, runs: Sequence[Watched], *, coloured: bool = True) -> None:
        self.runs = list(runs)
        self.coloured = coloured
        self.logarithmic = True
        self._layer: int | None = None
        self.step: int | None = None
        self._run = 0
        self._metric: Quantity | None = None
        self._heads = ""

    @property
    def run(self) -> Watched:
        """The run whose layers, heads and notes are shown."""
        return self.runs[self._run]

    @property
    def several(self) -> bool:
        """Whether there are several runs."""
        return len(self.runs) > 1

    @property
    def quantities(self) -> list[Quantity]:
        """Quantities that any of the runs has."""
        return list(dict.fromkeys(q for run in self.runs for q in run.contents.quantities))

    @property
    def metric(self) -> Quantity | None:
        """The quantity that is shown; None without any."""
        known = self.quantities
        return self._metric if self._metric in known else next(iter(known), None)

    @property
    def loss(self) -> Quantity | None:
        """The loss of the training; None without any."""
        return loss_of(self.quantities)

    @property
    def layers(self) -> list[int]:
        """Numbers of the layers that have the shown quantity."""
        metric = self.metric
        if metric is None:
            return []
        return sorted({n for run in self.runs for n in run.contents.layers.get(metric, [])})

    @property
    def layer(self) -> int | None:
        """Number of the layer whose curve is shown; None for the mean over layers."""
        places = self._places()
        return self._layer if self._layer in places else places[0]

    def _places(self) -> list[int | None]:
        """The mean, where there is one, and the layers."""
        metric, layers = self.metric, self.layers
        if metric is None or metric.has_mean or not layers:
            return [None, *layers]
        return [*layers]

    @property
    def heads(self) -> str:
        """Name of the metric of heads that is shown: the chosen one, else that of the curves."""
        known = self.run.contents.with_heads
        chosen = self._heads or (self.metric.metric if self.metric is not None else "")
        return chosen if chosen in known else next(iter(known), "")

    @property
    def reading(self) -> Reading | None:
        """The reading whose layers and heads are shown; None without any."""
        return self.run.at(self.step) or next(iter(self.run.selected), None)

    @property
    def peak(self) -> Reading | None:
        """The reading at the peak of the only run; None where it has none, or of several runs."""
        if self.several or not len(self.run.curve(DIMENSION)):
            return None
        phase = self.run.phase(DIMENSION)
        return self.run.at(phase.peak_step) if phase.earliest is not None else None

    def look_of(self, index: int) -> tuple[charts.Colour, str]:
        """Return the colour and the marker of a run.

        Args:
            index: Number of the run, from 0.
        """
        return charts.RUNS[index % len(charts.RUNS)], self._marker(index)

    def profiles(self) -> list[Profile]:
        """Choose the profiles over depth: of each run, or of one at its start, peak and end."""
        if self.several:
            return [
                Profile(run.name, reading, *self.look_of(index))
                for index, run in enumerate(self.runs)
                if (reading := run.at(self.step)) is not None
            ]
        now, peak = self.reading, self.peak
        if now is None:
            return []
        found = [Profile("start", self.run.selected[0], _START, self._marker(2))]
        if peak is not None:
            found.append(Profile(f"peak {peak.step:,}", peak, charts.PEAK, self._marker(1)))
        name = "now" if self.step is None else f"step {now.step:,}"
        earlier = [profile for profile in found if profile.reading.step != now.step]
        return [*earlier, Profile(name, now, *self.look_of(0))]

    def _marker(self, index: int) -> str:
        return charts.MARKERS[0 if self.coloured else index % len(charts.MARKERS)]

    def change_metric(self, by: int) -> None:
        """Choose another metric, so many places on."""
        known = self.quantities
        if self.metric is not None:
            self._metric = known[(known.index(self.metric) + by) % len(known)]
            self._heads = ""

    def change_layer(self, by: int) -> None:
        """Choose another layer, or the mean, so many places on."""
        places = self._places()
        self._layer = places[(places.index(self.layer) + by) % len(places)]

    def change_heads(self) -> None:
        """Choose the next metric of the heads."""
        known = self.run.contents.with_heads
        if known:
            self._heads = known[(known.index(self.heads) + 1) % len(known)]

    def change_reading(self, by: int) -> None:
        """Choose an earlier or a later reading; after the last one the newest is followed."""
        steps = [reading.step for reading in self.run.selected]
        if self.reading is not None:
            index = max(0, steps.index(self.reading.step) + by)
            self.step = steps[index] if index < len(steps) - 1 else None

    def change_run(self) -> None:
        """Choose the next run."""
        self._run = (self._run + 1) % len(self.runs)
