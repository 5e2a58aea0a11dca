"""Errors of geomon's own while it looks at calls: they end no run, and become notes."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from geomon.capture.guard import Guard


@contextmanager
def no_own_errors() -> Iterator[list[str]]:
    """Fail if there was one; a test that plants an error removes it from the list."""
    found, keep = list[str](), Guard.keep

    def kept(guard: Guard, error: Exception) -> None:
        found.append(repr(error))
        keep(guard, error)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Guard, "keep", kept)
        yield found
    assert found == []
