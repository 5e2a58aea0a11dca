import math

import pytest


@pytest.fixture(autouse=True)
def drawings_take_what_they_take(monkeypatch):
    """Runs of a test last less than a drawing; what holds drawings back has tests of its own."""
    monkeypatch.setattr("geomon.show.loggers.history.SHARE", math.inf)
