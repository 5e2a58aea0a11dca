"""Several processes that train together: what they read is what one process would, or is refused.

The programs are in `rank_runs.py`; each is started once on every rank, with a hard limit of time.
"""

from functools import partial

import pytest

from geomon import read
from geomon.distributed import RankGroup
from support.on_ranks import runner
from support.rank_runs import TOGETHER, resumed

# Lightning itself is not among them: it keeps the rank that it finds when it is imported.
PREPARATION = """
import contextlib
import torch._dynamo, torch.distributed.checkpoint.state_dict, torch.distributed.fsdp
import torch.distributed.tensor.parallel
from support import rank_runs
with contextlib.suppress(ImportError):
    import torchmetrics
    import geomon.huggingface
    from transformers import Trainer
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def ran(folder):
    for run in runner("rank_runs.py", PREPARATION):
        yield partial(run, folder)


@pytest.mark.parametrize("size", [2, 4], ids=["2 ranks", "4 ranks"])
@pytest.mark.parametrize("name", [function.__name__ for function in TOGETHER])
def test_ranks_together_read_what_one_process_would(ran, name, size):
    ended = ran("together", size)
    assert ended.well[name] == size, ended.said


@pytest.mark.parametrize("name", ["lost", "interrupted", "lightning", "trainer"])
def test_two_ranks_are_left_to_themselves_and_read_right(ran, name):
    pytest.importorskip({"trainer": "transformers", "lightning": "lightning"}.get(name, "torch"))
    ended = ran(name, 2)
    assert ended.well[name] == 2, ended.said


def test_a_rank_that_gives_up_leaves_no_other_waiting(ran):
    ended = ran("told", 4)
    assert ended.well["told"] == 4, ended.said


def test_a_run_goes_on_with_another_number_of_ranks(ran, folder):
    """Two ranks, then four, then one; each goes two steps back, as from a checkpoint."""
    for size in (2, 4):
        ended = ran("resumed", size)
        assert ended.well["resumed"] == size, ended.said
    resumed(RankGroup(), folder)
    record = read(folder / "resumed")
    assert [r.step for r in record] == list(range(15))
    assert [r.world_size for r in record] == [2] * 3 + [4] * 5 + [1] * 7
    assert [r.step for r in record.abandoned] == [3, 4, 8, 9]
    starts = [(run["world_size"], run["from_step"], run.get("rewound_to")) for run in record.runs]
    assert starts == [(2, 0, None), (4, 3, 3), (1, 8, 8)]
