"""Lists in pages of docs are made of declarations: `python tests/support/doc_tables.py`."""

import pytest

from support.doc_tables import DOCS, LISTS


@pytest.mark.parametrize(("page", "heading"), LISTS)
def test_the_lists_are_those_of_the_declarations(page, heading):
    section = (DOCS / page).read_text().partition(f"\n## {heading}\n")[2]
    text = "\n".join(LISTS[page, heading])
    assert f"\n{text}\n" in section, f"run python tests/support/doc_tables.py: docs/{page}\n{text}"
