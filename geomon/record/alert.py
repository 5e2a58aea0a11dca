"""Alert lines of a record: an alert is written when it is raised, not with the next reading."""

from typing import Annotated

import msgspec

from geomon.note import Note
from geomon.record.columns import Number, number
from geomon.record.encode import encode_line

_Step = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class Course(msgspec.Struct, frozen=True):
    """What a watched value was at the last readings and checks before an alert.

    Attributes:
        tag: Name of the value, "max_logit/layer_03/head_1" for instance.
        steps: Steps at which it was read, ascending; the alert was raised at the last one.
        values: Value at each step; NaN if it could not be measured.
    """

    tag: str
    steps: tuple[int, ...]
    values: tuple[Number, ...]

    def __post_init__(self) -> None:
        """Put NaN in the place of the nulls of JSON."""
        if None in self.values:
            msgspec.structs.force_setattr(self, "values", tuple(map(number, self.values)))


class RaisedAlert(msgspec.Struct, frozen=True):
    """An alert as a line of the record.

    Attributes:
        step: Step of the reading or check that raised it.
        time: Moment at which it was raised, in seconds since the epoch.
        source: "inline" or "probe" for an alert of a reading, "check" for one of a check.
        note: What was found, in words and numbers; its kind is the name of the rule.
        courses: The values that left their bands, over the last 32 readings or checks of the same
            source; empty for a rule without bands.
    """

    step: _Step
    time: float
    source: str
    note: Note
    courses: tuple[Course, ...] = ()

    def words(self) -> str:
        """Return the alert as a sentence."""
        return self.note.words()

    def line(self) -> str:
        """Format the alert as one line of JSON; a value that is not finite becomes null."""
        return encode_line({"alert": self})


__all__ = ["Course", "RaisedAlert"]
