"""The executor measures readings and checks immediately, or each in a thread of its own."""

import threading
from collections import deque

from geomon.failures import ignored
from geomon.metrics.at_once import stacks_suffice
from geomon.monitor.jobs import ReadingJob

# Readings whose rows may wait in memory while earlier readings are measured in the background.
_WAITING = 2


class ReadingExecutor:
    """Measures jobs in order, and keeps them until they are taken.

    A background thread only measures: records, sinks and warnings belong to the training's thread.
    Ctrl-C may strike between any two lines: a job is kept until it is taken, and the next call
    finishes what was interrupted.

    Args:
        background: Whether to measure in threads.

    Attributes:
        jobs: The jobs that have not been taken yet, in order.
    """

    def __init__(self, *, background: bool) -> None:
        self._background = background
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
                thread = threading.Thread(target=_measure, args=(job, before), name="geomon")
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

    def forget(self) -> None:
        """Drop every job, because after a fork they belong to the parent process."""
        self.jobs.clear()
        self._threads.clear()


def _measure(job: ReadingJob, before: ReadingJob | None) -> None:
    """Measure a job in a thread of its own, after the job before it."""
    if before is not None:
        before.done.wait()
    try:
        with job.alongside_training():
            job.measure(1)
    except BaseException as error:  # even Ctrl-C in a metric is kept with the job
        job.fail(error)
        job.finish()


__all__ = ["ReadingExecutor"]
