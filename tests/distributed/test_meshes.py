"""Tensor, pipeline and sequence parallel trainings, and their meshes, are read like one process.

The programs are in `tests/support/ranks`. `python -m benchmarks.meshes` runs the whole matrix.
"""

import pytest

from support.ranks.launch import Program, launcher
from support.ranks.mesh_places import places, slices
from support.ranks.meshes import cells, dies, other_attentions, page, parts, probes, slow

PREPARATION = """
import contextlib
import support.ranks.launch, support.ranks.meshes
with contextlib.suppress(ImportError):
    from transformers import LlamaForCausalLM
"""
FOUR = Program((cells, other_attentions, page, places, slices, probes, parts))
TWO = {"slow": Program((slow,)), "dies": Program((dies,), loses_ranks=True)}


@pytest.fixture(scope="module")
def run(forks, tmp_path_factory):
    yield from launcher(forks, PREPARATION, tmp_path_factory.mktemp("meshes"))


@pytest.mark.parametrize("name", [function.__name__ for function in FOUR.functions])
def test_four_ranks_that_share_out_a_model_read_it_whole(run, name):
    ended = run(FOUR, 4)
    assert ended.well[name] == 4, ended.said


@pytest.mark.parametrize("name", TWO)
def test_a_training_goes_on_or_ends_as_it_would_without(run, name):
    ended = run(TWO[name], 2)
    assert ended.well[name] == 2, ended.said
