"""The house: folders import one way, through their faces, and nothing heavy happens at import."""

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "geomon"

# All the arrows that there are between folders.
ARROWS = {
    "capture": {"kernels"},
    "kernels": set(),
    "record": set(),
    "distributed": {"capture"},
    "metrics": {"kernels", "capture", "record"},
    "analysis": {"record"},
    "show": {"analysis", "record"},
    "monitor": {"metrics", "distributed", "capture", "record", "analysis"},
    "sweep": {"monitor", "metrics", "record"},
}
# Modules beside the folders that every folder imports: notes are data of all of them.
BESIDE = {"advice", "failures", "note", "note_kinds", "version"}
# What folders inside a folder import of the other parts of it. The files beside them import any.
INNER = {
    "capture": {
        "anatomy": {"weights"},
        "calling": {"modes", "private", "snapshot", "unchanged", "weights"},
        "tap": {"modes", "private", "shards", "storage"},
        "tokens": {"anatomy", "apart", "snapshot", "storage"},
        "attending": {
            "anatomy",
            "apart",
            "private",
            "shards",
            "snapshot",
            "storage",
            "tap",
            "tokens",
        },
    },
    "show": {
        "figures": {"collect", "colours", "panels"},
        "loggers": {"charts", "collect", "figures", "panels", "settings", "tables"},
        "report": {"charts", "collect", "colours", "panels", "settings"},
        "terminal": {"collect", "colours", "panels", "settings", "tables"},
    },
}
# Kernels are imported by module: a face would load the neighbour search with every one. So are the
# tags of a record, whose functions are called with the module's name.
BY_MODULE = {"kernels", "record.tags"}
# What the few with a narrower door import of a folder.
ONLY = {("capture", "kernels"): {"kernels.products", "kernels.additions"}}
# Folders whose faces are for users too (CONTRIBUTING.md).
PUBLIC = {"show", "sweep"}
OPTIONAL = (
    "lightning", "transformers", "tensorboard", "wandb", "matplotlib", "rich", "typer", "plotly",
    "pandas", "pyarrow", "plotext",
)  # fmt: skip

FILES = sorted(PACKAGE.rglob("*.py"))
USERS = [
    path for folder in ("recipes", "examples") for path in sorted((ROOT / folder).rglob("*.py"))
]


@functools.cache
def imports(path: Path) -> list[ast.Import | ast.ImportFrom]:
    """The import statements of a file, anywhere in it."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]


@functools.cache
def imported(path: Path) -> set[str]:
    """Modules of geomon that a file imports from, without the package's name."""
    names = set()
    for node in imports(path):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = PACKAGE.joinpath(*node.module.split(".")[1:], alias.name)
                is_module = inner.is_dir() or inner.with_suffix(".py").is_file()
                is_module = is_module and alias.name not in face(inner.parent)
                names.add(f"{node.module}.{alias.name}" if is_module else node.module)
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return {name.removeprefix("geomon.") for name in names if name.startswith("geomon.")}


@functools.cache
def face(directory: Path) -> list[str]:
    """Names that a folder's face hands on."""
    path = directory / "__init__.py"
    tree = ast.parse(path.read_text() if path.is_file() else "")
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return [ast.literal_eval(part) for part in node.value.elts]
    return []


def folder(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def label(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_every_folder_is_on_the_plan():
    assert {path.parent.name for path in PACKAGE.glob("*/__init__.py")} == ARROWS.keys()
    inner = {path.parent.relative_to(PACKAGE) for path in PACKAGE.glob("*/*/__init__.py")}
    assert inner == {Path(own) / name for own, parts in INNER.items() for name in parts}


@pytest.mark.parametrize("path", FILES, ids=label)
def test_folders_import_along_the_arrows_alone(path):
    own, *_ = parts = path.relative_to(PACKAGE).parts
    if own not in ARROWS:
        return
    others = {name.split(".")[0] for name in imported(path)} - {own, *BESIDE}
    assert others <= ARROWS[own], f"{own} imports from {others - ARROWS[own]}"
    for name in imported(path):
        allowed = ONLY.get((own, name.split(".")[0]))
        assert allowed is None or name in allowed, f"{own} imports {name}, not {allowed}"
    if len(parts) == 3:
        inside = {name for name in imported(path) if name.partition(".")[0] == own}
        assert own not in inside, f"{path.name} imports the face of its own folder"
        others = {name.split(".")[1] for name in inside} - {parts[1]}
        assert others <= INNER[own][parts[1]], f"{own}/{parts[1]} imports {others}"


@pytest.mark.parametrize("path", [*FILES, *USERS], ids=label)
def test_folders_are_entered_through_their_faces(path):
    own = folder(path) if path.is_relative_to(PACKAGE) else ""
    deep = {
        name
        for name in imported(path)
        if "." in name and not {name, name.split(".")[0]} & {own, *BY_MODULE}
    }
    assert not deep


@pytest.mark.parametrize("name", sorted(ARROWS.keys() - BY_MODULE - PUBLIC))
def test_a_face_has_the_names_that_others_use(name):
    used = {
        alias.name
        for path in [*FILES, *USERS, *sorted((ROOT / "tests").rglob("*.py"))]
        if not {PACKAGE / name, ROOT / "tests" / name} & {*path.parents}
        for node in imports(path)
        if isinstance(node, ast.ImportFrom) and node.module == f"geomon.{name}"
        for alias in node.names
    }
    assert not set(face(PACKAGE / name)) - used


@pytest.mark.parametrize("path", FILES, ids=label)
def test_pages_read_the_record_and_know_nothing_of_models(path):
    if folder(path) in ("show", "analysis", "record"):
        code = path.read_text()
        assert "import torch" not in code.replace("from torch.utils.tensorboard import", "")


def test_no_room_for_everything_and_no_folder_called_like_a_function():
    import geomon

    assert not {"utils", "base", "common", "helpers", "misc"} & {path.stem for path in FILES}
    assert not {name for name in ARROWS if callable(getattr(geomon, name, None))}


def test_importing_geomon_loads_nothing_optional_and_says_nothing():
    code = (
        "import sys, geomon, geomon.cli, geomon.show; "
        "print(sorted({name.split('.')[0] for name in sys.modules} & "
        f"set({OPTIONAL!r})))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    assert done.stderr == ""


def test_every_public_name_is_there_and_listed():
    import geomon

    assert set(geomon.__all__) <= set(dir(geomon))
    for name in geomon.__all__:
        assert getattr(geomon, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        geomon.nothing  # noqa: B018
