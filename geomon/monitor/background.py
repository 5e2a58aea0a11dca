"""Readings that are measured in a thread of their own while the training goes on."""

import queue
from collections.abc import Iterator

from geomon.monitor.jobs import UnderWay
from geomon.monitor.together import Found
from geomon.monitor.worker import Worker

# Readings whose rows may wait in memory for those before them to be measured.
_WAITING = 2


class Background:
    """Measures readings one after another; what is finished is handed back in order.

    The thread measures and does nothing else: records, loggers and warnings are the business of the
    thread that trains, which asks for what is finished.
    """

    def __init__(self) -> None:
        self._worker = Worker(waiting=_WAITING)
        self._finished: queue.SimpleQueue[tuple[UnderWay, Found | Exception]] = queue.SimpleQueue()
        self._given = 0
        self._taken = 0

    @property
    def busy(self) -> bool:
        """Whether a reading has been given that was not handed back yet."""
        return self._given > self._taken

    def give(self, reading: UnderWay) -> None:
        """Have a reading measured; waits while too many do already."""
        self._given += 1
        self._worker.give(lambda: self._measure(reading))

    def finished(self) -> Iterator[tuple[UnderWay, Found | Exception]]:
        """What has been finished since the last time: a reading and its values, or its error."""
        while not self._finished.empty():
            self._taken += 1
            yield self._finished.get()

    def close(self) -> None:
        """Wait until all that was given is finished, and end the thread."""
        self._worker.close()

    def _measure(self, reading: UnderWay) -> None:
        try:
            while not reading.complete:
                reading.measure_next()
            self._finished.put((reading, reading.found()))
        except Exception as error:
            self._finished.put((reading, error))


__all__ = ["Background"]
