"""The record of a run: readings, the file that holds them, and sinks that receive them.

Tags are built by the module `geomon.record.tags`.
"""

from geomon.record.alert import Course, RaisedAlert
from geomon.record.arrays import ArrayPlace, Arrays
from geomon.record.columns import (
    EMPTY,
    NAN,
    Column,
    Columns,
    MetricText,
    Place,
    Stacks,
    margin,
    places_of,
    student,
    tagged,
    texts_of,
)
from geomon.record.exporting import export
from geomon.record.follow import FILE_NAME, Follower, read
from geomon.record.headline import (
    HEADLINE,
    OVERHEAD,
    Charts,
    Detail,
    chart_title,
    check_detail,
    headlines_of,
    shortened,
    without_layers,
)
from geomon.record.jsonl import Record
from geomon.record.reading import Reading, Readings, main_stack
from geomon.record.safe_text import printable, text_of, with_noun
from geomon.record.sinks import ALERTS, AlertSink, DescribedSink, LoggerSink, Memory, Sink, parts_of
from geomon.record.tags import LOSS, layer_tag, training_tag

__all__ = [
    "ALERTS",
    "AlertSink",
    "ArrayPlace",
    "Arrays",
    "Charts",
    "Column",
    "Columns",
    "Course",
    "DescribedSink",
    "Detail",
    "EMPTY",
    "FILE_NAME",
    "Follower",
    "HEADLINE",
    "LOSS",
    "LoggerSink",
    "Memory",
    "MetricText",
    "NAN",
    "OVERHEAD",
    "Place",
    "RaisedAlert",
    "Reading",
    "Readings",
    "Record",
    "Sink",
    "Stacks",
    "chart_title",
    "check_detail",
    "with_noun",
    "export",
    "headlines_of",
    "layer_tag",
    "main_stack",
    "margin",
    "parts_of",
    "places_of",
    "printable",
    "read",
    "shortened",
    "student",
    "tagged",
    "text_of",
    "texts_of",
    "training_tag",
    "without_layers",
]
