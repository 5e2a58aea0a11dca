"""Each metric has a formula and, if a kernel computes it, its function on the site."""

import importlib.util
from pathlib import Path

import pytest

from geomon import METRICS, MORE_METRICS

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def formulas():
    spec = importlib.util.spec_from_file_location("formulas", ROOT / "docs/site/formulas.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_metric_has_a_formula(formulas):
    assert formulas.FORMULAS.keys() == (METRICS | MORE_METRICS).keys()
    for formula in formulas.FORMULAS.values():
        assert formula.count("{") == formula.count("}")


def test_functions_behind_metrics_exist(formulas):
    assert formulas.FUNCTIONS.keys() <= formulas.FORMULAS.keys()
    for place in formulas.FUNCTIONS.values():
        module, _, name = place.partition(".")
        found = getattr(importlib.import_module(f"geomon.kernels.{module}"), name)
        assert found.__doc__


def test_the_pages_of_the_site_are_those_of_the_folder():
    listed = (ROOT / "mkdocs.yml").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert f": {page.name}\n" in listed or f"- {page.name}\n" in listed
