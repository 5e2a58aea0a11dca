"""The executor measures readings and checks immediately, or while the training goes on.

A reading in the background has a thread of its own. If a process measures faster, the thread lets
the process do it.
"""

import functools
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from geomon.failures import failures, ignored
from geomon.metrics import stacks_suffice
from geomon.monitor.device import first_line
from geomon.monitor.jobs import ReadingJob
from geomon.monitor.options import PROCESS, THREAD
from geomon.monitor.worker import Worker, WorkerError
from geomon.note import Note
from geomon.note_kinds import NoteKind

# Readings whose rows may wait in memory while earlier readings are measured in the background.
_WAITING = 2
# Seconds that a process takes to start, and that threads must have measured before one is started.
_START = 3.0


class ReadingExecutor:
    """Measures jobs in order, and keeps them until they are taken.

    A background thread only measures: records, sinks and warnings belong to the training's thread.
    Ctrl-C may strike between any two lines: a job is kept until it is taken, and the next call
    finishes what was interrupted.

    Args:
        background: Whether to measure in the background: in a "thread", in a "process", or in
            threads until a process would have paid (True).

    Attributes:
        jobs: The jobs that have not been taken yet, in order.
    """

    def __init__(self, *, background: bool | str) -> None:
        self._background = background
        self._worker = Worker()
        self._in_threads, self._began = 0.0, 0.0  # seconds of measuring, and since when
        self.jobs: deque[ReadingJob] = deque()
        self._threads: dict[ReadingJob, threading.Thread] = {}

    @property
    def busy(self) -> bool:
        """Whether some job is not finished yet."""
        return any(not job.finished for job in self.jobs)

    def submit(self, job: ReadingJob) -> None:
        """Accept a job; in the background at most two jobs wait, and a third blocks here."""
        in_background = self._background and not job.is_collective
        if in_background:
            self.finish(_WAITING)
        before = self.jobs[-1] if self.jobs else None
        self.jobs.append(job)
        # A system may limit threads and memory, and a program that is ending cannot start threads.
        with ignored(RuntimeError, MemoryError):
            if in_background and stacks_suffice():
                thread = threading.Thread(target=self._measure, args=(job, before), name="geomon")
                self._threads[job] = thread
                thread.start()
                return
        self.finish()

    def finish(self, most: int = 0) -> None:
        """Finish jobs until at most `most` are left in the background.

        The garbage collector may call this in any thread, even in the measuring one.
        """
        left = [job for job in self.jobs if not job.finished]
        for job in left[: max(0, len(left) - most)]:
            thread = self._threads.get(job)
            if (
                thread is not None
                and thread.is_alive()
                and thread is not threading.current_thread()
            ):
                thread.join()
            if not job.finished:
                job.measure()

    def resume(self) -> None:
        """Finish what Ctrl-C interrupted in this thread."""
        if any(job not in self._threads for job in self.jobs):
            self.finish()

    def first_finished(self) -> ReadingJob | None:
        """Return the first job if it is finished, else None."""
        return self.jobs[0] if self.jobs and self.jobs[0].finished else None

    def take_first(self) -> None:
        """Drop the first job, which has been recorded or has failed."""
        self._threads.pop(self.jobs.popleft(), None)

    def close(self) -> None:
        """End the process that measures; the jobs must be finished."""
        self._worker.close()

    def forget(self) -> None:
        """Drop every job, because after a fork they belong to the parent process."""
        self._worker.close()
        self.jobs.clear()
        self._threads.clear()

    def _measure(self, job: ReadingJob, before: ReadingJob | None) -> None:
        """Measure a job in a thread of its own, after the job before it."""
        if before is not None:
            before.wait()
        self._began = time.perf_counter()
        try:
            with job.alongside_training():
                job.measure(1, functools.partial(self._call, job))
        except BaseException as error:  # even Ctrl-C in a metric is kept with the job
            job.fail(error)
            job.finish()

    def _call(self, job: ReadingJob, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function that measures a job: in the process, or in this thread."""
        try:
            if self._uses_worker():
                return self._worker.call(function, *args)
        except failures(WorkerError) as error:
            text = "measured in a thread beside the training, not in a process: {why}"
            why = {"why": first_line(error)}
            job.notes.append(Note(NoteKind.IN_THREAD, text, numbers=why))
        return function(*args)

    def _uses_worker(self) -> bool:
        """Whether the process makes the next call, started once threads took as long as a start."""
        if self._background == THREAD or self._worker.has_failed:
            return False
        if self._background == PROCESS:
            return True
        now = time.perf_counter()
        self._in_threads, self._began = self._in_threads + now - self._began, now
        if self._in_threads >= _START:
            self._worker.start()
        return self._worker.is_ready()


__all__ = ["ReadingExecutor"]
