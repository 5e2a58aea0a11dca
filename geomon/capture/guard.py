"""Keep errors of geomon's own out of the training, and count the time that it takes from it."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from geomon.capture.tap import DepartedError
from geomon.failures import failures


class Guard:
    """Runs pieces of extra work: counts their time, and keeps their errors for the notes.

    Args:
        charge: Returns a context manager that is entered around each piece; pieces may be nested.

    Attributes:
        seconds: Time taken from the training.
        errors: The errors, in words.
    """

    def __init__(self, charge: Callable[[], AbstractContextManager[None]]) -> None:
        self._charge = charge
        self.seconds = 0.0
        self.errors: list[str] = []

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Count the time of the body as taken from the training; nested bodies count once."""
        began, before = time.perf_counter(), self.seconds
        try:
            with self._charge():
                yield
        finally:
            self.seconds = before + time.perf_counter() - began

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Time the body, and keep its error for the notes: no hook ends a run."""
        with self.timed():
            try:
                yield
            except failures() as error:
                self.keep(error)

    def keep(self, error: Exception) -> None:
        """Keep an error for the notes; a block that left its plan gets a note of its own."""
        if not isinstance(error, DepartedError):
            self.errors.append(f"{type(error).__name__}: {error}")
