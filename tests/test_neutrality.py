"""A quick part of the matrix that `python -m benchmarks.neutrality` runs whole."""

import pytest

from benchmarks.neutrality import CELLS, LOOPS, SETTINGS, WAYS_OUT, differences

# Each loop with each way out, and with each of what else goes on but for the slow compiler.
QUICK = [
    ("plain", "ctrl-c", "EMA copy"),
    ("plain", "sigterm", "generate in the window"),
    ("plain", "exception in forward", "default device"),
    ("plain", "exception in backward", "activation checkpointing"),
    ("plain", "normal", "autocast around all steps"),
    ("Lightning", "normal", "extra columns"),
    ("Lightning", "exception in loader", "checkpoint in the window"),
    ("Lightning", "exception in validation", "two monitors"),
    ("Trainer", "normal", "EMA copy"),
    ("Trainer", "exception in forward", "checkpoint in the window"),
    ("Trainer", "ctrl-c", "two monitors"),
    ("Trainer", "sigterm", "bf16 default dtype"),
    ("Trainer", "exception in loader", "extra columns"),
]


@pytest.mark.parametrize(("loop", "way_out", "setting"), QUICK)
def test_a_watched_training_is_its_unwatched_twin(loop, way_out, setting):
    assert differences(loop, way_out, setting) == []


def test_the_quick_part_has_each_loop_each_way_out_and_each_setting_once():
    assert set(QUICK) <= set(CELLS)
    loops, ways_out, settings = map(set, zip(*QUICK, strict=True))
    assert loops == set(LOOPS)
    assert ways_out == set(WAYS_OUT)
    # Compiled models have tests of their own, in capture/calling/test_compiled.py.
    assert settings == set(SETTINGS) - {"nothing else", "compile with dropout"}
