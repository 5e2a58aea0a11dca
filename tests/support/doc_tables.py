"""Lists of docs, made of what is declared; `python tests/support/doc_tables.py` writes them."""

import re
from pathlib import Path

from geomon import METRICS, MORE_METRICS
from geomon.capture.snapshot import CAPTURED, LAST, source_of
from geomon.metrics.views import DERIVED, captured_views, rule_of
from geomon.metrics.without import refused
from geomon.record.headline import OVERHEAD, PROBE_LOSS, headline_tag, headlines_of


def of_metrics(metrics) -> list[str]:
    """A line for each metric: name, unit, what it is, its parts, its null."""
    lines = []
    for name, metric in metrics.items():
        text = metric.text
        unit = f" ({text.unit})" if text.unit else ""
        parts = "".join(f"; `/{part}`: {words}" for part, words in text.parts.items())
        null = f"; null: {text.null}" if text.null else ""
        lines.append(f"- `{name}`: **{text.title}**{unit}. {text.meaning[:-1]}{parts}{null}.")
    return lines


def of_names(metrics) -> list[str]:
    """One line with the names."""
    return [f"- {', '.join(f'`{name}`' for name in metrics)}."]


def of_charts() -> list[str]:
    """One line with the tags of the headline values."""
    shown = [
        headline for name, metric in METRICS.items() for headline in headlines_of(name, metric.text)
    ]
    return of_names(headline_tag(headline.name) for headline in (*shown, PROBE_LOSS, OVERHEAD))


def of_views() -> list[str]:
    """A section for each source, with a line for each view: name, what it is."""
    sections: dict[str, list[str]] = {}
    for name, view in {**CAPTURED, **DERIVED}.items():
        refuses = rule_of(name) is refused
        # Objects of kernels, and indices and groups of rows, are read by geomon's own metrics.
        inner = re.search(r": [A-Z]|^groups of", view.text) or (name in DERIVED and refuses)
        if inner or name.startswith(LAST):
            continue
        source = source_of(min(captured_views([name])))
        without = " (no margin)" if refuses else ""
        own = sections.setdefault(source, [f"## From {source}", ""])
        own.append(f"- `{name}`: {view.text}{without}")
    return "\n\n".join(map("\n".join, sections.values())).splitlines()


DOCS = Path(__file__).parents[2] / "docs"
# The heading behind which each list stands; that of the views goes to the end of the page.
LISTS = {
    ("metrics.md", "Measured by default"): of_metrics(METRICS),
    ("metrics.md", "More metrics"): of_names(MORE_METRICS),
    ("metrics.md", "What charts show"): of_charts(),
    ("views.md", "From hidden"): of_views()[2:],
}


def write() -> None:
    """Put each list into its page."""
    for (page, heading), lines in LISTS.items():
        head, found, rest = (DOCS / page).read_text().partition(f"\n## {heading}\n\n")
        paragraphs = rest.split("\n\n")
        at = next(n for n, each in enumerate(paragraphs) if each.startswith("- `"))
        after = [] if page == "views.md" else paragraphs[at + 1 :]
        text = "\n\n".join([*paragraphs[:at], "\n".join(lines), *after])
        (DOCS / page).write_text(f"{head}{found}{text.strip()}\n")


if __name__ == "__main__":
    write()
