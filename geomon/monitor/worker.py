"""A worker: one thread that does what it is given, in order, while the training goes on."""

import queue
import threading
from collections.abc import Callable

Task = Callable[[], None]


class Worker:
    """Runs tasks one after another in a thread of its own.

    The thread is started with the first task and ends with `close`: a monitor that never measures
    leaves none behind. The queue is bounded: who gives tasks faster than they are done waits.

    Args:
        waiting: Tasks that may wait.
        name: Of the thread.

    Example:
        >>> done = []
        >>> worker = Worker()
        >>> for number in range(3):
        ...     worker.give(lambda number=number: done.append(number))
        >>> worker.close()
        >>> done
        [0, 1, 2]
    """

    def __init__(self, *, waiting: int = 2, name: str = "geomon") -> None:
        self._tasks: queue.Queue[Task | None] = queue.Queue(maxsize=waiting)
        self._name = name
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def give(self, task: Task) -> None:
        """Add a task; waits while the queue is full.

        Raises:
            BaseException: What an earlier task raised; its successors are dropped.
        """
        self._raise_failure()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        self._tasks.put(task)

    def close(self) -> None:
        """Wait until all is done and end the thread; may be called more than once.

        Raises:
            BaseException: What a task raised.
        """
        thread, self._thread = self._thread, None
        if thread is not None:
            self._tasks.put(None)
            thread.join()
        self._raise_failure()

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            if self._failure is not None:
                continue
            try:
                task()
            except BaseException as failure:  # raised where the next task is given
                self._failure = failure


__all__ = ["Worker"]
