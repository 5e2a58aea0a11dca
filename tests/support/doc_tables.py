"""Lists in the docs, made from declarations; `python tests/support/doc_tables.py` writes them."""

import re
from pathlib import Path

from geomon import METRICS, MORE_METRICS
from geomon.capture.snapshot import CAPTURED, LAST, source_of
from geomon.metrics.views import DERIVED, captured_views, rule_of
from geomon.metrics.without import refused
from geomon.monitor.options import CallbackOptions, declared
from geomon.note_kinds import NoteKind
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


# Page that says more of an option.
MORE = {
    "metrics": "metrics.md",
    "tokens": "metrics.md#which-rows",
    "queries": "metrics.md#which-rows",
    "checks": "alerts.md#checks",
    "budget": "cost.md#the-budget",
    "probe": "guide.md#a-validation-at-every-reading",
    "directory": "report.md#the-record",
    "arrays": "figures.md#arrays-beside-the-record",
    "sinks": "#sinks",
    "settings": "#settings",
    "alerts": "alerts.md",
    "on_peak": "alerts.md#phases",
    "on_phase": "alerts.md#phases",
    "gather": "many_ranks.md",
    "background": "cost.md#a-process-of-its-own",
    "device": "cost.md#where-rows-are-measured",
    "detail": "metrics.md#what-charts-show",
}


def of_options() -> dict[str, list[str]]:
    """A section for each group of options, with a line for each: name, default, what it is."""
    sections: dict[str, list[str]] = {}
    own: list[str] = []
    for name, option in declared(CallbackOptions).items():
        if option.group:
            own = sections.setdefault(option.group, [])
        default = {"metrics": "METRICS", "alerts": "all"}.get(name, repr(option.default))
        more = f" [More]({MORE[name]})." if name in MORE else ""
        own.append(f"- `{name}` (default `{default}`): {option.words}{more}")
    return sections


# The first kind of each section of the page of notes.
FIRST_KINDS = {
    "Rows": NoteKind.FEW_ROWS,
    "Tokens": NoteKind.PADDING,
    "Attention": NoteKind.BY_NAME_ALONE,
    "What differs from the rest of the model": NoteKind.LATER_KEYS,
    "Blocks": NoteKind.SUMS_OUTSIDE,
    "How it was measured": NoteKind.WATCHING_FAILED,
    "Values": NoteKind.NO_VALUE,
    "Ranks": NoteKind.NOT_GATHERED,
}


def of_kinds() -> dict[str, list[str]]:
    """A section for each group of kinds of notes: name, meaning, what to do, values."""
    sections: dict[str, list[str]] = {}
    first = {kind: section for section, kind in FIRST_KINDS.items()}
    own: list[str] = []
    for kind in NoteKind:
        if kind in first:
            own = sections.setdefault(first[kind], [])
        own.append(f"- `{kind}`: {kind.meaning} *{kind.to_do}* Values: {kind.values}.")
    return sections


DOCS = Path(__file__).parents[2] / "docs"
# The heading behind which each list stands; that of the views goes to the end of the page.
LISTS = {
    ("metrics.md", "Measured by default"): of_metrics(METRICS),
    ("metrics.md", "More metrics"): of_names(MORE_METRICS),
    ("metrics.md", "What charts show"): of_charts(),
    ("views.md", "From hidden"): of_views()[2:],
    **{("options.md", group): lines for group, lines in of_options().items()},
    **{("notes.md", section): lines for section, lines in of_kinds().items()},
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
