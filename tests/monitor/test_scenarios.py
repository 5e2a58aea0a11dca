"""Scenarios of runs: readings, alerts, warnings; support/ranks/whole_runs.py has them on ranks."""

import pytest

from support.scenario_list import SCENARIOS
from support.scenarios import check


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_run_has_its_readings_alerts_and_warnings(tmp_path, caplog, name):
    check(SCENARIOS[name], tmp_path, caplog)
