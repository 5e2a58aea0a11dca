"""The face of `geomon.show` imports its names on first use."""

import subprocess
import sys

import pytest

import geomon.show


@pytest.mark.parametrize("name", geomon.show.__all__)
def test_every_name_is_there(name):
    assert getattr(geomon.show, name).__name__ == name


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"'geomon\.show' has no attribute 'nothing'"):
        geomon.show.nothing  # noqa: B018


def test_importing_it_loads_nothing_optional():
    code = (
        "import sys; from geomon.show import Pictures; "
        "assert not {'matplotlib', 'rich', 'typer'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
