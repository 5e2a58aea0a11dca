import ast
import importlib
import platform
import sysconfig
from pathlib import Path

import pytest

from recipes.enwik8 import builtin_text as module
from recipes.enwik8.builtin_text import builtin_text

on_cpython_311 = pytest.mark.skipif(
    platform.python_implementation() != "CPython"
    or platform.python_version_tuple()[:2] != ("3", "11"),
    reason="the size is known for CPython 3.11 only",
)


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A standard library of the test's own, and no reference topics."""
    monkeypatch.setattr(sysconfig, "get_path", {"stdlib": str(tmp_path)}.__getitem__)
    monkeypatch.setattr(module, "_topics", list)
    return tmp_path


def _write(path: Path, content: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content, encoding="utf-8")


def _fresh() -> bytes:
    return builtin_text.__wrapped__()


@on_cpython_311
def test_enough_prose_for_a_run() -> None:
    text = builtin_text().decode()
    assert len(text.encode()) >= 2_000_000
    assert "Return an iterator" in text
    letters = sum(character.isalpha() or character.isspace() for character in text)
    assert letters / len(text) > 0.8


def test_repeated_calls_agree() -> None:
    assert builtin_text() == builtin_text()


def test_order_is_fixed_and_nothing_is_imported(library: Path) -> None:
    _write(library / "b.py", '"""Module b."""\nraise RuntimeError("imported")\n')
    _write(library / "a.py", '"""Module a.\n\n    Indented.\n    """\ndef f():\n    "In f."\n')
    _write(library / "package" / "c.py", 'class C:\n    """In C."""\n    def g(self):\n        1\n')
    assert _fresh() == b"Module a.\n\nIndented.\n\n\nIn f.\n\n\nModule b.\n\n\nIn C."


NESTED = """
class A:
    "A"
    def method(self):
        "method"
        async def inner():
            "inner"
for x in y:
    def in_for(): "in_for"
else:
    def in_for_else(): "in_for_else"
while x:
    def in_while(): "in_while"
else:
    def in_while_else(): "in_while_else"
if (lambda: 1)() if x else [lambda: 2 for x in y]:
    def in_if(): "in_if"
elif x:
    def in_elif(): "in_elif"
else:
    def in_else(): "in_else"
with x:
    def in_with(): "in_with"
try:
    def in_try(): "in_try"
except A:
    def in_except(): "in_except"
else:
    def in_try_else(): "in_try_else"
finally:
    def in_finally(): "in_finally"
try:
    pass
except* A:
    def in_except_star(): "in_except_star"
match x:
    case 1:
        def in_case(): "in_case"
    case _:
        def in_other_case(): "in_other_case"
async def coroutine():
    "coroutine"
    async for x in y:
        def in_async_for(): "in_async_for"
    async with x:
        def in_async_with(): "in_async_with"
"""


def test_definitions_are_found_in_every_statement_in_the_order_of_a_walk(library: Path) -> None:
    _write(library / "a.py", NESTED)
    definitions = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    names = [node.name for node in ast.walk(ast.parse(NESTED)) if isinstance(node, definitions)]
    assert len(names) == NESTED.count("def ") + 1
    assert _fresh().decode().split("\n\n\n") == names


def test_duplicates_tests_and_invalid_sources_are_left_out(library: Path) -> None:
    _write(library / "a.py", '"""Same."""\n')
    _write(library / "b.py", '"""Same."""\n')
    _write(library / "broken.py", "def def\n")
    _write(library / "escape.py", '"""Other \\d."""\n')
    for folder in ("test", "x/tests", "site-packages", "idlelib/idle_test"):
        _write(library / folder / "d.py", '"""Skipped."""\n')
    assert _fresh() == b"Same.\n\n\nOther \\d."


def test_works_without_reference_topics(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(sysconfig, "get_path", {"stdlib": str(tmp_path)}.__getitem__)
    _write(tmp_path / "a.py", '"""Module a."""\n')
    with_topics = _fresh()
    monkeypatch.setattr(importlib, "import_module", refuse)
    assert _fresh() == b"Module a."
    assert with_topics.endswith(b"Module a.")


def test_topics_come_in_order_of_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    class Topics:
        topics = {"b": "  Second.\n  Line.", "a": "First."}  # noqa: RUF012

    monkeypatch.setattr(importlib, "import_module", lambda _: Topics)
    assert module._topics() == ["First.", "Second.\nLine."]
