"""Several processes that train together: what they read is what one process would, or is refused.

The programs are in `rank_runs.py`; each is started once on every rank, with a hard limit of time.
"""

import functools
import os
import signal
import socket
import subprocess
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
from forks import Forks
from rank_runs import TOGETHER, resumed

from geomon import read
from geomon.distributed import RankGroup

PROGRAM = Path(__file__).parent.parent / "rank_runs.py"
LIMIT = 400.0  # seconds: a hang is a failure
# Lightning itself is not among them: it keeps the rank that it finds when it is imported.
PREPARATION = """
import contextlib
import torch._dynamo, torch.distributed.checkpoint.state_dict, torch.distributed.fsdp
import torch.distributed.tensor.parallel
import rank_runs
with contextlib.suppress(ImportError):
    import torchmetrics
    import geomon.huggingface
    from transformers import Trainer
"""


class Ended(NamedTuple):
    """How a program has ended: on how many ranks each of its functions did well, and its output."""

    well: Counter[str]
    said: str


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def ran(folder):
    """Runs a program on a number of ranks, once; returns how it has ended."""
    forks = Forks(PREPARATION)
    yield functools.cache(partial(_run, forks, folder))
    forks.close()


def _run(forks: Forks, folder: Path, which: str, size: int) -> Ended:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size), "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "test",
    }  # fmt: skip
    logs = [folder / f"{which}_{size}_{rank}.log" for rank in range(size)]
    processes = []
    until = time.monotonic() + LIMIT
    try:
        for rank, log in enumerate(logs):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            with log.open("w") as output:
                processes.append(
                    forks.start(
                        str(PROGRAM), which, folder, environment=os.environ | shared | own,
                        stdout=output.fileno(), stderr=output.fileno(),
                    )
                )  # fmt: skip
        # What one rank has met lets the others wait for it in vain.
        while any(process.is_running() for process in processes) and time.monotonic() < until:
            if any(not process.is_running() and process.wait(1) for process in processes):
                break
            time.sleep(0.05)
    except subprocess.TimeoutExpired:
        pass
    finally:
        for process in processes:
            process.send_signal(signal.SIGKILL)
    done = [path.read_text().split() for path in folder.glob(f"{which}_{size}_*.txt")]
    said = "\n".join(f"{log.name}:\n{log.read_text()[-2000:]}" for log in logs)
    return Ended(Counter(name for names in done for name in names), said)


@pytest.mark.parametrize("size", [2, 4], ids=["2 ranks", "4 ranks"])
@pytest.mark.parametrize("name", [function.__name__ for function in TOGETHER])
def test_ranks_together_read_what_one_process_would(ran, name, size):
    ended = ran("together", size)
    assert ended.well[name] == size, ended.said


@pytest.mark.parametrize(
    "name", ["lost", "irregular", "budgeted", "interrupted", "lightning", "trainer"]
)
def test_two_ranks_are_left_to_themselves_and_read_right(ran, name):
    pytest.importorskip({"trainer": "transformers", "lightning": "lightning"}.get(name, "torch"))
    ended = ran(name, 2)
    assert ended.well[name] == 2, ended.said


def test_a_run_goes_on_with_another_number_of_ranks(ran, folder):
    """Two ranks, then four, then one; each goes two steps back, as from a checkpoint."""
    for size in (2, 4):
        assert ran("together", size).well["resumed"] == size
    resumed(RankGroup(), folder)
    record = read(folder / "resumed")
    assert [r.step for r in record] == list(range(15))
    assert [r.world_size for r in record] == [2] * 5 + [4] * 5 + [1] * 5
    assert [(run["world_size"], run["from_step"]) for run in record.runs] == [
        (2, 0), (4, 3), (1, 8),
    ]  # fmt: skip
