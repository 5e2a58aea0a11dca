"""Tensor, pipeline and sequence parallel trainings, and their meshes, read like one process.

The programs are in `mesh_runs.py`. `python -m benchmarks.meshes` runs the whole matrix.
"""

import functools
from functools import partial
from pathlib import Path

import pytest
from forks import Forks
from mesh_runs import FOUR
from on_ranks import run_on_ranks

PREPARATION = """
import contextlib
import torch._dynamo, mesh_runs
with contextlib.suppress(ImportError):
    from transformers import LlamaForCausalLM
"""
PROGRAM = Path(__file__).parent.parent / "mesh_runs.py"


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Runs a program on a number of ranks, once; returns how it has ended."""
    forks = Forks(PREPARATION)
    folder = tmp_path_factory.mktemp("meshes")
    yield functools.cache(partial(run_on_ranks, forks, PROGRAM, folder))
    forks.close()


@pytest.mark.parametrize("name", [function.__name__ for function in FOUR])
def test_four_ranks_that_share_out_a_model_read_it_whole(ran, name):
    ended = ran("four", 4)
    assert ended.well[name] == 4, ended.said


@pytest.mark.parametrize("name", ["slow", "dies"])
def test_a_training_goes_on_or_ends_as_it_would_without(ran, name):
    ended = ran(name, 2)
    assert ended.well[name] == 2, ended.said
