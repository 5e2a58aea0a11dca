"""The page of a report: the template, with style, script, data and chart library inside it."""

import base64
import gzip
import os
import time
from collections.abc import Sequence
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

from geomon.show.report.content import Run, build_content


def write_report(runs: Sequence[Run], out: str | os.PathLike[str]) -> Path:
    """Write the report of runs as one file.

    Args:
        runs: Runs, at least one.
        out: Path of the file; folders above it are made.

    Returns:
        The path.

    Raises:
        ValueError: The path does not end in .html.
        ImportError: plotly or jinja2 is missing.
    """
    path = Path(out)
    if path.suffix not in (".html", ".htm"):
        raise ValueError(f"a report is written to a file that ends in .html, got {str(path)!r}")
    text = render(runs)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def render(runs: Sequence[Run]) -> str:
    """Build the page: HTML that works without network.

    Everything that comes from a record is escaped, in the page and in the data of its charts.

    Args:
        runs: Runs, at least one.

    Raises:
        ImportError: plotly or jinja2 is missing.
    """
    try:
        import jinja2
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ImportError("the report needs plotly: pip install 'geomon[report]'") from error
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False}  # and keys in their order
    template = environment.from_string(_part("page.html"))
    content = build_content(runs)
    return template.render(
        **content,
        # The library is 5 MB, and 2 MB so: browsers can unpack it.
        plotly=base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode(),
        style=_part("page.css"),
        script=_part("page.js"),
        data={name: content[name] for name in ("groups", "charts", "curves", "titles")}
        | {"runs": [_charted(run) for run in content["runs"]]},
        version=version("geomon"),
        made=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    )


def _charted(run: dict[str, Any]) -> dict[str, Any]:
    """What the charts need of a run: the words stand in the page already."""
    return {name: run[name] for name in ("name", "curves", "profiles", "heads")}


def _part(name: str) -> str:
    return files("geomon.show.report").joinpath(name).read_text(encoding="utf-8")


__all__ = ["render", "write_report"]
