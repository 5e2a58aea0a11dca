"""docs/metrics.md has its tables from the metrics; a failure prints what they should be."""

from pathlib import Path

import pytest

from geomon import METRICS, MORE_METRICS
from geomon.record.headline import OVERHEAD, PROBE_LOSS, headline_tag, headlines_of

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


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


@pytest.mark.parametrize(
    "lines",
    [of_metrics(METRICS), of_metrics(MORE_METRICS), of_charts()],
    ids=["by default", "asked for", "charts"],
)
def test_the_tables_are_those_of_the_metrics(lines):
    text = "\n".join(lines)
    assert f"\n\n{text}\n\n" in PAGE.read_text(), f"docs/metrics.md should have:\n{text}"
