"""Executor of readings: measured immediately, as the budget allows, or in a thread of their own."""

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

from geomon.monitor.measuring.jobs import ReadingJob
from geomon.monitor.planning.budget import Budget

# Readings whose rows may wait in memory while the background measures those before them.
_WAITING = 2


class ReadingExecutor:
    """Measures jobs one after another; those that are finished are taken from it in order.

    The background thread measures and does nothing else: records, sinks and warnings belong to the
    thread that trains. It is started with the first job and ends with `close`.

    Args:
        budget: Budget that measuring is paid from.
        background: Whether to measure in a thread of its own.
    """

    def __init__(self, budget: Budget, *, background: bool) -> None:
        self._budget = budget
        self._background = background
        self._pool: ThreadPoolExecutor | None = None
        self._running: deque[tuple[ReadingJob, Future[None]]] = deque()  # in the background
        self._current: ReadingJob | None = None  # in this thread
        self._finished: deque[ReadingJob] = deque()

    @property
    def busy(self) -> bool:
        """Whether a job is not finished yet."""
        return self._current is not None or bool(self._running)

    def submit(self, job: ReadingJob) -> None:
        """Take a job on, after the one before it is finished.

        A job of several ranks is measured immediately. In the background at most two jobs wait: a
        third one waits here until the first is finished.

        Args:
            job: The job.
        """
        self.finish()
        if job.is_collective:
            self._current = job
            self.finish()
        elif self._background:
            while len(self._running) > _WAITING:
                self._running[0][1].result()
                self._collect()
            if self._pool is None:
                self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="geomon")
            self._running.append((job, self._pool.submit(_measure, job)))
        else:
            self._current = job
            self.advance()

    def advance(self) -> None:
        """Measure as much as the budget allows; everything where there is no budget."""
        self._collect()
        job = self._current
        if job is None:
            return
        if self._budget.limited and not job.begun and not self._choose_rows(job):
            return
        self._measure_layers(job, within_budget=True)

    def finish(self) -> None:
        """Measure what is left in this thread, on few rows where the budget is tight."""
        job = self._current
        if job is None:
            return
        if self._budget.limited and not job.begun and not job.is_collective:
            self._learn_cost(job)
            if self._budget.choose_rows(job.layers):
                job.limit_rows(self._budget.rows)
        self._measure_layers(job, within_budget=False)

    def take_finished(self) -> ReadingJob | None:
        """Return the first finished job that was not taken yet; None where there is none."""
        self._collect()
        return self._finished.popleft() if self._finished else None

    def close(self) -> None:
        """Finish everything, and end the thread; may be called more than once."""
        self.finish()
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=True)
        self._collect()

    def _collect(self) -> None:
        """Move the jobs that the background has finished to the finished ones."""
        while self._running and self._running[0][1].done():
            self._finished.append(self._running.popleft()[0])

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
        self._current = None
        self._finished.append(job)


def _measure(job: ReadingJob) -> None:
    """Measure a whole job; what is raised, even Ctrl-C in a metric, is kept with the job."""
    try:
        with job.beside_training():
            while not job.complete:
                job.measure_next()
            job.finish()
    except BaseException as error:
        job.fail(error)


__all__ = ["ReadingExecutor"]
