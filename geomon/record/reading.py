"""A reading holds the values measured at one step; `Readings` holds a whole run."""

import difflib
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from html import escape
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple, overload

import msgspec
from numpy.typing import NDArray

from geomon.advice import to_install
from geomon.note import Note
from geomon.record import tags
from geomon.record.alert import RaisedAlert
from geomon.record.arrays import ArrayFolder
from geomon.record.columns import (
    EMPTY,
    NAN,
    Column,
    Columns,
    MetricText,
    Number,
    Place,
    Stacks,
    all_places,
    number,
    places_of,
    tagged,
    texts_of,
)
from geomon.record.encode import encode_line
from geomon.record.safe_text import printable, text_of, with_noun
from geomon.record.versions import is_newer
from geomon.version import __version__

if TYPE_CHECKING:
    import pandas


# Columns of a run in long form, with their types in a data frame. Names such as "head" and "stack"
# are avoided, because data frames have methods of these names.
COLUMNS = {
    "step": "int64", "source": "category", "metric": "category", "stack_name": "category",
    "layer": "Int32", "head_index": "Int32", "part": "category", "value": "float64",
}  # fmt: skip

Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]

# Settings in the description of a run that choose which rows of which layers are measured, and how.
_MEASURED_WITH = ("probe", "tokens", "splits", "queries", "seed", "layers", "metrics")


class Reading(msgspec.Struct, frozen=True, dict=True):
    """Values measured at one step.

    Attributes:
        step: Number of optimizer updates already in the weights.
        time: Time of the reading, in seconds since the epoch.
        seconds: Seconds by which the reading delayed the training.
        source: "inline" (measured in the training forward) or "probe" (in an extra pass on fixed
            inputs).
        mode: "train" or "eval", the mode of the model in that pass.
        tokens: Number of measured rows of hidden states, over all splits.
        world_size: Number of ranks.
        dtype: Data type of the model's hidden states.
        stacks: Column of each metric, by name of the stack ("" for the only one) and metric.
        overhead: Share of the time since the first step that geomon has taken; NaN if unknown.
        training: Values that the training logs, by name, such as its loss.
        notes: Remarks on how far the values can be trusted, and alerts.
        left_out: Number of readings that were due so far but left out by the budget. Defaults to 0.
        fingerprint: Checksum of the rows that were measured. Readings with the same one saw the
            same tokens in the same groups, so that differences between them are paired. Defaults
            to "", if unknown.
        count: Number of readings of the run so far, with this one. Defaults to 0, for unknown.
        gap: Largest number of steps between two of them. Defaults to 0.
        checks: Number of checks so far. Defaults to 0.
        batch: Checksum of the token ids of the pass, equal for the same text at any step. Defaults
            to "", if they are unknown.
    """

    step: Count
    time: float
    seconds: float
    source: str
    mode: str
    tokens: Count
    world_size: Count
    dtype: str
    stacks: Stacks
    overhead: Number = NAN
    training: dict[str, Number] = {}
    notes: tuple[Note, ...] = ()
    left_out: Count = 0
    fingerprint: str = ""
    count: Count = 0
    gap: Count = 0
    checks: Count = 0
    batch: str = ""

    def __post_init__(self) -> None:
        """Replace JSON nulls by NaN, and refuse values that no reading can have."""
        msgspec.structs.force_setattr(self, "overhead", number(self.overhead))
        msgspec.structs.force_setattr(self, "training", number(self.training))
        if self.step < 0 or not (math.isfinite(self.time) and math.isfinite(self.seconds)):
            raise ValueError("expected a step from 0, and a time and seconds that are finite")

    def __repr__(self) -> str:
        count = len(self.notes)
        notes = f", {with_noun(count, 'note')}" if count else ""
        values = with_noun(len(self.values), "value")
        return f"Reading(step {self.step:,}, {self.source}, {values}{notes})"

    @functools.cached_property
    def values(self) -> Mapping[str, float]:
        """Every value by its tag; NaN if it could not be measured."""
        return tagged(self.stacks) | self.of_run()

    def of_run(self) -> dict[str, float]:
        """Return the values of the run as a whole by tag: what it logs, and what geomon costs."""
        values = {tags.training_tag(name): value for name, value in self.training.items()}
        values[tags.SECONDS] = self.seconds
        return values if math.isnan(self.overhead) else values | {tags.OVERHEAD: self.overhead}

    def value(self, tag: str) -> float:
        """Return the value of a tag; NaN if there is none.

        Args:
            tag: Name of a value, such as "twonn/mean".
        """
        return self.values.get(tag, NAN)

    @property
    def columns(self) -> Columns:
        """Columns of the main stack, by metric (see `main_stack`)."""
        return self.stacks[main_stack(self.stacks)] if self.stacks else {}

    def column(self, metric: str, part: str = "") -> Column:
        """Return a column of the main stack, or an empty one if the reading has none.

        Args:
            metric: Name of the metric.
            part: Name of a part of it. Defaults to "", for the value itself.
        """
        column = self.columns.get(metric, EMPTY)
        return column.parts.get(part, EMPTY) if part else column

    def layers(self, metric: str) -> list[int]:
        """List the layers of the main stack for which the reading has a metric, ascending.

        Args:
            metric: Name of the metric.
        """
        return list(self.column(metric).depths())

    def words(self) -> list[str]:
        """Return the notes as sentences."""
        return [note.words() for note in self.notes]

    def rows(self) -> Iterator[tuple[Any, ...]]:
        """List all values in long form, in the order of `COLUMNS`."""
        for place in all_places(self.stacks):
            head = place.head if place.kind == "head" else None
            kind = place.kind if place.kind in ("margin", "min", "max") else place.name
            part = "/".join(filter(None, (place.part, kind)))
            yield (
                self.step, self.source, place.metric, place.stack, place.layer, head, part,
                place.find(self.stacks),
            )  # fmt: skip
        for tag, value in self.of_run().items():
            group, _, name = tag.partition("/")
            yield self.step, self.source, group, "", None, None, name, value

    def line(self) -> str:
        """Format the reading as one line of JSON, with null for values that are not finite."""
        return encode_line(self)


@dataclass(frozen=True)
class Series:
    """Values of a tag over training.

    Attributes:
        steps: Training steps, ascending.
        values: Values, one for each step.
        margins: Half widths of their 95 % intervals; NaN if unknown.
        tag: Name of the values. Defaults to "".
    """

    steps: list[int]
    values: list[float]
    margins: list[float]
    tag: str = ""

    def __iter__(self) -> Iterator[list[Any]]:
        """Iterate over steps, values and margins."""
        return iter((self.steps, self.values, self.margins))

    def plot(self, axes: Any = None, **style: Any) -> Any:
        """Draw the values over training with their intervals, on a logarithmic axis of steps.

        Args:
            axes: Axes of matplotlib. Defaults to axes of a new pyplot figure.
            **style: Style of the line, as for `Axes.plot`.

        Returns:
            The axes.

        Raises:
            ImportError: If matplotlib is missing.
        """
        if axes is None:
            try:
                from matplotlib import pyplot
            except ImportError as error:
                raise ImportError(f"plot needs matplotlib: {to_install('figures')}") from error
            axes = pyplot.subplots()[1]
        (line,) = axes.plot(self.steps, self.values, **({"label": self.tag, "marker": "."} | style))
        low = [value - margin for value, margin in zip(self.values, self.margins, strict=True)]
        high = [value + margin for value, margin in zip(self.values, self.margins, strict=True)]
        axes.fill_between(self.steps, low, high, color=line.get_color(), alpha=0.2, lw=0)
        after = min((step for step in self.steps if step > 0), default=1)
        axes.set_xscale("symlog", linthresh=after, linscale=0.45)  # leaves room for step 0
        axes.set_xlabel("training step (logarithmic)")
        axes.legend()
        return axes


class Break(NamedTuple):
    """A step from which on a resumed run was read with other settings than before.

    Attributes:
        step: First step with the new settings.
        words: The settings that changed, in a sentence.
    """

    step: int
    words: str


@dataclass(frozen=True)
class Readings:
    """Sequence of the readings of a run.

    Attributes:
        runs: Descriptions of the run, one for each start or resume.
        readings: Readings in the order in which they were written.
        mixed_at: Line number where the file holds readings of two runs at once. Defaults to
            None, for a single run.
        folder: Folder of the arrays next to the record, or None without a record.
        raised: Alerts with lines of their own, in the order in which they were raised.
        abandoned: Readings of abandoned branches: a later start of the run went back to an earlier
            step and continued from there.
    """

    # Builds the page of a run for a notebook. `geomon` sets it, because record imports no pages.
    notebook_form: ClassVar[Callable[["Readings"], str] | None] = None

    runs: list[dict[str, Any]]
    readings: list[Reading]
    mixed_at: int | None = None
    folder: ArrayFolder | None = None
    raised: list[RaisedAlert] = field(default_factory=list)
    abandoned: list[Reading] = field(default_factory=list)

    @functools.cached_property
    def alerts(self) -> list[RaisedAlert]:
        """Alerts of the run, steps ascending.

        For sinks that take only readings, a reading also notes the alerts since the one before.
        Records of older versions hold alerts nowhere else.
        """
        lines = [alert.note for alert in self.raised]
        noted = [
            RaisedAlert(reading.step, reading.time, reading.source, note)
            for reading in self
            for note in reading.notes
            if note.is_alert and note not in lines
        ]
        return sorted([*noted, *self.raised], key=lambda alert: alert.step)

    @functools.cached_property
    def breaks(self) -> list[Break]:
        """Steps at which the run was resumed with other settings, ascending.

        Values before and after such a step stand on other rows, layers or metrics: a curve must not
        be joined there.
        """
        starts: list[dict[str, Any]] = []
        for run in self.runs:
            given_up = run.get("rewound_to", math.inf)
            starts = [start for start in starts if _first_step(start) < given_up]
            starts.append(run)
        found = []
        for before, now in itertools.pairwise(starts):
            if changed := _changes(before, now):
                step = _first_step(now)
                words = (
                    f"From step {step:,} on, this run was read with other settings "
                    f"({', '.join(changed)}): its curves have a break there."
                )
                found.append(Break(step, words))
        return found

    def __len__(self) -> int:
        return len(self.readings)

    def __iter__(self) -> Iterator[Reading]:
        return iter(self.readings)

    @overload
    def __getitem__(self, key: int) -> Reading: ...

    @overload
    def __getitem__(self, key: str) -> Series: ...

    def __getitem__(self, key: int | str) -> Reading | Series:
        """Return the reading at an index, or the curve of a tag such as "twonn/mean".

        Raises IndexError or KeyError if there is none.
        """
        return self._curve(key) if isinstance(key, str) else self.readings[key]

    def _curve(self, tag: str) -> Series:
        """Collect the curve of a tag with its margins."""
        getter = self._getter(tag)
        if getter is None:
            close = difflib.get_close_matches(tag, self.tags(), cutoff=0.5)
            advice = f": did you mean {' or '.join(map(repr, close))}?" if close else ""
            raise KeyError(f"no reading has a value called {tag!r}{advice}")
        # Readings of two sources may share a step.
        points = sorted((reading.step, *getter(reading)) for reading in self)
        known = [point for point in points if not math.isnan(point[1])]
        steps, values, margins = zip(*known, strict=True) if known else ((), (), ())
        return Series([*steps], [*values], [*margins], tag)

    def _getter(self, tag: str) -> Callable[[Reading], tuple[float, float]] | None:
        """Return a function from a reading to the tag's value and margin, or None if unknown."""
        metric = tag.partition("/")[0]
        for reading in reversed(self.readings):
            if tag in reading.of_run():
                return lambda reading: (reading.of_run().get(tag, NAN), NAN)
            for stack, columns in reading.stacks.items():
                for place in places_of(metric, columns.get(metric, EMPTY), stack):
                    if place.tag == tag:
                        return functools.partial(_point, place)
        return None

    @functools.cached_property
    def metrics(self) -> dict[str, MetricText]:
        """Words for each metric, by its name."""
        return {name: text for run in self.runs for name, text in texts_of(run).items()}

    def text_of(self, metric: str) -> MetricText:
        """Return the words for a metric, or just its name if the record has none.

        Args:
            metric: Name of the metric.
        """
        return self.metrics.get(metric, MetricText(metric))

    def __repr__(self) -> str:
        if not self.readings:
            return "Readings(none yet)"
        steps = [reading.step for reading in self]
        model = f"{self.runs[-1]['model']}, " if self.runs and "model" in self.runs[-1] else ""
        count, tags_of_all = with_noun(len(self), "reading"), with_noun(len(self.tags()), "tag")
        return printable(
            f"Readings({model}{count}, steps {min(steps):,} to {max(steps):,}, {tags_of_all})"
        )

    def _repr_html_(self) -> str:
        """Show the run in a notebook, in words, or as a page if the package can draw one."""
        build = type(self).notebook_form
        return f"<p>{escape(repr(self))}</p>" if build is None else build(self)

    def to_pandas(self) -> "pandas.DataFrame":
        """Build a data frame with a row for each value.

        Returns:
            Columns step, source, metric, stack_name, layer, head_index, part and value, where layer
            and head are missing if a value has none. Values that are not metrics have their group
            as metric: "training" with part "loss", for example.

        Raises:
            ImportError: If pandas is missing.
        """
        try:
            import pandas
        except ImportError as error:
            raise ImportError(f"to_pandas needs pandas: {to_install('export')}") from error
        columns: dict[str, list[Any]] = {name: [] for name in COLUMNS}
        appends = [column.append for column in columns.values()]
        for reading in self:
            for row in reading.rows():
                for append, field_ in zip(appends, row, strict=True):
                    append(field_)
        # One column at a time, to free its list: a large run has tens of millions of values.
        return pandas.DataFrame(
            {name: pandas.Series(columns.pop(name), dtype=kind) for name, kind in COLUMNS.items()}
        )

    def remarks(self) -> list[str]:
        """List what a page must say before it shows the run, in sentences; usually nothing."""
        remarks = [words for _, words in self.breaks]
        if left_out := self.readings[-1].left_out if self.readings else 0:
            remarks.append(
                f"The budget left out {with_noun(left_out, 'reading')} that were "
                "due: a larger budget= makes more of them."
            )
        if self.mixed_at is not None:
            remarks.append(
                f"From line {self.mixed_at} on, two runs wrote into this record at once: its "
                "curves mix both. Give each run a folder of its own."
            )
        versions = [str(run.get("geomon", "")) for run in self.runs]
        for version in filter(is_newer, versions[-1:]):
            remarks.append(
                f"This record was written by a newer geomon ({version}): this one ({__version__}) "
                "may miss values; upgrade it."
            )
        return remarks

    def arrays(self, step: int, source: str | None = None) -> dict[str, NDArray[Any]]:
        """Read the arrays stored for a step, by tag; they are not kept in memory.

        `mean_query/layer_03` and `mean_key/...` are means over rows as projected, [heads, width];
        `queries/...` and `keys/...` a few of these rows, [rows, heads, width]; `eigenvalues/...`
        the largest eigenvalues of the covariance of the hidden states; `type_ids/...`,
        `type_rows/...`, `type_square_of_mean/...` and `type_scatter/...` moments of the most
        frequent token types.

        Args:
            step: Step of a reading.
            source: "inline" or "probe". Defaults to the source of the last reading at the step.

        Returns:
            The arrays by tag.

        Raises:
            FileNotFoundError: If the step has no arrays.
            ValueError: If the file is damaged.
        """
        sources = [reading.source for reading in self if reading.step == step]
        chosen = sources[-1] if source is None and sources else source or "inline"
        if self.folder is None:
            raise FileNotFoundError(f"no arrays of step {step}: these readings have no record")
        return self.folder.read(step, chosen)

    def tags(self) -> list[str]:
        """List all tags, in order of first appearance."""
        return list(dict.fromkeys(tag for reading in self for tag in reading.values))

    def series(self, tag: str) -> tuple[list[int], list[float]]:
        """Collect the steps and values of a tag, steps ascending, without missing values.

        Args:
            tag: Name of a value, such as "twonn/mean".

        Returns:
            Steps and values, two lists of equal length.

        Raises:
            KeyError: If no reading has a value of that name.
        """
        curve = self._curve(tag)
        return curve.steps, curve.values

    def layers(self, metric: str) -> list[int]:
        """List the layers of the main stack for which any reading has a metric, ascending.

        Args:
            metric: Name of the metric.
        """
        return sorted({layer for reading in self for layer in reading.layers(metric)})

    def stacks(self) -> list[str]:
        """List the names of the model's stacks in order of appearance; [""] for a single stack."""
        return list(dict.fromkeys(name for reading in self for name in reading.stacks)) or [""]

    def of_stack(self, name: str | None = None) -> "Readings":
        """Select the columns of one stack, under the tags of a model with one stack.

        Args:
            name: Name of the stack, such as "encoder". Defaults to the main one (see `main_stack`).

        Returns:
            The readings of the stack.

        Raises:
            ValueError: If the model has no stack of that name.
        """
        names = self.stacks()
        chosen = main_stack(names) if name is None else name
        if chosen not in names:
            hint = ", ".join(map(repr, names)) if names != [""] else "the model has one stack"
            raise ValueError(f"no stack is called {chosen!r}: {hint}")
        if names == [""]:
            return self
        selected, abandoned = (
            [
                msgspec.structs.replace(reading, stacks={"": reading.stacks.get(chosen, {})})
                for reading in branch
            ]
            for branch in (self.readings, self.abandoned)
        )
        folder = self.folder and self.folder.of_stack(chosen)
        return replace(self, readings=selected, abandoned=abandoned, folder=folder)


def _point(place: Place, reading: Reading) -> tuple[float, float]:
    """Return the value at a place of a reading, and its margin."""
    width = place._replace(kind="margin").find(reading.stacks) if place.kind == "value" else NAN
    return place.find(reading.stacks), width


def _first_step(run: Mapping[str, Any]) -> int:
    """Return the step at which a start of a run began; 0 if its description does not say."""
    step = run.get("from_step")
    return step if isinstance(step, int) else 0


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """List the settings of measuring that differ between two starts and are known of both."""
    found = []
    for name in filter(lambda name: name in before and name in now, _MEASURED_WITH):
        old, new = before[name], now[name]
        if isinstance(old, list) and isinstance(new, list):
            old, new = len(old), len(new)  # wrappers change the names of blocks
        if isinstance(old, dict) and isinstance(new, dict):
            found += [f"without {one}" for one in old if one not in new]
            found += [f"with {one}" for one in new if one not in old]
        elif old != new:
            found.append(f"{name} {_shown(new)} instead of {_shown(old)}")
    return found


def _shown(setting: object) -> str:
    return f"{setting:,}" if isinstance(setting, int) else text_of(setting)


def main_stack(names: Iterable[str]) -> str:
    """Choose the stack to show by default: the decoder, or else the first.

    Example:
        >>> main_stack(["encoder", "decoder", "cross"]), main_stack(["text_model", "vision_model"])
        ('decoder', 'text_model')
    """
    names = list(names)
    return next((name for name in ("", "decoder") if name in names), names[0])
