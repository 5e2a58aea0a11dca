"""The wheel as users install it: without extras, each place says which extra is missing."""

import json
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from test_imports import OPTIONAL

ROOT = Path(__file__).parent.parent

# Imports of the extras fail, as where they are not installed.
WITHOUT_EXTRAS = f"""
import sys
sys.path.insert(0, sys.argv[1])
sys.modules |= dict.fromkeys([*{OPTIONAL!r}, "pytorch_lightning"])
import geomon
assert geomon.__file__.startswith(sys.argv[1]), geomon.__file__
"""
# Code, and the extra that it needs.
NEEDS = {
    "import geomon.lightning": "lightning",
    "import geomon.huggingface": "huggingface",
    "from geomon.show import geometry_figure": "figures",
    "from geomon.show import view": "terminal",
    "import geomon.cli; geomon.cli.main()": "terminal",
    "geomon.TensorBoard('x')": "tensorboard",
    "geomon.WandB()": "wandb",
    "import geomon.show.charts": "wandb",
    "from geomon.show.report import render; render([])": "report",
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    build = "from setuptools.build_meta import build_wheel; import sys; build_wheel(sys.argv[1])"
    # Built of a copy: setuptools writes beside the sources.
    copy = folder / "source"
    names = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "geomon", "pyproject.toml", "README.md",
         "LICENSE", "recipes"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    for name in filter(lambda name: (ROOT / name).is_file(), names):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes((ROOT / name).read_bytes())
    subprocess.run(
        [sys.executable, "-c", build, str(folder)], cwd=copy, capture_output=True, check=True
    )
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


@pytest.fixture(scope="module")
def said(installed):
    """Try everything in one process, which takes seconds to start; return what each try said."""
    tries = f"""
import json
said = {{}}
for code in {list(NEEDS)!r}:
    try:
        exec(code)
    except (ImportError, SystemExit) as error:
        said[code] = str(error)
import torch
model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 2, batch_first=True), 2)
said["measured"] = geomon.measure(model.eval(), torch.randn(8, 32, 16))["anisotropy/mean"]
print(json.dumps(said))
"""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_EXTRAS + tries, str(installed)],
        cwd=installed, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_wheel_holds_every_file_of_the_package_and_nothing_else(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"geomon"}
    files = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "geomon").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert files <= names, files - names


def test_without_extras_it_measures(said):
    assert 0 < said["measured"] <= 1


@pytest.mark.parametrize(("code", "extra"), NEEDS.items())
def test_what_needs_an_extra_says_what_to_install(said, code, extra):
    """The message names the packages, since geomon itself may come from anywhere."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [re.match(r"[\w-]+", one)[0] for one in extras["optional-dependencies"][extra]]
    assert f"pip install {' '.join(names)}" in said[code]
