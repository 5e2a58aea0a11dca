"""A reading holds the values measured at one step; readings, those of a whole run."""

import difflib
import functools
import json
import math
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from geomon.record import tags
from geomon.record.arrays import ArrayFolder
from geomon.record.columns import (
    Layout,
    Values,
    distinct_layouts,
    layout_of,
    read_values,
    write_values,
)
from geomon.record.printable import printable
from geomon.record.versions import Newer, is_newer

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class Reading:
    """Values measured at one step.

    Attributes:
        step: Number of optimizer updates already in the weights.
        time: Moment of the reading, in seconds since the epoch.
        seconds: Seconds by which the reading delayed the training.
        source: "inline" (measured in the training forward) or "probe" (in an extra pass on fixed
            inputs).
        mode: "train" or "eval", the mode of the model in that pass.
        tokens: Number of measured rows of hidden states, over all splits.
        world_size: Number of ranks.
        dtype: Data type of the model's hidden states.
        values: Values by tag; NaN where a value could not be measured.
        notes: Sentences on how far the values can be trusted.
    """

    step: int
    time: float
    seconds: float
    source: str
    mode: str
    tokens: int
    world_size: int
    dtype: str
    values: Mapping[str, float]
    notes: list[str] = field(default_factory=list)

    def __repr__(self) -> str:
        notes = f", {len(self.notes)} note{'s' * (len(self.notes) != 1)}" if self.notes else ""
        return f"Reading(step {self.step:,}, {self.source}, {len(self.values):,} values{notes})"

    def _repr_html_(self) -> str:
        """Show the headline values and the notes in a notebook."""
        from geomon.record.headline import HEADLINES, Charts, headline_tag

        words = {headline_tag(headline.name): headline.words for headline in HEADLINES}
        rows = "".join(
            f"<tr><td>{escape(words.get(tag, tag))}</td><td>{value:.4g}</td></tr>"
            for tag, value in Charts().headlines(self).items()
        )
        notes = "".join(f"<li>{escape(printable(note))}</li>" for note in self.notes)
        return f"<p>{escape(repr(self))}</p><table>{rows}</table><ul>{notes}</ul>"

    def charted(self) -> dict[str, float]:
        """Select what charts can show of all layers: no NaN, no single heads.

        What they do show is selected in `geomon.record.headline`.
        """
        return {
            tag: value
            for tag, value in self.values.items()
            if tags.is_charted(tag) and not math.isnan(value)
        }

    def layers(self, metric: str) -> list[int]:
        """List the layers for which the reading has tags of the metric, ascending."""
        return layers_of(self.values, metric)

    def line(self) -> str:
        """Format the reading as one line of JSON; a value that is not finite becomes null.

        With thousands of values those of the layers stand there in a short form (see
        `geomon.record.columns`).
        """
        content = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return json.dumps(content | write_values(self.values), allow_nan=False)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Reading":
        """Build a reading from the parsed JSON of its line; null becomes NaN.

        Args:
            content: Keys and values that `line` wrote; other keys are ignored.

        Raises:
            ValueError: A field is missing, or is not of the type that `line` writes.
        """
        _check_fields(content)
        fields = {name: content[name] for name in cls.__dataclass_fields__ if name in content}
        fields["time"], fields["seconds"] = float(content["time"]), float(content["seconds"])
        fields["values"] = read_values(content)
        return cls(**fields)


# One more than the largest whole number of a record: steps are numbers of 64 bits.
MOST = 2**63


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MOST


def _is_number(value: object) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)  # 1e999 is parsed as infinity
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < MOST


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _are_values(value: object) -> bool:
    if not isinstance(value, dict):
        return False
    # Of a long record millions: those of the two usual kinds are looked at all at once.
    if {float, type(None)}.issuperset(map(type, value.values())):
        return all(map(math.isfinite, filter(None, value.values())))
    return all(x is None or _is_number(x) for x in value.values())


def _are_notes(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


# For each field of a reading, whether a value is one that `Reading.line` writes, and its words.
_EXPECTED: dict[str, tuple[Callable[[object], bool], str]] = {
    "step": (_is_count, "a whole number from 0"),
    "time": (_is_number, "a number"),
    "seconds": (_is_number, "a number"),
    "source": (_is_text, "text"),
    "mode": (_is_text, "text"),
    "tokens": (_is_count, "a whole number from 0"),
    "world_size": (_is_count, "a whole number from 0"),
    "dtype": (_is_text, "text"),
    "values": (_are_values, "an object of numbers and nulls"),
    "notes": (_are_notes, "a list of texts"),
}


def _check_fields(content: object) -> None:
    """Raise a ValueError unless each field of a reading is of its type."""
    if not isinstance(content, dict):
        raise ValueError(f"expected an object, got {reprlib.repr(content)}")
    for name, (is_right, expected) in _EXPECTED.items():
        if name not in content and name != "notes":  # the one field with a default
            raise ValueError(f"it has no '{name}'")
        if name in content and not is_right(content[name]):
            raise ValueError(f"'{name}' is {reprlib.repr(content[name])}, expected {expected}")


class Series(NamedTuple):
    """Values of a tag over training.

    Attributes:
        steps: Training steps, ascending.
        values: Values, one for each step.
        margins: Half widths of their 95 % intervals; NaN where unknown.
    """

    steps: list[int]
    values: list[float]
    margins: list[float]


@dataclass(frozen=True)
class Readings:
    """Sequence of the readings of a run.

    Attributes:
        runs: Descriptions of the run, one for each start or resume.
        readings: Readings in the order in which they were written.
        mixed_at: Number of the line from which the file holds the readings of two runs at once;
            None for one run (see `LineCheck`).
        folder: Folder of the arrays beside the record; None where there is no record.
        newer: What a newer version of geomon has written; None where none has.
    """

    runs: list[dict[str, Any]]
    readings: list[Reading]
    mixed_at: int | None = None
    folder: ArrayFolder | None = None
    newer: Newer | None = None

    def __len__(self) -> int:
        return len(self.readings)

    def __iter__(self) -> Iterator[Reading]:
        return iter(self.readings)

    @overload
    def __getitem__(self, key: int) -> Reading: ...

    @overload
    def __getitem__(self, key: str) -> Series: ...

    def __getitem__(self, key: int | str) -> Reading | Series:
        """Return the reading at an index, or the curve of a tag.

        Args:
            key: Index of a reading, or name of a value: "twonn/mean".

        Raises:
            IndexError: There is no such reading.
            KeyError: No reading has a value of that name.
        """
        if not isinstance(key, str):
            return self.readings[key]
        steps, values = self.series(key)
        known = () if steps else self.tags()
        if not steps and key not in known:
            close = difflib.get_close_matches(key, known, n=3, cutoff=0.5)
            advice = f": did you mean {' or '.join(map(repr, close))}?" if close else ""
            raise KeyError(f"no reading has a value called {key!r}{advice}")
        # Of each reading its own: those of two sources may share a step.
        width = f"{key}/{tags.margin_part()}"
        points = sorted(
            (reading.step, reading.values[key], reading.values.get(width, math.nan))
            for reading in self
            if not math.isnan(reading.values.get(key, math.nan))
        )
        return Series(steps, values, [margin for _, _, margin in points])

    def __repr__(self) -> str:
        if not self.readings:
            return "Readings(none yet)"
        steps = [reading.step for reading in self]
        model = f"{self.runs[-1]['model']}, " if self.runs and "model" in self.runs[-1] else ""
        count = f"{len(self):,} reading{'s' * (len(self) != 1)}"
        tags_of_all = f"{len(self.tags()):,} tags"
        return printable(
            f"Readings({model}{count}, steps {min(steps):,} to {max(steps):,}, {tags_of_all})"
        )

    def _repr_html_(self) -> str:
        """Show the run in words and in a picture in a notebook."""
        # Pages know of records, and not the other way round: this one is looked for by its name,
        # when a notebook asks for it.
        return str(import_module("geomon.show.notebook").html_of(self))

    def to_pandas(self) -> "pandas.DataFrame":
        """Build a data frame with a row for each value.

        Returns:
            Columns step, source, metric, stack, layer, head, part and value; layer and head are
            missing where a value is of none. What is no metric stands under its group: metric
            "training" and part "loss", say.

        Raises:
            ImportError: pandas is missing.
        """
        from geomon.record.export import to_pandas

        return to_pandas(self)

    def remarks(self) -> list[str]:
        """List what a page says before it shows the run, in sentences; mostly nothing."""
        remarks = []
        if self.mixed_at is not None:
            remarks.append(
                f"From line {self.mixed_at} on, two runs wrote into this record at once: its "
                "curves mix both. Give each run a folder of its own."
            )
        if self.newer is not None:
            remarks.append(self.newer.words())
        return remarks

    def arrays(self, step: int, source: str | None = None) -> dict[str, NDArray[Any]]:
        """Read the arrays that stand beside the record for a step, by tag; nothing is kept of them.

        `mean_query/layer_03` and `mean_key/...` are means over rows as projected, [heads, width];
        `queries/...` and `keys/...` a few of these rows, [rows, heads, width]; `eigenvalues/...`
        the largest of the covariance of the hidden states; `type_ids/...`, `type_rows/...`,
        `type_square_of_mean/...` and `type_scatter/...` moments of the most frequent token types.

        Args:
            step: Step of a reading.
            source: "inline" or "probe"; None for that of the last reading of the step.

        Raises:
            FileNotFoundError: There are no arrays of that step.
            ValueError: The file is damaged.
        """
        sources = [reading.source for reading in self if reading.step == step]
        chosen = sources[-1] if source is None and sources else source or "inline"
        if self.folder is None:
            raise FileNotFoundError(f"no arrays of step {step}: these readings are of no record")
        return self.folder.read(step, chosen)

    def tags(self) -> list[str]:
        """List all tags, in order of first appearance."""
        layouts = distinct_layouts(reading.values for reading in self)
        return list(dict.fromkeys(tag for names in layouts for tag in names))

    def series(self, tag: str) -> tuple[list[int], list[float]]:
        """Collect the steps and values of a tag, steps ascending, without missing values.

        Args:
            tag: Name of a value, for instance "twonn/mean".

        Returns:
            Steps and values, two lists of equal length.
        """
        points = sorted(
            (reading.step, reading.values[tag])
            for reading in self
            if not math.isnan(reading.values.get(tag, math.nan))
        )
        return [step for step, _ in points], [value for _, value in points]

    def table(self, names: Sequence[str]) -> NDArray[np.float64]:
        """Arrange values as a table: a row for each reading, in order, a column for each tag.

        Args:
            names: Tags.

        Returns:
            Values, float64 [readings, tags]; NaN where a reading has none.
        """
        wanted = tuple(names)
        table = np.full((len(self), len(wanted)), np.nan)
        layout: Layout | None = None
        for row, reading in zip(table, self, strict=True):
            values = Values.of(reading.values)
            if values.layout is not layout:
                layout = values.layout
                columns, positions = layout.positions(wanted)
            row[columns] = values.array[positions]
        return table

    def layers(self, metric: str) -> list[int]:
        """List the layers for which any reading has tags of the metric, ascending."""
        return layers_of(self.tags(), metric)

    def stacks(self) -> list[str]:
        """List the names of the model's stacks in order of appearance; [""] for a single stack."""
        parsed = filter(None, map(tags.parse, self.tags()))
        return list(dict.fromkeys(tag.stack for tag in parsed if tag.layer is not None)) or [""]

    def of_stack(self, name: str | None = None) -> "Readings":
        """Select the values of one stack, under the tags that a model with one stack has.

        Args:
            name: Name of the stack, for instance "encoder"; None for the main one (see
                `main_stack`).

        Raises:
            ValueError: The model has no stack of that name.
        """
        names = self.stacks()
        chosen = main_stack(names) if name is None else name
        if chosen not in names:
            hint = ", ".join(map(repr, names)) if names != [""] else "the model has one stack"
            raise ValueError(f"no stack is called {chosen!r}: {hint}")
        if names == [""]:
            return self
        selected = [_select_stack(reading, chosen, names) for reading in self]
        folder = self.folder and self.folder.of_stack(chosen, names)
        return replace(self, readings=selected, folder=folder)


class LineCheck:
    """Finds what a page has to say of a file as a whole, from its lines in order.

    One run writes the readings of a source with ascending steps. Where a step comes again or goes
    back, and no line says that a run has begun there, another one is writing too.

    Attributes:
        mixed_at: Number of the first line at which that is so; None for one run.
        newer: What a newer version of geomon has written; None where none has.
    """

    def __init__(self) -> None:
        self.mixed_at: int | None = None
        self.newer: Newer | None = None
        self._last: dict[str, int] = {}  # by source, the last step of the present run

    def begin_run(self, description: Mapping[str, Any]) -> None:
        """Take a line that describes a run.

        Args:
            description: What the line says of the run.
        """
        self._last.clear()
        version = description.get("geomon")
        if isinstance(version, str) and is_newer(version):
            left_out = self.newer.left_out if self.newer else 0
            self.newer = Newer(version, left_out)

    def leave_out(self) -> bool:
        """Count a line that cannot be read; False where no newer version accounts for it."""
        if self.newer is not None:
            self.newer = self.newer._replace(left_out=self.newer.left_out + 1)
        return self.newer is not None

    def add(self, number: int, reading: Reading) -> None:
        """Take the next reading of the file.

        Args:
            number: Number of its line.
            reading: The reading.
        """
        if reading.step <= self._last.get(reading.source, -1) and self.mixed_at is None:
            self.mixed_at = number
        self._last[reading.source] = reading.step


def layers_of(names: Iterable[str], metric: str) -> list[int]:
    """List the layers for which there are tags of a metric, ascending.

    Args:
        names: Tags.
        metric: Name of the metric.
    """
    parsed = filter(None, map(tags.parse, names))
    return sorted({tag.layer for tag in parsed if tag.metric == metric and tag.layer is not None})


def main_stack(names: Iterable[str]) -> str:
    """Choose the stack to show when none is asked for: the decoder, or else the first.

    Args:
        names: Names of the stacks, at least one.

    Example:
        >>> main_stack(["encoder", "decoder", "cross"]), main_stack(["text_model", "vision_model"])
        ('decoder', 'text_model')
    """
    names = list(names)
    return next((name for name in ("", "decoder") if name in names), names[0])


def _select_stack(reading: Reading, stack: str, names: list[str]) -> Reading:
    values = Values.of(reading.values)
    positions, layout = _of_stack(values.layout, stack, tuple(names))
    return replace(reading, values=values.select(positions, layout))


@functools.lru_cache(maxsize=256)
def _of_stack(layout: Layout, stack: str, names: tuple[str, ...]) -> tuple[list[int], Layout]:
    """Positions of the values of a stack, and their tags without its name."""
    split = [tags.out_of_stack(tag, names) for tag in layout.tags]
    selected = {
        plain: position
        for position, (tag, (own, plain)) in enumerate(zip(layout.tags, split, strict=True))
        if own == stack or tags.is_of_run(tag)
    }
    return list(selected.values()), layout_of(tuple(selected))
