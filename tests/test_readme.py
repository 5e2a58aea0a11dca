"""What README says is run."""

import ast
import json
import re
import shlex
import shutil
import sys
import tomllib
from pathlib import Path

import pytest
import torch
import typer
from torch.utils.data import DataLoader

from geomon import METRICS, MORE_METRICS, Monitor, every, read
from geomon.cli import make_app
from support.models import VOCABULARY, transformer

ROOT = Path(__file__).parent.parent
FOLDERS = (".", "docs", "benchmarks", "recipes", "recipes/*")
PAGES = sorted(path for folder in FOLDERS for path in ROOT.glob(f"{folder}/*.md"))
README = (ROOT / "README.md").read_text()
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
INSTALLED = re.compile(r"^pip install '\S+\[(\S+)\]'$", flags=re.MULTILINE)
STEPS = (0, 4, 8)
# The training of the tutorial takes minutes, and the vocabulary of GPT-2 seconds.
SHORTER = {
    "tutorial.md": {", 500": ", 12", "step == 350": "step == 6", "every(20)": "every(8)"},
    "README.md": {
        "GPT2Config(": "GPT2Config(vocab_size=100, bos_token_id=None, eos_token_id=None, "
    },
}


def parameters(paths):
    return pytest.mark.parametrize("page", paths, ids=lambda page: str(page.relative_to(ROOT)))


def blocks(page, language):
    return [text for found, text in FENCE.findall(page.read_text()) if found == language]


of_pages = parameters(PAGES)
of_pages_in_python = parameters([page for page in PAGES if blocks(page, "python")])


def build():
    return transformer("gpt2")


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A folder with what pages name: the record of a run and checkpoints of another."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "run" / "checkpoints").mkdir(parents=True)
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    monitor = Monitor(model, directory=folder / "runs" / "a", schedule=every(4), tokens=256)
    for step in range(STEPS[-1] + 1):
        ids = torch.randint(0, VOCABULARY, (16, 32))
        with monitor(step):
            loss = model(input_ids=ids, labels=ids).loss
        if step in STEPS:
            torch.save(model.state_dict(), folder / "run" / "checkpoints" / f"step_{step}.ckpt")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    monitor.close()
    return folder


def shortened(block, page):
    """A block with a training of few steps or a small model."""
    for long, short in SHORTER.get(page.name, {}).items():
        block = block.replace(long, short)
    return block


@of_pages_in_python
def test_every_block_of_python_runs(page, trained, tmp_path, monkeypatch):
    """README's by themselves, others after those above them and with what they take as given."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    ids = torch.randint(0, VOCABULARY, (16, 32))
    batch = {"input_ids": ids, "labels": ids}
    loader = DataLoader([{name: rows[0] for name, rows in batch.items()}] * 32, batch_size=16)
    names = {"model": build(), "build": build, "batch": batch, "loader": loader}
    for step, block in enumerate(blocks(page, "python"), start=STEPS[-1] + 1):
        names = {} if page.name == "README.md" else names
        exec(compile(shortened(block, page), str(page), "exec"), names)
        if "monitor = " in block and "with monitor(" not in block:
            with names["monitor"](step, force=True):
                names["model"](**batch)
            names["monitor"].close()
            (readings,) = [
                readings
                for path in tmp_path.rglob("readings.jsonl")
                if (readings := read(path))[-1].step == step
            ]
            measured = {tag.split("/")[0] for tag in readings[-1].values}
            # The models have no experts, and the monitor has looked at their weights once.
            others = {"expert_load", "update_size", "unmoved"}
            assert measured >= set(readings.runs[-1]["metrics"]) - others
        if "wandb" in names:
            names["wandb"].finish()


@of_pages
def test_every_block_says_its_language(page):
    found = [language for language, _ in FENCE.findall(page.read_text())]
    assert set(found) <= {"bash", "json", "mermaid", "py", "python", "text", "yaml"}
    assert 2 * len(found) == len(re.findall("^ *```", page.read_text(), flags=re.MULTILINE))
    for block in blocks(page, "json"):
        json.loads(block)


@of_pages
def test_every_command_of_geomon_is_one_with_these_options(page, monkeypatch):
    group = typer.main.get_command(make_app())
    for line in "".join(blocks(page, "bash")).splitlines():
        name, *arguments = shlex.split(line.split(" > ")[0], comments=True) or [""]
        if name == "geomon" and arguments[0] != "--install-completion":
            command, *rest = arguments
            group.commands[command].make_context(command, rest)


@parameters([page for page in PAGES if INSTALLED.search(page.read_text())])
def test_blocks_import_what_the_page_installs(page):
    """An import of README failed with what README had installed."""
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = list(packages["dependencies"])
    for extras in INSTALLED.findall(page.read_text()):
        for extra in extras.split(","):
            needed += packages["optional-dependencies"][extra]
    there = {re.match(r"[\w-]+", each).group() for each in needed} | {"geomon"}
    for node in ast.walk(ast.parse("".join(blocks(page, "python")))):
        if isinstance(node, ast.Import):
            roots = {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            roots = {node.module.split(".")[0]}
        else:
            continue
        assert roots <= there | sys.stdlib_module_names, ast.unparse(node)


def test_the_metrics_are_counted():
    count = len(METRICS | MORE_METRICS)
    for page in (README, (ROOT / "CHANGELOG.md").read_text()):
        assert f"{count} metrics, {len(METRICS)} " in page


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


def rows_of(page):
    """The rows of all tables of a page."""
    lines = [line for line in page.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def share(cell):
    count, total = map(int, cell.split(" of "))
    return f"{100 * count / total:.0f} %"


def test_the_odds_are_those_of_their_page():
    page = (ROOT / "docs" / "warnings.md").read_text()
    rows, told = rows_of(page), {row[0]: row[1:] for row in rows_of(README)}
    unseen = {row[0]: row[2] for row in rows if row[1] == "50 steps"}
    plans = ["8 x 64 tokens", "32 x 128 tokens"]
    (first,) = [row for name, row in told.items() if name.startswith("16 kinds")]
    assert first == [*map(unseen.get, plans), unseen["every step"]]
    live = {(row[0], row[1]): row[2:] for row in rows if row[0].endswith(" tokens")}
    now = {row[0]: row[1] for row in rows if re.fullmatch(r"\d+ of \d+", row[1])}
    for kind, name, within in (
        ("silent", "other weights in one block of a decoder", 0),
        ("creeping", "faults that grow slowly, within 200 steps", 1),
    ):
        assert told[name][2] == now[kind]
        assert [*map(share, told[name][:2])] == [live[plan, kind][within] for plan in plans]
    short = {row[0]: row[1:] for row in rows if len(row) == 6}
    (loss, norm), (slow_loss, slow_norm) = (short[kind][:2] for kind in ("silent", "creeping"))
    words = " ".join(README.split())
    assert f"gradient norm noticed {norm} of the faults in one block and {slow_norm} of" in words
    assert f"the slow ones, the loss {loss} and {slow_loss}." in words


def test_the_claims_are_counted_as_on_their_page():
    page = (ROOT / "docs" / "claims.md").read_text()
    (row,) = re.findall(r"^\| \*\*all\*\* \|(.*)\|$", page, flags=re.MULTILINE)
    count, agree, disagree, undecided = map(int, row.split("|"))
    assert count == agree + disagree + undecided
    of_decoder = sum(map(int, re.findall(r"^- `make decoder`: (\d+) lines", page, re.MULTILINE)))
    assert f"{of_decoder} assertions" in (ROOT / "recipes/decoder/README.md").read_text()


def test_what_is_described_is_what_describe_says(capsys):
    page = ROOT / "docs" / "describe.md"
    (block,), (said,) = blocks(page, "python"), blocks(page, "text")
    exec(compile(block, str(page), "exec"), {})
    assert capsys.readouterr().out == said
