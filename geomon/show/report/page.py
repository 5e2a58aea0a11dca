"""The HTML page of a report, with its style, its charts and plotly included."""

import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from geomon import __version__
from geomon.advice import to_install
from geomon.record.printable import printable
from geomon.show.panels import Lines, Matrix
from geomon.show.report.content import Panels, Run, build_content, build_panels

_OTHERS, _BEFORE = "Any other value", "Before the alerts"
_CONFIG = {"responsive": True, "displaylogo": False, "displayModeBar": False}


def write_report(runs: Sequence[Run], out: str | os.PathLike[str]) -> Path:
    """Write the report on runs to one HTML file."""
    path = Path(out)
    if path.suffix not in (".html", ".htm"):
        raise ValueError(f"the file of a report must end in .html, got {str(path)!r}")
    text = render(runs)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def render(runs: Sequence[Run]) -> str:
    """Render the report as an HTML page that works offline.

    All text from records is escaped, on the page and in its charts.

    Args:
        runs: Runs, at least one.

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
    panels = build_panels(runs)
    return environment.from_string(_part("page.html")).render(
        **build_content(runs),
        charts=[
            {
                "section": section,
                "title": title[:1].upper() + title[1:],
                "wide": " wide" * (section == "lead" or title in (_OTHERS, _BEFORE)),
                "healthy": panels.healthy.get(title, ""),
                "name": f"chart-{place}",
                "choices": [name for name, *_ in chart.layout.meta or ()],
                "html": chart.to_html(
                    config=_CONFIG, include_plotlyjs=False, full_html=False, div_id=f"chart-{place}"
                ),
            }
            for place, (section, title, chart) in enumerate(_charts(panels))
        ],
        plotly=get_plotlyjs(),
        style=_part("page.css"),
        version=__version__,
        made=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    )


def _charts(panels: Panels) -> Iterator[tuple[str, str, Any]]:
    """Yield the section, title and chart of each figure in the order of the page."""
    from geomon.show import charts

    for place, (title, each) in enumerate(panels.training.items()):
        chart = charts.draw(each, panels.steps)
        if place:
            yield "training", title, chart
        else:
            yield "lead", title, charts.add_linear_axis(chart)
    chosen: list[tuple[str, str, Mapping[str, Lines | Matrix], Collection[int]]] = [
        ("training", _BEFORE, panels.before_alerts, ()),
        ("training", _OTHERS, panels.others, panels.steps),
        ("depth", "At several steps", panels.depth, ()),
        ("depth", "By layer and step", panels.maps, ()),
    ]
    for section, title, group, steps in chosen:
        if group:
            drawn = {name: charts.draw(panel, steps) for name, panel in group.items()}
            yield section, title, charts.choose(drawn)
    if panels.heads:
        heads = charts.slide(list(panels.heads.values()), list(panels.heads))
        yield "depth", "By layer and head", heads


def _part(name: str) -> str:
    return files("geomon.show.report").joinpath(name).read_text(encoding="utf-8")


__all__ = ["render", "write_report"]
