from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geomon.record import FILE_NAME
from geomon.show.loading import name_runs

FOLDERS = st.lists(st.sampled_from("abc"), min_size=1, max_size=4).map("/".join)


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


@given(st.lists(FOLDERS, max_size=5))
def test_every_run_has_a_name_of_its_own(folders):
    names = name_runs(map(Path, folders))
    assert len(set(names)) == len(folders)
    for folder, name in zip(folders, names, strict=True):
        end = name.split(" (")[0]
        assert Path(folder).absolute().as_posix().endswith(end)
        assert ("(" in name) == (folders.count(folder) > 1)
