"""Several processes that train together read what one process would, or refuse in words.

The programs are in `tests/support/ranks`; each is started once on every rank, with a hard limit of
time.
"""

import pytest

from geomon import read
from geomon.distributed import RankGroup
from support.ranks.launch import Program, launcher
from support.ranks.lost import interrupted, lost, told
from support.ranks.readings import probes, ragged_readings, same_tokens, split_batch
from support.ranks.strategies import strategies
from support.ranks.trainers import lightning, trainer
from support.ranks.whole_runs import resumed, scenarios

PREPARATION = """
import contextlib
import torch.distributed.checkpoint.state_dict, torch.distributed.fsdp
import torch.distributed.tensor.parallel
import support.ranks.launch, support.ranks.lost, support.ranks.readings, support.ranks.trainers
with contextlib.suppress(ImportError):
    import torchmetrics
    import geomon.huggingface
    from transformers import Trainer
with contextlib.suppress(ImportError):
    import lightning.pytorch
    import geomon.lightning, torch.utils.tensorboard, matplotlib.figure, benchmarks.mesh_models
"""
TOGETHER = Program((ragged_readings, same_tokens, split_batch, probes, scenarios, strategies))
ALONE = {
    "lost": Program((lost,), loses_ranks=True),
    "interrupted": Program((interrupted,)),
    "lightning": Program((lightning,), initialises=True),
    "trainer": Program((trainer,), initialises=True),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def run(forks, folder):
    yield from launcher(forks, PREPARATION, folder)


@pytest.mark.parametrize("size", [2, 4], ids=["2 ranks", "4 ranks"])
@pytest.mark.parametrize("name", [function.__name__ for function in TOGETHER.functions])
def test_ranks_together_read_what_one_process_would(run, name, size):
    ended = run(TOGETHER, size)
    assert ended.well[name] == size, ended.said


@pytest.mark.parametrize("name", ALONE)
def test_two_ranks_are_left_to_themselves_and_read_right(run, name):
    pytest.importorskip({"trainer": "transformers", "lightning": "lightning"}.get(name, "torch"))
    ended = run(ALONE[name], 2)
    assert ended.well[name] == 2, ended.said


def test_a_rank_that_gives_up_leaves_no_other_waiting(run):
    ended = run(Program((told,), loses_ranks=True), 4)
    assert ended.well["told"] == 4, ended.said


def test_a_run_goes_on_with_another_number_of_ranks(run, folder):
    """Two ranks, then four, then one; each goes two steps back, as from a checkpoint."""
    for size in (2, 4):
        ended = run(Program((resumed,)), size)
        assert ended.well["resumed"] == size, ended.said
    resumed(RankGroup(), folder)
    record = read(folder / "resumed")
    assert [r.step for r in record] == list(range(15))
    assert [r.world_size for r in record] == [2] * 3 + [4] * 5 + [1] * 7
    assert [r.step for r in record.abandoned] == [3, 4, 8, 9]
    starts = [(run["world_size"], run["from_step"], run.get("rewound_to")) for run in record.runs]
    assert starts == [(2, 0, None), (4, 3, 3), (1, 8, 8)]
