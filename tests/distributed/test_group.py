"""Several processes that train together: what they read is what one process would, or is refused.

The programs are in `rank_runs.py`; each is started once on every rank, with a hard limit of time.
"""

import functools
import math
import os
import signal
import socket
import subprocess
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from forks import Forks
from rank_runs import LAYERS, STEPS, STRATEGIES, resumed

from geomon import read
from geomon.distributed import RankGroup

PROGRAM = Path(__file__).parent.parent / "rank_runs.py"
LIMIT = 300.0  # seconds: a hang is a failure
LONGER = 400.0  # where Lightning is imported
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def together(folder):
    """Runs a program on every rank; what each found, in rank order."""
    forks = Forks(PREPARATION)
    yield partial(_together, forks, folder)
    forks.close()


def _together(
    forks: Forks, folder: Path, which: str, size: int, *, limit: float = LIMIT
) -> list[dict]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size), "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "test",
    }  # fmt: skip
    logs = [folder / f"{which}_{size}_{rank}.log" for rank in range(size)]
    processes = []
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
        until = time.monotonic() + limit
        codes = [process.wait(max(0.1, until - time.monotonic())) for process in processes]
    except subprocess.TimeoutExpired:
        codes = [None]
    finally:
        for process in processes:
            process.send_signal(signal.SIGKILL)
    said = "\n".join(f"{log.name}:\n{log.read_text()[-2000:]}" for log in logs)
    assert codes == [0] * size, said
    return [
        torch.load(folder / f"{which}_{size}_{rank}.pt", weights_only=False) for rank in range(size)
    ]


@pytest.fixture(scope="module")
def found_on(together):
    """What a number of ranks found, by rank, then by the name of the run; started once."""
    return functools.cache(lambda size: together("together" if size > 1 else "alone", size))


@pytest.fixture(scope="module", params=[2, 4], ids=["2 ranks", "4 ranks"])
def found(request, found_on):
    """Everything that one start on several ranks gives."""
    return found_on(request.param)


def largest_difference(values, others) -> float:
    assert values.keys() == others.keys()
    differences = [
        0.0
        if math.isnan(values[tag]) and math.isnan(others[tag])
        else abs(values[tag] - others[tag])
        for tag in values
    ]
    return max(differences)  # NaN against a number is NaN, and no bound


def relative_difference(values, others) -> float:
    assert values.keys() == others.keys()
    pairs = [(values[tag], others[tag]) for tag in values if math.isfinite(others[tag])]
    return max(abs(one - other) / max(abs(other), 1e-3) for one, other in pairs)


@pytest.mark.parametrize("case", ["all rows", "some rows", "an empty rank", "an empty first rank"])
def test_a_reading_is_that_of_one_process_on_the_rows_of_all_ranks(found, case):
    here = found[0]["ragged_readings"][case]
    gathered, expected = here["gathered"], here["one process"]
    if case == "some rows" and len(found) == 4:  # of the attention some sequences, as one would
        gathered, expected = (
            {tag: v for tag, v in values.items() if not tag.startswith("attention")}
            for values in (gathered, expected)
        )
    assert sum(map(math.isfinite, gathered.values())) > 250
    assert largest_difference(gathered, expected) == 0
    assert here["tokens"] == here["rows of all"]


def test_of_ranks_with_the_same_tokens_the_first_is_read_and_it_is_said(found):
    here = found[0]["same_tokens"]
    assert largest_difference(here["gathered"], here["one process"]) == 0
    (note,) = [note for note in here["notes"] if "had the same tokens as rank 0" in note]
    assert ("and 2 other ranks alike" in note) == (len(found) == 4)


def test_one_two_and_four_ranks_read_the_same(found, alone):
    assert largest_difference(found[0]["same_rows"]["rows"], alone["same_rows"]["rows"]) == 0
    arrays = found[0]["same_rows"]["arrays"]
    assert len(arrays) == 5 * 6
    assert arrays == alone["same_rows"]["arrays"]
    # A batch that is split over ranks is drawn in another order: rounding, and no more; some
    # margins are computed in float32. Of equal rows the first stands for all, and with the
    # order the half in which it is.
    split, whole = (run["same_rows"]["batch"] for run in (found[0], alone))
    margins = {tag for tag in whole if tag.endswith("/margin")}
    near = {tag for tag in margins if tag.startswith(("twonn", "gride"))}
    rounded = margins - near
    for tags, bound in ((whole.keys() - near - rounded, 1e-9), (rounded, 1e-3)):
        values, others = ({tag: values[tag] for tag in tags} for values in (split, whole))
        assert relative_difference(values, others) < bound
    assert split.keys() == whole.keys()


@pytest.fixture(scope="module")
def alone(found_on):
    """The runs that one process can do as well."""
    return found_on(1)[0]


def test_a_probe_is_the_first_ranks_and_the_same_on_any_number_of_ranks(found):
    here = found[0]["probes"]
    assert largest_difference(here["probe"], here["alone"]) == 0
    assert largest_difference(here["own"], here["alone"]) == 0
    assert [note for note in here["notes"] if "different inputs" in note] == [
        "the ranks probe with different inputs: rank 0's were measured"
    ]
    assert all(largest_difference(r["probes"]["alone"], here["alone"]) == 0 for r in found)


def test_readings_of_a_probe_are_compared_on_the_first_rank(found):
    """Layers are measured on several ranks; of each the neighbours of two readings meet."""
    name, values = "neighbour_overlap_in_time", found[0]["probes"]["later"]
    assert not any(tag.startswith(name) for tag in found[0]["probes"]["probe"])
    assert [values[f"{name}/layer_{layer:02d}"] for layer in (0, 1)] == [1, 1]
    assert all(0.3 < values[f"{name}/layer_{layer:02d}"] < 1 for layer in (2, 3))
    assert {values[f"{name}/layer_{layer:02d}/steps"] for layer in range(4)} == {4}


def test_without_gathering_the_first_rank_reads_alone(found):
    here = found[0]["not_gathered"]
    assert len(here["readings"]) == 2
    assert largest_difference(here["readings"][0], here["one process"]) == 0


def test_a_failure_on_one_rank_is_said_and_ends_nothing(found):
    here, last = found[0]["failures"], len(found) - 1
    assert here["steps"] == [0, 3, 4]  # 1 and 2 had no window on one rank
    for values in here["values"]:
        for layer in range(LAYERS + 1):
            fails = layer % len(found) == 1  # the second rank's layers
            assert math.isnan(values[f"fragile/layer_{layer:02d}"]) == fails
            assert math.isfinite(values[f"variance/layer_{layer:02d}"])
    assert all(any("by design" in note for note in notes) for notes in here["notes"])
    said = [m for m in here["messages"] if "left out" in m and "padding" not in m]
    assert said[0] == f"a reading failed and is left out: rank {last}: OSError: no window here"
    assert len(said) == 1
    # Other layers are found when the monitors are built: the first rank reads its own rows.
    assert here["uneven"] == 1
    assert any("rank 1 was built with other layers than rank 0" in m for m in here["messages"])
    assert [bool(rank["failures"]["raised"]) for rank in found] == [True, True, False, False][
        : last + 1
    ]
    assert all(not rank["failures"]["messages"] for rank in found[1:])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_reads_right_and_trains_as_without(found, strategy):
    assert all(rank["strategies"][strategy]["bit-identical"] for rank in found)
    here = found[0]["strategies"][strategy]
    assert here["steps"] == list(range(STEPS + 1))
    assert here["layers"] == [f"blocks.{index}" for index in range(LAYERS)]
    assert largest_difference(here["gathered"], here["one process"]) == 0
    first = found[0]["strategies"]["ddp"]["values"][0]
    assert largest_difference(here["values"][0], first) == 0


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_probes_at_any_point_of_a_step_leave_the_training_as_it_is(found_on, strategy):
    found = found_on(2)
    assert all(rank["probed_anywhere"][strategy] for rank in found)
    assert found[0]["probed_anywhere"][f"{strategy} readings"] == 12


def test_a_run_goes_on_with_another_number_of_ranks(found_on, folder):
    """Two ranks, then four, then one; each goes two steps back, as from a checkpoint."""
    found = {size: found_on(size) for size in (2, 4)}
    resumed(RankGroup(), folder)
    record = read(folder / "resumed")
    assert [r.step for r in record] == list(range(15))
    assert [r.world_size for r in record] == [2] * 5 + [4] * 5 + [1] * 5
    assert [(run["world_size"], run["from_step"]) for run in record.runs] == [
        (2, 0),
        (4, 3),
        (1, 8),
    ]
    for size, steps in ((2, 5), (4, 7)):
        for rank in found[size]:
            # Every rank knows what the record holds.
            assert rank["resumed"]["passes"] == [False] * (steps - 5) + [True] * 5


def test_ranks_that_are_lost_end_the_gathering_and_not_the_run(together):
    first, second = together("lost", 2)
    for name in ("asleep", "dead"):
        here = first["lost"][name]
        assert here["steps"] == [0, 1, 3]  # the reading that was under way is left out
        assert here["own rows"] == [False, False, True]
        (message,) = [m for m in here["messages"] if "lost the other ranks" in m]
        assert "rank 0 goes on with its own" in message
        assert here["seconds"] < 60  # of the ten minutes that are allowed where nobody says
    assert second["lost"]["asleep"]["steps"] == []
    assert any("rank 1 lost the other ranks" in m for m in second["lost"]["asleep"]["messages"])


def test_ranks_that_do_not_keep_step_go_on_and_meet_again(together):
    first, second = together("irregular", 2)
    here, there = first["irregular"], second["irregular"]
    # A window that one rank missed costs that reading. That rank owes it and is ahead at step 3,
    # where it waits; they meet at step 4.
    assert here["misses"]["steps"] == [0, 4, 6]
    (message,) = [m for m in here["misses"]["messages"] if "a reading failed" in m]
    assert "rank 1 reads step 3 where rank 0 reads step 2" in message
    assert here["misses"]["waited"] > 1  # the other rank is slow at step 4
    # Options are compared when the monitors are built: then nothing is exchanged.
    assert here["schedule"]["steps"] == [0, 2, 4, 6]
    (note,) = {n for notes in here["schedule"]["notes"] for n in notes if "not gathered" in n}
    assert "rank 1 was built with other schedule than rank 0" in note
    assert all(not rank["steps"] for rank in there.values())
    assert all(rank["waited"] < 15 for rank in (*here.values(), *there.values()))


def test_by_default_gathering_ranks_have_a_budget_that_the_first_one_keeps_for_all(together):
    first, second = (rank["budgeted"] for rank in together("budgeted", 2))
    assert first["steps"][:8] == list(range(8))
    assert first["passes"] == second["passes"] == first["steps"]
    assert len(first["steps"]) == 8 or first["overhead"] < 0.06
    assert len(first["steps"]) < 500
    assert not second["steps"]


def test_ctrl_c_does_not_wait_for_the_other_ranks(together):
    first, _ = together("interrupted", 2)
    assert first["interrupted"]["seconds"] < 20  # of 25
    assert first["interrupted"]["hooks"] == 0


def test_lightnings_strategies(together):
    pytest.importorskip("lightning")
    found = [rank["lightning"] for rank in together("lightning", 2, limit=LONGER)]
    names = [name for name in found[0] if name.startswith(("ddp", "fsdp2"))]
    assert len(names) == 7
    for name in names:
        assert all(rank[name]["bit-identical"] for rank in found), name
        assert not found[1][name]["steps"]
        assert found[0][name]["steps"] == [0, 1, 2, *([] if name.endswith("inline") else [3])]
    for source in ("inline", "probe"):
        ddp, fsdp2 = found[0][f"ddp {source}"], found[0][f"fsdp2 {source}"]
        assert ddp["tokens"] == fsdp2["tokens"]
        assert largest_difference(ddp["values"][0], fsdp2["values"][0]) == 0
    for name, source in (("ddp", "validation"), ("fsdp2", "validation"), ("ddp", "loader")):
        tokens, mean = found[0][f"tokens of {source}"]
        read = found[0][f"{name} {source}"]
        assert read["tokens"] == [tokens] * 4
        assert [each["ids/layer_01"] for each in read["values"]] == pytest.approx([mean] * 4)
        assert read["losses"][:3] == found[0][f"{name} inline"]["losses"]


def test_the_trainers_validation_data_are_shared_by_its_ranks(together):
    pytest.importorskip("transformers")
    found = [rank["trainer"] for rank in together("trainer", 2, limit=LONGER)]
    for rank in found:
        plain, watched = rank["plain"], rank["validation"]
        assert all(map(torch.equal, watched["end"], plain["end"]))
        assert watched["trained"] == plain["trained"]
        assert watched["evaluated"] == plain["evaluated"]
        assert len(plain["evaluated"]) == 2
    assert found[1]["validation"]["steps"] == []
    first = found[0]["validation"]
    tokens, mean = found[0]["tokens of validation"]
    assert first["steps"] == [0, 2, 4]
    assert first["tokens"] == [tokens] * 3
    assert [values["ids/layer_01"] for values in first["values"]] == pytest.approx([mean] * 3)
    assert first["losses"][:2] == first["trained"][0::2]
    # Both ranks' batches, at the steps at which the Trainer evaluates them too.
    assert first["probed"][1:] == pytest.approx(first["evaluated"], rel=1e-5)
