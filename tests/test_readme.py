"""What README says is run."""

import ast
import importlib
import re
from pathlib import Path

import pytest
from described import described

from geomon import METRICS, MORE_METRICS, describe
from geomon.monitor.options import CALLBACK_DEFAULTS

ROOT = Path(__file__).parent.parent
FOLDERS = (".", "docs", "benchmarks", "recipes", "recipes/*")
PAGES = sorted(path for folder in FOLDERS for path in ROOT.glob(f"{folder}/*.md"))
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
of_pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.strip().splitlines()[0][:40])
def test_every_block_runs_by_itself(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(compile(block, "README.md", "exec"), names)
    if "def peak_norm" in block:
        assert names["values"]["peak_norm/mean"] > 1


@of_pages
def test_blocks_of_python_name_what_there_is(page):
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("geomon"):
                module = importlib.import_module(str(node.module))
                assert all(hasattr(module, name.name) for name in node.names), block


def test_the_metrics_are_counted():
    count = len(METRICS | MORE_METRICS)
    for page in (README, (ROOT / "CHANGELOG.md").read_text()):
        assert f"{count} metrics, {len(METRICS)} " in page


def test_every_option_has_a_line_on_its_page():
    text = (ROOT / "docs" / "options.md").read_text()
    named = {name for row in re.findall(r"^\|(.*?)\|", text, re.MULTILINE)
             for name in re.findall(r"`(\w+)`", row)}  # fmt: skip
    assert named == set(CALLBACK_DEFAULTS)


@of_pages
def test_every_link_and_every_program_of_a_page_is_there(page):
    text = page.read_text()
    for target, _, place in re.findall(r"\]\((?!http)([^)#]*)(#([^)]+))?\)", text):
        linked = (page.parent / target) if target else page
        assert linked.exists(), target
        if place:
            heads = re.findall(r"^#+ (.*)$", linked.read_text(), flags=re.MULTILINE)
            kept = [re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads]
            assert place in kept, (target, place)
    for name in re.findall(r"-m ((?:benchmarks|recipes)\.[\w.]*\w)", text):
        file = ROOT / name.replace(".", "/")
        assert file.with_suffix(".py").exists() or (file / "__main__.py").exists(), name


def test_the_cost_of_a_reading_is_that_of_its_page():
    page = (ROOT / "docs" / "cost.md").read_text()
    found: dict[int, list[float]] = {}
    rows = re.findall(r"^\| .*, width (\d+), context \d+ \|(.*)\|$", page, flags=re.MULTILINE)
    for width, steps in rows:
        found.setdefault(int(width), []).extend(map(float, re.findall(r"\d+\.\d+", steps)))
    section = README.split("## What it costs")[1].split("\n## ")[0]
    assert set(found) == set(map(int, re.findall(r"at width (\d+)", section))) != set()
    for width, steps in found.items():
        low, high = min(steps), max(steps)
        said = f"{low}" if low == high else f"{low} to {high}"
        assert re.search(rf"\b{said}( training steps .*)? at (width )?{width}\b", README), width


def test_the_claims_are_counted_as_on_their_page():
    page = (ROOT / "docs" / "claims.md").read_text()
    (row,) = re.findall(r"^\| \*\*all\*\* \|(.*)\|$", page, flags=re.MULTILINE)
    count, agree, disagree, undecided, _ = map(int, row.split("|"))
    assert count == agree + disagree + undecided
    of_decoder = sum(map(int, re.findall(r"^- `make decoder`: (\d+) lines", page, re.MULTILINE)))
    assert f"{of_decoder} assertions" in (ROOT / "recipes/decoder/README.md").read_text()


def test_what_is_described_is_what_describe_says():
    pages = README + (ROOT / "docs" / "describe.md").read_text()
    for model in described().values():
        assert str(describe(model)) in pages
