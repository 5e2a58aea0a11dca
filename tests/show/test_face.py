"""The face of `geomon.show`, names of runs, and a run in a notebook."""

import subprocess
import sys
from html import escape
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import geomon
import geomon.show
from geomon.record import FILE_NAME, Readings
from geomon.show.loading import name_runs


def test_names_are_imported_on_first_use_and_load_nothing_optional():
    for name in geomon.show.__all__:
        assert getattr(geomon.show, name).__name__ == name
    with pytest.raises(AttributeError, match=r"'geomon\.show' has no attribute 'nothing'"):
        geomon.show.nothing  # noqa: B018
    code = (
        "import sys; from geomon.show import Pictures; "
        "assert not {'matplotlib', 'rich', 'typer'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_first_public_name_gives_readings_their_page(monkeypatch, make_readings):
    readings = make_readings()
    monkeypatch.setattr(Readings, "notebook_form", None)
    assert readings._repr_html_() == f"<p>{escape(repr(readings))}</p>"
    geomon.__getattr__("read")
    page = readings._repr_html_()
    assert "<img" in page
    assert "compressing, -0.4 ± 0.3 since step 1,024" in page
    assert "<img" not in Readings([], [])._repr_html_()


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        ([], []),
        (["r/seed_0", "r/seed_1"], ["seed_0", "seed_1"]),
        (["r/s0/few", f"r/s1/few/{FILE_NAME}"], ["s0/few", "s1/few"]),
        (["r/a", "r/a"], ["a (1)", "a (2)"]),
        # Of one folder twice and another of its name: the parents tell two of them apart.
        (["r/a", "q/a", "r/a"], ["r/a (1)", "q/a", "r/a (2)"]),
        (["/a", "/b/a"], ["/a", "b/a"]),
    ],
)
def test_names_are_as_short_as_tells_the_runs_apart(paths, names):
    assert name_runs(map(Path, paths)) == names


@given(st.lists(st.lists(st.sampled_from("abc"), min_size=1, max_size=4).map("/".join), max_size=5))
def test_every_run_has_a_name_of_its_own(folders):
    names = name_runs(map(Path, folders))
    assert len(set(names)) == len(folders)
    for folder, name in zip(folders, names, strict=True):
        assert Path(folder).absolute().as_posix().endswith(name.split(" (")[0])
        assert ("(" in name) == (folders.count(folder) > 1)
