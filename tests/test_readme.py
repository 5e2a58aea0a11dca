"""What README says is run."""

import re
from pathlib import Path

import pytest
from described import described

from geomon import METRICS, MORE_METRICS, describe

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def test_there_are_blocks():
    assert len(BLOCKS) >= 3
    assert any("def peak_norm" in block for block in BLOCKS)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.strip().splitlines()[0][:40])
def test_every_block_runs_by_itself(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(compile(block, "README.md", "exec"), names)
    if "def peak_norm" in block:
        values = names["values"]
        assert isinstance(values, dict)
        assert values["peak_norm/mean"] > 1


@pytest.mark.parametrize("page", ["README.md", "docs/metrics.md"])
def test_every_metric_is_in_the_tables(page):
    rows = re.findall(r"^\| (.*`.*) \|$", (ROOT / page).read_text(), flags=re.MULTILINE)
    assert set(METRICS | MORE_METRICS) <= {
        name for row in rows for name in re.findall(r"`(\w+)`", row)
    }


def test_every_link_leads_somewhere():
    for target in re.findall(r"\]\((?!http)([^)#]+)", README):
        assert (ROOT / target).exists(), target


def test_what_is_described_is_what_describe_says():
    pages = README + (ROOT / "docs" / "describe.md").read_text()
    for model in described().values():
        assert str(describe(model)) in pages
