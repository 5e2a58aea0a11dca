"""Habits of the house that a reader relies on."""

import ast
import importlib
import inspect
import pkgutil
import posixpath
import re
import subprocess
import tokenize
from collections import Counter
from collections.abc import Iterator
from logging import Logger
from pathlib import Path

import pytest

import geomon
import geomon.kernels

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "geomon").rglob("*.py"))

KERNELS = [
    function
    for module in pkgutil.iter_modules(geomon.kernels.__path__, "geomon.kernels.")
    for _, function in inspect.getmembers(importlib.import_module(module.name), inspect.isfunction)
    if function.__module__ == module.name and not function.__name__.startswith("_")
]


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.__name__)
def test_every_kernel_says_what_goes_in(kernel):
    """That it says so of each argument, ruff sees."""
    assert "Args:" in (inspect.getdoc(kernel) or "")


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_nothing_happens_at_import(path):
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Expr):
            assert isinstance(node.value, ast.Constant), f"line {node.lineno} does something"


def test_a_class_name_is_used_once():
    """The callbacks alone share theirs: a user imports one of them."""
    found = Counter(
        node.name
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    )
    assert {name for name, count in found.items() if count > 1} == {"GeometryMonitor"}


def listed(*folders: str) -> list[str]:
    """Paths of the files of the project that git keeps or would keep."""
    names = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *folders],
        cwd=ROOT, capture_output=True, text=True, check=False,
    ).stdout.split()  # fmt: skip
    return [name for name in names if (ROOT / name).is_file()]


def comments_and_docstrings(path: Path) -> Iterator[str]:
    """Yield what the file says of itself, without its code."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""
    with tokenize.open(path) as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type == tokenize.COMMENT:
                yield token.string


def prose(path: Path) -> Iterator[str]:
    """Yield the text of a page without its blocks of code, whose commands write files."""
    yield re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)


def unknown_files(text: str, folder: str, names: set[str]) -> list[str]:
    """List the modules and pages that a text names and that are in none of the folders.

    A file may be named by the end of its path, or from the folder in which the text stands.
    """
    named = re.findall(r"(?<![\w./*{<-])((?:[\w.-]+/)*[\w-]+\.(?:py|md))\b(?![\w(])", text)
    return [
        name
        for name in named
        if posixpath.normpath(posixpath.join(folder, name)) not in names
        and not any(f"/{known}".endswith(f"/{name}") for known in names)
    ]


def test_modules_and_pages_that_are_named_are_there():
    names = set(listed())
    assert names
    missing = {}
    for name in names:
        read = {".py": comments_and_docstrings, ".md": prose}.get(Path(name).suffix)
        folder = posixpath.dirname(name)
        # The whole text first: to parse it takes ten times as long.
        if read is not None and unknown_files((ROOT / name).read_text(), folder, names):
            missing[name] = unknown_files("\n".join(read(ROOT / name)), folder, names)
    assert {name: found for name, found in missing.items() if found} == {}


@pytest.mark.parametrize(
    ("text", "unknown"),
    [
        ("see `b.py`, a/b.py, page.md and ../docs/page.md", []),
        ("see gone.py and a/gone.md.", ["gone.py", "a/gone.md"]),
        ("x/b.py ../page.md", ["x/b.py", "../page.md"]),
        ("test_*.py, b.pyc, <name>.py and page.mdx are none", []),
    ],
)
def test_a_file_is_named_by_the_end_of_its_path(text, unknown):
    assert unknown_files(text, "a", {"a/b.py", "docs/page.md"}) == unknown


def test_no_path_of_a_machine_is_in_the_project():
    names = listed()
    assert names
    pattern = re.compile(r"(?<![\w.])/(work|root|home|tmp|Users)/\w")
    for name in names:
        content = (ROOT / name).read_bytes()
        if b"\0" not in content and name != "LICENSE":
            found = pattern.search(content.decode())
            assert not found or name == "tests/test_hygiene.py", f"{name}: {found}"


def test_no_folder_that_a_run_leaves_has_the_name_of_a_module_of_the_tests():
    """`make check` would take the folder for a package of the project after `make enwik8`."""
    left = {line.strip("/") for line in (ROOT / ".gitignore").read_text().split() if "/" in line}
    assert "runs" in left
    assert not left & {path.stem for path in (ROOT / "tests").rglob("*.py")}


def test_the_packages_hold_modules_alone():
    """Five records of a benchmark stood there once: the default folder is called geomon."""
    packaged = listed("geomon", "recipes")
    kinds = {name for name in packaged if not name.endswith((".py", "/README.md"))}
    page = {f"geomon/show/report/page.{kind}" for kind in ("html", "css")}
    assert kinds == {"geomon/py.typed", *page}


def test_dependencies_say_why():
    text = (ROOT / "pyproject.toml").read_text()
    for line in re.findall(r'^    "[a-z-]+>=[\d.]+".*$', text, flags=re.MULTILINE):
        assert "#" in line, line


def test_no_module_keeps_what_a_signal_handler_of_the_user_raises():
    """`geomon.failures` knows it; errors of all kinds are kept by its functions alone."""
    wide = re.compile(r"except (\(.*)?\bException\b|suppress\((Base)?Exception\)")
    package = Path(geomon.__file__).parent
    assert [str(path) for path in package.rglob("*.py") if wide.search(path.read_text())] == []


def test_all_that_is_said_is_said_by_one_logger():
    """Who quiets `geomon` quiets all of it."""
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in SOURCES]
    names = [name.removesuffix(".__init__") for name in names if "__main__" not in name]
    found = [vars(importlib.import_module(name)) for name in names]
    loggers = [value for each in found for value in each.values() if isinstance(value, Logger)]
    assert len(loggers) > 3
    assert {each.name.partition(".")[0] for each in loggers} == {"geomon"}
