import importlib
import sysconfig
from pathlib import Path

import pytest

from recipes.enwik8 import builtin_text as module
from recipes.enwik8.builtin_text import builtin_text


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


def test_order_is_fixed_and_nothing_is_imported(library: Path) -> None:
    _write(library / "b.py", '"""Module b."""\nraise RuntimeError("imported")\n')
    _write(library / "a.py", '"""Module a.\n\n    Indented.\n    """\ndef f():\n    "In f."\n')
    _write(library / "package" / "c.py", 'class C:\n    """In C."""\n    def g(self):\n        1\n')
    assert _fresh() == b"Module a.\n\nIndented.\n\n\nIn f.\n\n\nModule b.\n\n\nIn C."


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
