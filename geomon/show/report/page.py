"""The HTML page of a report, with its style, its charts and plotly included."""

import os
import time
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

from geomon.advice import to_install
from geomon.record import printable
from geomon.show.report.content import BEFORE, OTHERS, Runs, build_content, build_panels
from geomon.version import __version__

_CONFIG = {"responsive": True, "displaylogo": False, "displayModeBar": False}


def write_report(runs: Runs, out: str | os.PathLike[str]) -> Path:
    """Write the report on runs to one HTML file."""
    path = Path(out)
    if path.suffix not in (".html", ".htm"):
        raise ValueError(f"the file of a report must end in .html, got {str(path)!r}")
    text = render(runs)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def render(runs: Runs) -> str:
    """Render the report as an HTML page that works offline.

    All text from records is escaped, on the page and in its charts.

    Args:
        runs: Readings of each run by its name, at least one.

    Raises:
        ImportError: If plotly or jinja2 is missing.
    """
    try:
        import jinja2
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ImportError(f"the report needs plotly: {to_install('report')}") from error
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["printable"] = printable
    return environment.from_string(_part("page.html")).render(
        **build_content(runs),
        charts=[
            {
                "section": section,
                "title": title[:1].upper() + title[1:],
                "wide": " wide" if section == "lead" or title in (OTHERS, BEFORE) else "",
                "healthy": healthy,
                "name": f"chart-{place}",
                "choices": [name for name, *_ in chart.layout.meta or ()],
                "html": chart.to_html(
                    config=_CONFIG, include_plotlyjs=False, full_html=False, div_id=f"chart-{place}"
                ),
            }
            for place, (section, title, healthy, chart) in enumerate(_charts(runs))
        ],
        plotly=get_plotlyjs(),
        style=_part("page.css"),
        version=__version__,
        made=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    )


def _charts(runs: Runs) -> Iterator[tuple[str, str, str, Any]]:
    """Yield the section, title, healthy range and chart of each figure in the order of the page."""
    from geomon.show import charts

    for section, title, healthy, panels in build_panels(runs):
        if panels:
            chart = charts.choose(panels)
            shown = charts.add_linear_axis(chart) if section == "lead" else chart
            yield section, title, healthy, shown


def _part(name: str) -> str:
    return files("geomon.show.report").joinpath(name).read_text(encoding="utf-8")
