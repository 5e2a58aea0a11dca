"""One reading of several ranks: ragged batches, equal ones, a batch that is split, and probes."""

import math
from pathlib import Path

import pytest
import torch

from geomon import METRICS, measure, read, select
from geomon.distributed import RankGroup
from support.models import VOCABULARY
from support.ranks.one_process import (
    FEW,
    LAYERS,
    LENGTH,
    Decoder,
    assert_same,
    measured,
    monitor_of,
    one_process,
    ragged,
    rows_of_all,
    words,
)

MORE = select("effective_rank_last", "local_dimension")


def ragged_readings(ranks: RankGroup, folder: Path) -> None:
    """Every metric on ragged batches, all their rows or some; one rank with nothing but padding."""
    empty_ranks = (ranks.size - 1, 0) if ranks.size > 2 else (0,)
    for tokens, empty in ((400, None), (24, None), *((400, rank) for rank in empty_ranks)):
        model = Decoder()
        monitor, memory = monitor_of(model, metrics=METRICS, tokens=tokens, splits=2)
        ids, mask = ragged(ranks.rank, empty=empty)
        with monitor(0):
            model(ids, attention_mask=mask)
        if ranks.rank:
            continue
        (reading,) = memory.readings
        batches = [ragged(rank, empty=empty) for rank in range(ranks.size)]
        found = measured(reading)
        expected = one_process(model, batches, METRICS, step=0, tokens=tokens, most=2)
        if tokens == 24 and ranks.size == 4:  # of the attention some sequences, as one would
            found, expected = (
                {tag: v for tag, v in values.items() if not tag.startswith("attention")}
                for values in (found, expected)
            )
        assert sum(map(math.isfinite, found.values())) > 250
        assert_same(found, expected)
        assert reading.tokens == rows_of_all(batches, 2 * tokens)


def same_tokens(ranks: RankGroup, folder: Path) -> None:
    """All ranks get one batch, as in a pipeline: only the first is read, and a note says so."""
    model, (ids, mask) = Decoder(), ragged(0)
    monitor, memory = monitor_of(model, tokens=400)
    with monitor(0):
        model(ids, attention_mask=mask)
    if ranks.rank == 0:
        expected = one_process(model, [ragged(0)], FEW, step=0, tokens=400)
        assert_same(measured(memory.readings[0]), expected)
        (note,) = [note for note in words(memory) if "had the same tokens as rank 0" in note]
        assert ("and 2 other ranks alike" in note) == (ranks.size == 4)


def split_batch(ranks: RankGroup, folder: Path) -> None:
    """A batch that is split over ranks is read as one process reads it whole."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, VOCABULARY, (8, LENGTH), generator=generator)
    model, values, arrays = Decoder(), [], []
    for alone, given in ((False, ids.chunk(ranks.size)[ranks.rank]), (True, ids)):
        if alone and ranks.rank:
            return
        at = folder / f"split over {ranks.size}, {alone}"
        options = {"metrics": METRICS | MORE, "tokens": 400, "splits": 1, "gather": not alone}
        monitor, memory = monitor_of(model, directory=at, **options)
        with monitor(0):
            model(given, attention_mask=torch.ones_like(given, dtype=torch.bool))
        if ranks.rank == 0:
            values.append(measured(memory.readings[0]))
            arrays.append(read(at).arrays(0))
    # Rows are drawn in another order: rounding, and no more; some margins are computed in float32.
    # The first of several equal rows stands for all; the order decides in which half it is.
    split, whole = values
    margins = {tag for tag in whole if tag.endswith("/margin")}
    near = {tag for tag in margins if tag.startswith(("twonn", "gride", "local_dimension"))}
    assert split.keys() == whole.keys()
    for tags, bound in ((whole.keys() - margins, 1e-9), (margins - near, 1e-3)):
        assert_same(*({tag: run[tag] for tag in tags} for run in (split, whole)), within=bound)
    assert arrays[0].keys() == arrays[1].keys()
    means = [tag for tag in arrays[0] if tag.startswith("mean_")]  # others hold a part of the rows
    assert len(means) >= 2 * LAYERS
    for tag in means:
        assert arrays[0][tag] == pytest.approx(arrays[1][tag], rel=1e-4, abs=1e-5, nan_ok=True), tag


def probes(ranks: RankGroup, folder: Path) -> None:
    """Fixed inputs are the first rank's; other ranks' would be copies, or are said to differ."""
    model = Decoder(dropout=0.3)
    ids, mask = ragged(0)
    inputs = {"ids": ids, "attention_mask": mask}
    monitor, memory = monitor_of(model, metrics=METRICS, probe=inputs)
    with monitor(0):
        pass
    monitor.probe(1, dict(zip(("ids", "attention_mask"), ragged(ranks.rank), strict=True)))
    alone = measure(model, inputs, metrics=METRICS, tokens=32)  # on every rank, and no collective
    if ranks.rank:
        return
    one, other = map(measured, memory.readings)
    assert_same(one, alone)
    assert_same(other, alone)
    assert [note for note in words(memory) if "different inputs" in note] == [
        "the ranks probe with different inputs: rank 0's were measured"
    ]
