"""The record of a run: readings, the file that holds them, and sinks that receive them.

`geomon.record.tags` builds tags, `geomon.record.sinks` holds the sinks, and
`geomon.record.printable` makes text of unknown origin safe for a terminal.
"""

from geomon.record.alert import Course, RaisedAlert
from geomon.record.follow import FILE_NAME, Follower, read
from geomon.record.jsonl import Record
from geomon.record.reading import Reading, Readings
from geomon.record.sinks import Sink

__all__ = [
    "FILE_NAME",
    "Course",
    "Follower",
    "RaisedAlert",
    "Reading",
    "Readings",
    "Record",
    "Sink",
    "read",
]
