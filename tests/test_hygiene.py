"""Habits of the house that a reader relies on."""

import ast
import importlib
import inspect
import pkgutil
import re
import subprocess
from pathlib import Path

import pytest

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
    text = inspect.getdoc(kernel) or ""
    assert "Args:" in text
    for name in inspect.signature(kernel).parameters:
        assert re.search(rf"^\s+{name}: ", text, flags=re.MULTILINE), name


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_nothing_happens_at_import_and_only_commands_print(path):
    tree = ast.parse(path.read_text())
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call)]
    printed = [n for n in calls if getattr(n.func, "id", "") == "print"]
    assert not printed
    for node in tree.body:
        if isinstance(node, ast.Expr):
            assert isinstance(node.value, ast.Constant), f"line {node.lineno} does something"


def test_no_path_of_a_machine_is_in_the_project():
    names = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.split()
    assert names
    pattern = re.compile(r"(?<![\w.])/(work|root|home|tmp|Users)/\w")
    for name in names:
        content = (ROOT / name).read_bytes()
        if b"\0" not in content and name != "LICENSE":
            found = pattern.search(content.decode())
            assert not found or name == "tests/test_hygiene.py", f"{name}: {found}"


def test_the_packages_hold_modules_alone():
    """Five records of a benchmark stood there once: the default folder is called geomon."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "geomon", "recipes"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    ).stdout.split()  # fmt: skip
    kinds = {name for name in listed if not name.endswith((".py", "/README.md"))}
    page = {f"geomon/show/report/page.{kind}" for kind in ("html", "css", "js")}
    assert kinds == {"geomon/py.typed", *page}


def test_dependencies_say_why():
    text = (ROOT / "pyproject.toml").read_text()
    for line in re.findall(r'^    "[a-z-]+>=[\d.]+".*$', text, flags=re.MULTILINE):
        assert "#" in line, line


def test_faults_are_looked_for_by_tests_that_are_there():
    named = re.findall(r'"([a-z_/]*test_[a-z_]+\.py)"', (ROOT / "benchmarks/faults.py").read_text())
    missing = {
        name for name in named if not (ROOT / "tests" / name.removeprefix("tests/")).exists()
    }
    assert named
    assert not missing


def test_faults_are_planted_in_every_folder():
    """Those inside show/, half of its code, and sweep/ were left out for a while."""
    code = (ROOT / "benchmarks/faults.py").read_text()
    planted = set(re.findall(r'"(geomon[a-z/_]*)": \[', code))
    folders = {path.parent.relative_to(ROOT).as_posix() for path in SOURCES}
    assert planted == folders
