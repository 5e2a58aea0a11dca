"""The record of a run: readings, the file that holds them, and the sinks that get them besides.

Tags are built in `geomon.record.tags`; the sinks stand in `geomon.record.sinks`; text of
unknown origin is made fit for a terminal in `geomon.record.printable`.
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
