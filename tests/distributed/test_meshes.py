"""Tensor, pipeline and sequence parallel trainings, and their meshes, read like one process.

The programs are in `mesh_runs.py`. `python -m benchmarks.meshes` runs the whole matrix.
"""

from functools import partial

import pytest

from support.mesh_runs import FOUR
from support.on_ranks import runner

PREPARATION = """
import contextlib
import torch._dynamo
from support import mesh_runs
with contextlib.suppress(ImportError):
    from transformers import LlamaForCausalLM
"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    folder = tmp_path_factory.mktemp("meshes")
    for run in runner("mesh_runs.py", PREPARATION):
        yield partial(run, folder)


@pytest.mark.parametrize("name", [function.__name__ for function in FOUR])
def test_four_ranks_that_share_out_a_model_read_it_whole(ran, name):
    ended = ran("four", 4)
    assert ended.well[name] == 4, ended.said


@pytest.mark.parametrize("name", ["slow", "dies"])
def test_a_training_goes_on_or_ends_as_it_would_without(ran, name):
    ended = ran(name, 2)
    assert ended.well[name] == 2, ended.said
