"""Shows a run in a notebook as HTML: its summary and its picture."""

import base64
import io
from html import escape

from geomon.advice import to_install
from geomon.analysis import summarise
from geomon.record import Readings, printable

_PIXELS_PER_INCH = 80


def html_of(readings: Readings) -> str:
    """Format a run as HTML: its summary, and its picture if matplotlib is installed."""
    main = readings.of_stack()
    words = "".join(f"<li>{escape(printable(text))}</li>" for text in summarise(main))
    return f"<p><b>{escape(repr(readings))}</b></p><ul>{words}</ul>{_picture(main) if main else ''}"


def _picture(readings: Readings) -> str:
    try:
        from geomon.show.figures import geometry_figure
    except ImportError:
        return f"<p>The picture needs matplotlib: {to_install('figures')}</p>"
    file = io.BytesIO()
    geometry_figure(readings).savefig(file, format="png", dpi=_PIXELS_PER_INCH)
    source = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return f'<img alt="geometry of the run" style="max-width: 100%" src="{source}">'
