"""Errors of geomon's own while it looks at calls: they end no run, and become notes."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from geomon.capture import Window


@contextmanager
def no_own_errors() -> Iterator[list[str]]:
    """Fail where there was one, unless it was planted: who does that takes it out of the list."""
    found, keep = list[str](), Window.on_failure

    def on_failure(window: Window, error: Exception) -> None:
        found.append(repr(error))
        keep(window, error)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Window, "on_failure", on_failure)
        yield found
    assert found == []
