import math

import pytest


@pytest.fixture(autouse=True)
def _drawings_are_not_put_off(monkeypatch):
    """How long a drawing takes says how busy the machine is, and would put the next one off."""
    for name in ("FIRST_SHARE", "SHARE"):
        monkeypatch.setattr(f"geomon.show.loggers.parts.{name}", math.inf)
