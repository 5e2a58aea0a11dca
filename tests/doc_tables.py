"""Tables of docs, made of what is declared."""

from geomon import METRICS
from geomon.capture.snapshot import CAPTURED, LAST
from geomon.metrics.views import DERIVED, rule_of
from geomon.record.headline import OVERHEAD, PROBE_LOSS, headline_tag, headlines_of


def of_metrics(metrics) -> list[str]:
    """A line for each metric: name, what it is and its parts, null."""
    lines = ["| metric | what it is | null |", "|---|---|---|"]
    for name, metric in metrics.items():
        text = metric.text
        unit = f" ({text.unit})" if text.unit else ""
        parts = "".join(f"; `/{part}`: {words}" for part, words in text.parts.items())
        meaning = f"{text.meaning[:-1]}{parts}." if parts else text.meaning
        lines.append(f"| `{name}` | **{text.title}**{unit}. {meaning} | {text.null} |")
    return lines


def of_charts() -> list[str]:
    """A line for each headline value: name, and what it is."""
    shown = [
        headline for name, metric in METRICS.items() for headline in headlines_of(name, metric.text)
    ]
    return ["| chart | shows |", "|---|---|"] + [
        f"| `{headline_tag(headline.name)}` | {headline.words} |"
        for headline in (*shown, PROBE_LOSS, OVERHEAD)
    ]


def of_views() -> list[str]:
    """A line for each view: name, what it is, what it is made of, how it is had without a group."""
    lines = [
        "| view | what it is | taken from, or made of | without a group |",
        "|---|---|---|---|",
    ]
    for name, view in {**CAPTURED, **DERIVED}.items():
        if name.startswith(LAST):
            continue
        ways = (", ".join(f"`{read}`" for read in way.reads) for way in getattr(view, "ways", ()))
        made = view.source if name in CAPTURED else ", or ".join(ways)
        lines.append(f"| `{name}` | {view.text} | {made} | {rule_of(name).words} |")
    return lines
