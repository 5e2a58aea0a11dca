"""What a monitor makes of a run; the same on many ranks: support/ranks/whole_runs.py."""

import pytest

from support.scenario_list import SCENARIOS
from support.scenarios import check


@pytest.mark.parametrize("name", SCENARIOS)
def test_what_comes_of_a_run(tmp_path, caplog, name):
    check(SCENARIOS[name], tmp_path, caplog)
