"""The size of a block, which kernels choose for the cache, as small as a test needs it."""

from collections.abc import Callable

import pytest


@pytest.fixture
def cut_blocks(monkeypatch) -> Callable[[int], None]:
    """Has kernels read their rows in blocks of so many numbers."""
    return lambda numbers: monkeypatch.setattr("geomon.kernels._blocks.BLOCK", numbers)
