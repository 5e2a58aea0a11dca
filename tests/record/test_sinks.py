import math

import pytest
from tagged import raised_of, reading_of

from geomon.record import Reading, Sink
from geomon.record.sinks import AlertSink, LoggerSink, Memory, NumberSink, parts_of


def reading(step: int) -> Reading:
    return reading_of({"twonn/mean": 0.1 + step, "twonn/layer_01/std": 0.5}, step, "inline")


@pytest.mark.parametrize("sink", [Memory(), LoggerSink("Logger", lambda values, step: None)])
def test_every_sink_takes_readings_and_closes_twice(sink):
    assert isinstance(sink, Sink)
    sink.write(reading(0))
    sink.write(reading(1))
    sink.close()
    sink.close()


def test_a_logger_shows_as_much_as_it_is_asked_for():
    values = {
        "twonn/mean": 1.1, "twonn/layer_01/std": 0.5, "qk/layer_01/head_0": 1.0,
        "qk/layer_01": math.nan, "cosine/layer_01": 0.5,
    }  # fmt: skip
    whole, given = reading_of(values, 1), []
    sink = LoggerSink("L", lambda *row: given.append(row), detail="layers")
    sink.write(whole)
    extremes = {f"qk/{at}/{kind}": 1.0 for at in ("layer_01", "mean") for kind in ("min", "max")}
    shown = {"geomon/twonn": 1.1, "cosine/layer_01": 0.5, "geomon/seconds": 2.0} | extremes
    assert given == [(shown, 1)]
    with pytest.raises(ValueError, match="detail must be 'headline', 'layers' or a tuple of names"):
        LoggerSink("L", max, detail="layer")


def test_sinks_of_parts_are_replaced_by_their_parts():
    parts = [Memory(), Memory()]

    class Pair(Memory):
        def parts(self):
            return parts

    other = Memory()
    assert parts_of([Pair(), other]) == [*parts, other]


def test_memory_keeps_the_last_ten_thousand_readings():
    sink, first, other = Memory(), reading(0), reading(1)
    for one in (first, *[other] * 9999):
        sink.write(one)
    assert (len(sink.readings), sink.readings[0]) == (10_000, first)
    sink.write(other)
    assert (len(sink.readings), sink.readings[0]) == (10_000, other)


def test_memory_keeps_alerts_and_a_logger_of_numbers_takes_none():
    sink, alert = Memory(), raised_of("rank_collapse", 3)
    sink.alert(alert)
    assert [*sink.alerts] == [alert]
    assert isinstance(sink, AlertSink)
    assert not isinstance(LoggerSink("L", max), AlertSink)


def test_a_logger_without_a_place_for_words_counts_alerts():
    logged, saved = [], []
    sink = NumberSink("L", lambda *given: logged.append(given), save=lambda: saved.append(1))
    for step in (3, 9):
        sink.alert(raised_of("rank_collapse", step))
    assert logged == [({"geomon/alerts": 1.0}, 3), ({"geomon/alerts": 2.0}, 9)]
    assert len(saved) == 2


class Writer:
    def __init__(self):
        self.layouts = []

    def add_custom_scalars(self, charts):
        self.layouts.append(charts)


def test_a_logger_gets_readings_and_the_layout_once():
    logged, saved, writer = [], [], Writer()

    def log(values, step):
        logged.append((values, step))

    writers = [writer, Writer()]
    sink = LoggerSink("Board", log, save=lambda: saved.append(1), writers=lambda: writers)
    for step in range(2):
        sink.write(reading(step))
    sink.close()
    assert logged == [({"geomon/twonn": 0.1 + step}, step) for step in range(2)]
    assert [len(each.layouts) for each in writers] == [1, 1]
    charts = [curves for _, curves in writer.layouts[0]["geomon"].values()]
    assert sorted(charts) == [["geomon/overhead"] * 3, ["geomon/twonn"] * 3]
    assert len(saved) == 1
    assert str(sink) == "Board"


def test_a_layout_that_could_not_be_written_is_written_with_the_next_reading():
    class Failing(Writer):
        def add_custom_scalars(self, charts):
            super().add_custom_scalars(charts)
            if len(self.layouts) == 1:
                raise OSError("gone")

    writer, logged = Failing(), []
    sink = LoggerSink("Board", lambda *row: logged.append(row), writers=lambda: [writer])
    with pytest.raises(OSError, match="gone"):
        sink.write(reading(0))
    for step in (1, 2):
        sink.write(reading(step))
    assert len(writer.layouts) == 2
    assert [step for _, step in logged] == [1, 2]
