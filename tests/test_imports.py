"""The house: imports run one way, and nothing heavy happens at import."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# Lowest first; a module imports from its own floor or from floors below.
FLOORS = [
    {"kernels"},
    {
        "anatomy",
        "budget",
        "families",
        "masks",
        "neighbours",
        "projections",
        "ranks",
        "routes",
        "rows",
        "schedule",
        "settings",
        "tags",
        "switches",
        "worker",
    },
    {"agenda", "notes", "record", "phase"},
    {"layer", "attended", "passes", "room", "stacks"},
    {"metrics", "sinks", "assemble", "capture", "describe", "selfcheck", "probing", "union"},
    {"across", "gather"},
    {"evaluate"},
    {"together"},
    {"underway", "outlet"},
    {"background"},
    {"measuring"},
    {"monitor", "matrix", "still"},
    {"panels", "figures", "terminal", "summary"},
    {"pictures"},
    {"lightning", "huggingface", "cli"},
    {"recipes"},
]
FLOOR = {name: floor for floor, names in enumerate(FLOORS) for name in names}
SHOWING = ("panels", "figures", "terminal", "summary", "pictures", "cli")
OPTIONAL = ("lightning", "transformers", "tensorboard", "wandb", "matplotlib", "rich", "typer")

FILES = [path for path in (ROOT / "geomon").rglob("*.py") if path.name != "__init__.py"]


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            if node.module == "geomon":
                names |= {alias.name for alias in node.names}
            elif node.module.startswith("geomon."):
                names.add(node.module.split(".")[1])
    return names & FLOOR.keys()


def room(path: Path) -> str:
    return path.relative_to(ROOT / "geomon").parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_imports_run_one_way(path):
    floor = FLOOR[room(path)]
    above = {name for name in imported(path) if FLOOR[name] > floor}
    assert not above, f"{path.name} imports from above: {above}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_pages_read_the_record_and_know_nothing_of_models(path):
    if room(path) in SHOWING:
        assert not imported(path) & {"monitor", "capture", "anatomy", "layer", "evaluate"}
        assert "torch" not in path.read_text()


def test_kernels_import_only_kernels():
    for path in (ROOT / "geomon" / "kernels").glob("*.py"):
        assert imported(path) <= {"kernels"}


def test_no_room_for_everything():
    assert not {"utils", "base", "common", "helpers", "misc"} & {path.stem for path in FILES}


def test_importing_geomon_loads_nothing_optional_and_says_nothing():
    code = (
        "import sys, geomon; print(sorted({name.split('.')[0] for name in sys.modules} & "
        f"set({OPTIONAL!r})))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    assert done.stderr == ""
