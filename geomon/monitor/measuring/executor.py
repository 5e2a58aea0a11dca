"""Executor of readings: measured immediately, or in a thread of their own."""

import contextlib
import threading
from collections import deque

from geomon.metrics.at_once import stacks_suffice
from geomon.monitor.measuring.jobs import ReadingJob

# Readings whose rows may wait in memory while the background measures those before them.
_WAITING = 2


class ReadingExecutor:
    """Measures jobs one after another; those that are finished are taken from it in order.

    A thread in the background measures and does nothing else: records, sinks and warnings belong to
    the thread that trains. Each job has a thread of its own, which waits for the one before it.

    Ctrl-C may come between any two lines: a job is added where it belongs next before it is removed
    from where it was, and is finished and added once.

    Args:
        background: Whether to measure in a thread of its own.
    """

    def __init__(self, *, background: bool) -> None:
        self._background = background
        self._running: deque[_InBackground] = deque()
        self._left: deque[ReadingJob] = deque()  # in this thread: one, and what was interrupted
        self._finished: deque[ReadingJob] = deque()

    @property
    def busy(self) -> bool:
        """Whether a job is not finished yet."""
        return bool(self._left or self._running)

    def submit(self, job: ReadingJob) -> None:
        """Take a job on, after the one before it is finished.

        A job of several ranks is measured immediately. In the background at most two jobs wait: a
        third one waits here until the first is finished.

        Args:
            job: The job.
        """
        if self._background and not job.is_collective:
            self._finish_running(_WAITING)
            self._start(job)
            return
        self._left.append(job)
        self.finish()

    def finish(self) -> None:
        """Measure what is left in this thread: the job that was submitted, or interrupted."""
        while self._left:
            job = self._left[0]
            try:
                while not job.complete:
                    job.measure_next(job.left)
            except Exception as error:
                job.fail(error)
            job.finish()
            self._collect()

    def first_finished(self) -> ReadingJob | None:
        """Return the first finished job that was not removed yet; None where there is none."""
        self._collect()
        return self._finished[0] if self._finished else None

    def remove_first(self) -> None:
        """Remove the first finished job, once it is recorded or has failed."""
        self._finished.popleft()

    def forget(self) -> None:
        """Drop every job: in a fork, they are those of its parent."""
        for jobs in (self._left, self._running, self._finished):
            jobs.clear()

    def close(self) -> None:
        """Finish everything; no thread is left. May be called more than once."""
        self.finish()
        self._finish_running()

    def _start(self, job: ReadingJob) -> None:
        """Have a thread measure a job; where none can be had, measure it here, after the others."""
        before = self._running[-1].done if self._running else None
        running = _InBackground(job, before)
        self._running.append(running)
        running.start()
        if not running.has_thread:
            self._finish_running()

    def _finish_running(self, most: int = 0) -> None:
        """Wait until no more than so many jobs are in the background."""
        while len(self._running) > most:
            self._running[0].finish()
            self._collect()

    def _collect(self) -> None:
        """Move the jobs that are finished to the finished ones."""
        while self._running and self._running[0].done.is_set():
            self._add_finished(self._running[0].job)
            self._running.popleft()
        while self._left and self._left[0].finished:
            self._add_finished(self._left[0])
            self._left.popleft()

    def _add_finished(self, job: ReadingJob) -> None:
        if job not in self._finished:
            self._finished.append(job)


class _InBackground:
    """A job that a thread measures.

    Args:
        job: The job.
        before: Set when the job before it is done; None where there is none.

    Attributes:
        done: Set when the job is measured, or has failed.
    """

    def __init__(self, job: ReadingJob, before: threading.Event | None) -> None:
        self.job = job
        self.done = threading.Event()
        self._before = before
        self._thread = threading.Thread(target=self._measure, name="geomon")

    @property
    def has_thread(self) -> bool:
        """Whether a thread measures the job."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Start the thread, where one can be had.

        A system limits the threads and the memory of its users; a program that ends starts none.
        """
        with contextlib.suppress(RuntimeError, MemoryError):
            if stacks_suffice():
                self._thread.start()

    def finish(self) -> None:
        """Wait until the job is done, or measure it here if no other thread does.

        The garbage collector may end a monitor in any thread, in the one that measures too.
        """
        if self.has_thread and self._thread is not threading.current_thread():
            self._thread.join()
        if not self.done.is_set():
            self._measure()

    def _measure(self) -> None:
        """Measure the job; what is raised, even Ctrl-C in a metric, is kept with it."""
        if self._before is not None:
            self._before.wait()
        try:
            with self.job.beside_training():
                while not self.job.complete:
                    self.job.measure_next()
                self.job.finish()
        except BaseException as error:
            self.job.fail(error)
        self.done.set()


__all__ = ["ReadingExecutor"]
