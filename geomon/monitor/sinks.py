"""Call sinks, leaving out any that fails or hangs, so that none holds up the run."""

import contextlib
import functools
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

from geomon.failures import ignored
from geomon.monitor.warnings import Warnings
from geomon.record import AlertSink, DescribedSink, RaisedAlert, Reading, Sink, parts_of

# A sink that fails at this many readings in a row is left out.
_MOST_FAILURES = 5

_Action = Callable[[], object]


class SinkTimeoutError(TimeoutError):
    """A call took longer than its limit."""


class SinkThread:
    """Calls functions in a thread of its own, one after another, while the caller waits.

    The first call starts the thread and `close` ends it, so that none remains between readings. A
    call that exceeds the limit in seconds is abandoned together with its thread.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._thread: threading.Thread | None = None
        self._calls: queue.SimpleQueue[tuple[_Action, Future[None]] | None] = queue.SimpleQueue()

    def call(self, action: _Action) -> None:
        """Call a function in the thread, or here without a limit if no thread can be started.

        Raises SinkTimeoutError if it exceeds the limit, and any error of the function.
        """
        if not self._is_running():
            action()
            return
        done: Future[None] = Future()
        ended = False
        try:
            self._calls.put((action, done))  # from here on a sink may be running
            ended = not wait([done], self._seconds).not_done
        finally:
            if not ended:  # too late, or Ctrl-C: no further call waits for this one
                self._calls.put(None)
                self._thread = None
        if not ended:
            raise SinkTimeoutError(f"it takes more than {self._seconds:g} s")
        done.result()

    def close(self) -> None:
        """End the thread, if there is one."""
        thread, self._thread = self._thread, None
        if thread is not None and thread.is_alive():
            self._calls.put(None)
            thread.join(self._seconds)

    def _is_running(self) -> bool:
        """Start the thread unless it runs; forks and ending programs cannot run one."""
        if self._thread is None or not self._thread.is_alive():
            self._calls = queue.SimpleQueue()
            self._thread = threading.Thread(
                target=_serve, args=(self._calls,), name="geomon sinks", daemon=True
            )
            with ignored(RuntimeError, MemoryError):
                self._thread.start()
        return self._thread.is_alive()


def _serve(calls: "queue.SimpleQueue[tuple[_Action, Future[None]] | None]") -> None:
    while (call := calls.get()) is not None:
        action, done = call
        try:
            action()
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(None)


@dataclass
class _Entry:
    """A sink, how it is called, and at how many readings in a row it has failed."""

    sink: Sink
    call: Callable[[_Action], object]
    failures: int = 0

    @property
    def name(self) -> str:
        """Name of the sink in messages: its own `__str__`, or its class."""
        calls_itself = type(self.sink).__str__ is not object.__str__
        return str(self.sink) if calls_itself else type(self.sink).__name__


class SinkCalls:
    """The sinks of a monitor, and how they are called.

    A sink that fails is tried again at the next readings, and left out if it fails at five in a
    row. Sinks are called in a thread for which the training waits; one that exceeds its limit in
    seconds is left out. A trainer's own loggers are called in the training's thread, as the
    training calls them, because some keep per-thread state.
    """

    def __init__(self, sinks: Sequence[Sink], warnings: Warnings, seconds: float) -> None:
        self._thread = SinkThread(seconds)
        self._entries = [_Entry(sink, self._thread.call) for sink in parts_of(sinks)]
        self._warnings = warnings

    def add_loggers(self, sinks: Sequence[Sink]) -> None:
        """Add sinks that are called in the training's own thread, without a time limit."""
        self._entries += [_Entry(sink, lambda action: action()) for sink in parts_of(sinks)]

    def describe(self, description: dict[str, Any]) -> None:
        """Pass the description of the run to the sinks that take one."""
        with contextlib.closing(self._thread):
            for entry in self._entries:
                if isinstance(entry.sink, DescribedSink):
                    message = f"{entry.name} did not take the description of the run"
                    self._call(entry, functools.partial(entry.sink.describe, description), message)

    def write(self, reading: Reading) -> None:
        """Pass a recorded reading to all sinks."""
        with contextlib.closing(self._thread):
            for entry in self._entries:
                self._write(entry, functools.partial(entry.sink.write, reading))

    def alert(self, alert: RaisedAlert) -> None:
        """Pass a recorded alert to the sinks that take alerts."""
        with contextlib.closing(self._thread):
            for entry in self._entries:
                if isinstance(entry.sink, AlertSink):
                    self._write(entry, functools.partial(entry.sink.alert, alert))

    def close(self) -> None:
        """Close the sinks, last one first, because what draws into a logger comes after it."""
        with contextlib.closing(self._thread):
            for entry in self._entries[::-1]:
                self._call(entry, entry.sink.close, f"closing {entry.name} failed")
        self._entries = []

    def _write(self, entry: _Entry, action: _Action) -> None:
        message = (
            f"{entry.name} failed and is tried again with the next readings; the record goes on"
        )
        if self._call(entry, action, message):
            entry.failures = 0
            return
        entry.failures += 1
        if entry.failures == _MOST_FAILURES:
            self._leave_out(entry)
            self._warnings.warn(
                f"{entry.name} failed at {_MOST_FAILURES} readings in a row and is left out from "
                "here on; the record holds every reading"
            )

    def _call(self, entry: _Entry, action: _Action, message: str) -> bool:
        """Call a sink, and return whether it succeeded; one that takes too long is left out."""
        left_out = f"{entry.name} takes too long and is left out from here on"

        def limited() -> None:
            try:
                entry.call(action)
            except SinkTimeoutError as error:
                self._leave_out(entry)
                self._warnings.warn(f"{left_out}: {error}", kind=left_out)

        return self._warnings.attempt(limited, message)

    def _leave_out(self, entry: _Entry) -> None:
        self._entries = [other for other in self._entries if other is not entry]


__all__ = ["SinkCalls", "SinkThread", "SinkTimeoutError"]
