import math

import pytest


@pytest.fixture(autouse=True)
def _drawings_are_not_put_off(monkeypatch):
    """How long a drawing takes says how busy the machine is, and would put the next one off."""
    monkeypatch.setattr("geomon.show.loggers.history.SHARE", math.inf)
