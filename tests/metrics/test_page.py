"""Pages of docs have their tables from declarations; a failure prints what they should be."""

from pathlib import Path

import pytest
from doc_tables import of_charts, of_metrics, of_views

from geomon import METRICS, MORE_METRICS

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(
    ("page", "lines"),
    [
        ("metrics.md", of_metrics(METRICS)), ("metrics.md", of_metrics(MORE_METRICS)),
        ("metrics.md", of_charts()), ("views.md", of_views()),
    ],
    ids=["by default", "asked for", "charts", "views"],
)  # fmt: skip
def test_the_tables_are_those_of_the_declarations(page, lines):
    text = "\n".join(lines)
    assert f"\n\n{text}\n" in (DOCS / page).read_text(), f"docs/{page} should have:\n{text}"
