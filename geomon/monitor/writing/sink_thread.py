"""The thread in which sinks are called: one that hangs does not hold the training up for ever."""

import contextlib
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future

# An action, and what tells its caller how it ended; None ends the thread.
_Calls = queue.SimpleQueue[tuple[Callable[[], object], Future[None]] | None]

_NO_THREAD = threading.Thread()  # never started, so it is not alive


class SinkTimeoutError(TimeoutError):
    """A call took longer than its limit."""


class SinkThread:
    """Calls functions in a thread of its own, one after another, while the caller waits.

    The thread is started by the first call and ended by `close`: none is left between readings. A
    call that takes too long is left to itself, with the thread that it holds.

    Args:
        seconds: Largest time that the caller waits for one call.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._thread = _NO_THREAD
        self._calls: _Calls = queue.SimpleQueue()

    def call(self, action: Callable[[], object]) -> None:
        """Call a function in the thread; where none can be started, here and without a limit.

        Args:
            action: The function.

        Raises:
            SinkTimeoutError: It takes longer than the limit.
            Exception: What the function has raised.
        """
        if not self._is_running():
            action()
            return
        done: Future[None] = Future()
        self._calls.put((action, done))
        try:
            done.exception(self._seconds)
        except BaseException as error:  # too late, or Ctrl-C: nothing more waits behind this call
            self._calls.put(None)
            self._thread = _NO_THREAD
            if isinstance(error, TimeoutError):
                raise SinkTimeoutError(f"it takes more than {self._seconds:g} s") from None
            raise
        done.result()

    def close(self) -> None:
        """End the thread, if there is one."""
        thread, self._thread = self._thread, _NO_THREAD
        if thread.is_alive():
            self._calls.put(None)
            thread.join(self._seconds)

    def _is_running(self) -> bool:
        """Start the thread unless it runs; a fork has none, and a program that ends starts none."""
        if not self._thread.is_alive():
            self._calls = queue.SimpleQueue()
            self._thread = threading.Thread(
                target=_serve, args=(self._calls,), name="geomon sinks", daemon=True
            )
            with contextlib.suppress(RuntimeError, MemoryError):
                self._thread.start()
        return self._thread.is_alive()


def _serve(calls: _Calls) -> None:
    while (call := calls.get()) is not None:
        action, done = call
        try:
            action()
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(None)


__all__ = ["SinkThread", "SinkTimeoutError"]
