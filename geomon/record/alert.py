"""Alert lines of a record, written when an alert is raised rather than with the next reading."""

from typing import Annotated

import msgspec

from geomon.note import Note
from geomon.record.columns import Number, number
from geomon.record.encode import encode_line

_Step = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class Course(msgspec.Struct, frozen=True):
    """A watched value at the last readings and checks before an alert.

    Attributes:
        tag: Name of the value, such as "max_logit/layer_03/head_1".
        steps: Steps where it was read, ascending; the alert was raised at the last one.
        values: Value at each step; NaN if it could not be measured.
    """

    tag: str
    steps: tuple[int, ...]
    values: tuple[Number, ...]

    def __post_init__(self) -> None:
        """Replace JSON nulls by NaN."""
        if None in self.values:
            msgspec.structs.force_setattr(self, "values", tuple(map(number, self.values)))


class RaisedAlert(msgspec.Struct, frozen=True):
    """An alert as a line of the record.

    Attributes:
        step: Step of the reading or check that raised it.
        time: Time at which it was raised, in seconds since the epoch.
        source: Origin: "inline", "probe" or "check", the source of a reading or check;
            "log", a value that the training logs; or "weights", the trainable weights.
        note: The finding in words and numbers; its kind is the name of the rule.
        courses: The values that left their bands, over the last 32 readings or checks of the same
            source. Defaults to (), for a rule without bands.
    """

    step: _Step
    time: float
    source: str
    note: Note
    courses: tuple[Course, ...] = ()

    @property
    def kind(self) -> str:
        """The name of the rule in words, such as "rank collapse"."""
        return self.note.kind.replace("_", " ")

    def words(self) -> str:
        """Return the alert as a sentence."""
        return self.note.words()

    def line(self) -> str:
        """Format the alert as one line of JSON, with null for values that are not finite."""
        return encode_line({"alert": self})


__all__ = ["Course", "RaisedAlert"]
