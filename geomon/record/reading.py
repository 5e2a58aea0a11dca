"""A reading holds the values measured at one step; readings, those of a whole run."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from geomon.record import tags


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

    def charted(self) -> dict[str, float]:
        """Select the values that charts show: no NaN, no single heads (see `tags.is_charted`)."""
        return {
            tag: value
            for tag, value in self.values.items()
            if tags.is_charted(tag) and not math.isnan(value)
        }

    def layers(self, metric: str) -> list[int]:
        """List the layers for which the reading has tags of the metric, ascending."""
        return layers_of(self.values, metric)

    def line(self) -> str:
        """Format the reading as one line of JSON; a value that is not finite becomes null."""
        content = asdict(self)
        content["values"] = {
            tag: value if math.isfinite(value) else None for tag, value in self.values.items()
        }
        return json.dumps(content, allow_nan=False)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Reading":
        """Build a reading from the parsed JSON of its line; null becomes NaN.

        Args:
            content: Keys and values that `line` wrote; other keys are ignored.
        """
        names = cls.__dataclass_fields__
        fields = {name: content[name] for name in names if name in content}
        fields["values"] = {
            tag: math.nan if value is None else float(value)
            for tag, value in content["values"].items()
        }
        return cls(**fields)


@dataclass(frozen=True)
class Readings:
    """Sequence of the readings of a run.

    Attributes:
        runs: Descriptions of the run, one for each start or resume.
        readings: Readings in the order in which they were written.
    """

    runs: list[dict[str, Any]]
    readings: list[Reading]

    def __len__(self) -> int:
        return len(self.readings)

    def __iter__(self) -> Iterator[Reading]:
        return iter(self.readings)

    def __getitem__(self, index: int) -> Reading:
        return self.readings[index]

    def tags(self) -> list[str]:
        """List all tags, in order of first appearance."""
        return list(dict.fromkeys(tag for reading in self for tag in reading.values))

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
        return Readings(self.runs, [_select_stack(reading, chosen, names) for reading in self])


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
    split = {tag: tags.out_of_stack(tag, names) for tag in reading.values}
    selected = {
        plain: reading.values[tag]
        for tag, (own, plain) in split.items()
        if own == stack or tags.is_of_run(tag)
    }
    return replace(reading, values=selected)
