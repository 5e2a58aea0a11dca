"""A run in a notebook: its page comes with the package's public names."""

from html import escape

import geomon
from geomon.record import Readings


def test_the_first_public_name_gives_readings_their_page(monkeypatch, make_readings):
    readings = make_readings()
    monkeypatch.setattr(Readings, "notebook_form", None)
    assert readings._repr_html_() == f"<p>{escape(repr(readings))}</p>"
    geomon.__getattr__("read")
    assert "<img" in readings._repr_html_()
