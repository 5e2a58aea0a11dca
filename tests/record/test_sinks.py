"""Sinks show readings and alerts: memory, and loggers that are made of functions."""

import pytest

from geomon import Memory
from geomon.record.sinks import LoggerSink
from support.readings import raised_of, reading_of


def reading(step):
    return reading_of({"twonn/mean": 0.1 + step, "twonn/layer_01/std": 0.5}, step, "inline")


class Board:
    """A logger that keeps what it is given, and fails at some of the layouts."""

    def __init__(self, failing=()):
        self.rows, self.layouts, self.saved, self.failing = [], [], 0, failing

    def log(self, values, step):
        self.rows.append((values, step))

    def save(self):
        self.saved += 1

    def add_custom_scalars(self, charts):
        self.layouts.append(charts)
        if len(self.layouts) in self.failing:
            raise OSError("gone")


def test_memory_keeps_the_last_ten_thousand_readings_and_alerts():
    sink, first, other, alert = Memory(), reading(0), reading(1), raised_of("rank_collapse", 3)
    for one in (first, *[other] * 9999):
        sink.write(one)
    assert (len(sink.readings), sink.readings[0]) == (10_000, first)
    sink.write(other)
    assert (len(sink.readings), sink.readings[0]) == (10_000, other)
    sink.alert(alert)
    assert [*sink.alerts] == [alert]


def test_every_logger_counts_alerts():
    board = Board()
    sink = LoggerSink("L", board.log, save=board.save)
    for step in (3, 9):
        sink.alert(raised_of("rank_collapse", step))
    assert board.rows == [({"geomon/alerts": 1.0}, 3), ({"geomon/alerts": 2.0}, 9)]
    assert board.saved == 2


def test_a_logger_gets_readings_and_the_layout_until_it_has_it():
    board, failing = Board(), Board(failing=[1])
    sink = LoggerSink("Board", board.log, save=board.save, writers=lambda: [board, failing])
    with pytest.raises(OSError, match="gone"):
        sink.write(reading(0))
    for step in (1, 2):
        sink.write(reading(step))
    sink.close()
    assert board.rows == [({"geomon/twonn": 0.1 + step}, step) for step in (1, 2)]
    assert (len(board.layouts), len(failing.layouts)) == (2, 2)
    charts = [curves for _, curves in board.layouts[0]["geomon"].values()]
    assert sorted(charts) == [["geomon/overhead"] * 3, ["geomon/twonn"] * 3]
    assert (board.saved, str(sink)) == (1, "Board")
