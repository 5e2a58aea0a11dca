"""Executor of readings: measured immediately, as the budget allows, or in a thread of their own."""

import threading
from collections import deque

from geomon.metrics.at_once import stacks_suffice
from geomon.monitor.measuring.jobs import ReadingJob
from geomon.monitor.planning.budget import Budget

# Readings whose rows may wait in memory while the background measures those before them.
_WAITING = 2


class ReadingExecutor:
    """Measures jobs one after another; those that are finished are taken from it in order.

    A thread in the background measures and does nothing else: records, sinks and warnings belong to
    the thread that trains. Each job has a thread of its own, which waits for the one before it.

    Ctrl-C may come between any two lines: a job is added where it belongs next before it is removed
    from where it was, and is finished and added once.

    Args:
        budget: Budget that measuring is paid from.
        background: Whether to measure in a thread of its own.
    """

    def __init__(self, budget: Budget, *, background: bool) -> None:
        self._budget = budget
        self._background = background
        self._running: deque[_InBackground] = deque()
        self._left: deque[ReadingJob] = deque()  # in this thread
        self._finished: deque[ReadingJob] = deque()

    @property
    def busy(self) -> bool:
        """Whether a job is not finished yet."""
        return bool(self._left) or bool(self._running)

    def submit(self, job: ReadingJob) -> None:
        """Take a job on, after the one before it is finished.

        A job of several ranks is measured immediately. In the background at most two jobs wait: a
        third one waits here until the first is finished.

        Args:
            job: The job.
        """
        if self._background and not job.is_collective:
            self._submit_to_background(job)
            return
        self._left.append(job)
        self._finish_all_but(1)
        if job.is_collective:
            self.finish()
        else:
            self.advance()

    def advance(self) -> None:
        """Measure as much as the budget allows; everything where there is no budget."""
        self._collect()
        if not self._left:
            return
        job = self._left[0]
        if self._budget.limited and not job.begun and not self._choose_rows(job):
            return
        self._measure_layers(job, within_budget=True)

    def finish(self) -> None:
        """Measure what is left in this thread, on few rows where the budget is tight."""
        self._finish_all_but(0)

    def first_finished(self) -> ReadingJob | None:
        """Return the first finished job that was not removed yet; None where there is none."""
        self._collect()
        return self._finished[0] if self._finished else None

    def remove_first(self) -> None:
        """Remove the first finished job, once it is recorded or has failed."""
        self._finished.popleft()

    def forget(self) -> None:
        """Drop every job: in a fork, they are those of its parent."""
        self._left.clear()
        self._running.clear()
        self._finished.clear()

    def close(self) -> None:
        """Finish everything; no thread is left. May be called more than once."""
        self.finish()
        for running in tuple(self._running):
            running.finish()
        self._collect()

    def _submit_to_background(self, job: ReadingJob) -> None:
        while len(self._running) > _WAITING:
            self._running[0].finish()
            self._collect()
        before = self._running[-1].done if self._running else None
        self._running.append(_InBackground(job, before))
        self._running[-1].start()

    def _collect(self) -> None:
        """Move the jobs that are finished to the finished ones."""
        while self._running and self._running[0].done.is_set():
            self._add_finished(self._running[0].job)
            self._running.popleft()
        while self._left and self._left[0].finished:
            self._add_finished(self._left[0])
            self._left.popleft()

    def _add_finished(self, job: ReadingJob) -> None:
        if not any(other is job for other in self._finished):
            self._finished.append(job)

    def _finish_all_but(self, count: int) -> None:
        self._collect()
        while len(self._left) > count:
            job = self._left[0]
            if self._budget.limited and not job.begun and not job.is_collective:
                self._learn_cost(job)
                if self._budget.choose_rows(job.layers):
                    job.limit_rows(self._budget.rows)
            self._measure_layers(job, within_budget=False)

    def _choose_rows(self, job: ReadingJob) -> bool:
        """Choose the number of rows that a job stands on; False while that is not known yet."""
        if not self._budget.knows_costs and not self._budget.affords(job.trial_cost):
            return False
        self._learn_cost(job)
        if not self._budget.choose_rows(job.layers):
            return False
        job.limit_rows(self._budget.rows)
        return True

    def _learn_cost(self, job: ReadingJob) -> None:
        """Measure a layer on few rows for its cost, if no cost is known."""
        if self._budget.knows_costs:
            return
        before = job.seconds
        try:
            rows, seconds = job.try_layer()
        except Exception as error:
            job.fail(error)
        else:
            self._budget.learn(rows, seconds)
        self._budget.spend(job.seconds - before)

    def _measure_layers(self, job: ReadingJob, *, within_budget: bool) -> None:
        """Measure the layers, as many at once as pays, and finish the job after the last one."""
        within_budget = within_budget and self._budget.limited
        try:
            while not job.complete:
                count = min(job.at_once, job.left) if within_budget else job.left
                cost = count * self._budget.layer_cost(job.rows)
                if within_budget and not self._budget.affords(cost):
                    return
                seconds = job.measure_next(count)
                self._budget.spend(seconds)
                self._budget.learn(job.rows, seconds / count)
        except Exception as error:
            job.fail(error)
        before = job.seconds
        job.finish()
        self._budget.spend(job.seconds - before)
        self._collect()


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
        self._thread: threading.Thread | None = None

    @property
    def has_thread(self) -> bool:
        """Whether a thread measures the job."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Start the thread; where none can be had, measure here.

        A system limits the threads and the memory of its users; a program that ends starts none.
        """
        self._thread = threading.Thread(target=self._measure, name="geomon")
        try:
            if stacks_suffice():
                self._thread.start()
        except (RuntimeError, MemoryError):
            pass
        if not self.has_thread:
            self.finish()

    def finish(self) -> None:
        """Wait until the job is done, or measure it here if no other thread does.

        The garbage collector may end a monitor in any thread, in the one that measures too.
        """
        thread = self._thread
        if thread is not None and thread.is_alive() and thread is not threading.current_thread():
            self.done.wait()
            thread.join()
        if not self.done.is_set():
            self._before = None  # those before this one were finished by whoever asks for it
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
