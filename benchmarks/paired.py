"""Do the margins of differences and slopes cover, if readings of a probe are paired?

A decoder of the recipe is trained on 90 % of the text, and disjoint probes of the rest read the
same checkpoints. The change between two checkpoints, and the change along a line through the last
quarter of the run, have a paired margin and one as if readings were independent. A margin covers
if change +- margin contains the mean of the changes over all probes.
"""

import math
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from typing import Annotated

import numpy as np
import torch
import torch.nn.functional as F
import typer
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.timing import print_machine, print_table
from geomon import Monitor, Readings, log_spaced, read, select
from geomon.analysis.phase import Point, sum_of
from recipes.enwik8.optimizer import adamw, cosine_rate
from recipes.enwik8.text import Text, load, windows
from recipes.enwik8.train import PRESETS, configuration

METRICS = (
    "twonn", "twonn_distinct", "gride", "anisotropy", "attention_entropy", "effective_rank",
    "drift_norm",
)  # fmt: skip
SHOWN = {name: (name, "") for name in METRICS if name != "gride"} | {"gride k8": ("gride", "k8")}
LENGTH = 64


def checkpoints(arch: str, text: Text, steps: int) -> dict[int, dict[str, Tensor]]:
    """Train a decoder, and return its weights at the steps that the recipe reads."""
    torch.manual_seed(0)
    sizes = PRESETS["cpu"]
    model = AutoModelForCausalLM.from_config(configuration(arch, text.vocabulary, sizes))
    optimizer, rate = adamw(model, sizes["learning_rate"]), cosine_rate(sizes["warmup"], steps)
    due, random, found = log_spaced(per_octave=3, at_most=150), np.random.default_rng(0), {}
    for step in range(steps + 1):
        if due(step) or step == steps:
            found[step] = {name: value.clone() for name, value in model.state_dict().items()}
        batch = windows(text.train, random.integers(0, len(text.train) - LENGTH, 32), LENGTH + 1)
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = sizes["learning_rate"] * rate(step)
        optimizer.step()
        optimizer.zero_grad()
    return found


def read_by(
    probe: Tensor, arch: str, text: Text, weights: dict[int, dict[str, Tensor]]
) -> Readings:
    """Read every checkpoint on one probe."""
    model = AutoModelForCausalLM.from_config(configuration(arch, text.vocabulary, PRESETS["cpu"]))
    with tempfile.TemporaryDirectory() as folder:
        monitor = Monitor(
            model, directory=folder, probe={"input_ids": probe}, schedule=1, budget=None,
            metrics=select(*METRICS), splits=1,
        )  # fmt: skip
        for step, each in weights.items():
            model.load_state_dict(each)
            monitor.probe(step)
        monitor.close()
        return read(folder)


def rows(runs: list[Readings], least: int) -> Iterator[tuple[str, ...]]:
    """Yield a row for each value: width of the paired margin, and coverage."""
    for name, (metric, part) in SHOWN.items():
        curves = [[_point(reading, metric, part) for reading in run] for run in runs]
        late = [i for i, point in enumerate(curves[0]) if point.step >= least]
        steps = np.array([curves[0][i].step for i in late], float)
        quarter = [i for i in late if curves[0][i].step >= 0.75 * steps[-1]]
        at = np.array([curves[0][i].step for i in quarter], float)
        along = (at - at.mean()) / ((at - at.mean()) ** 2).sum() * (at[-1] - at[0])
        kinds = {
            "adjacent": [([a, b], [-1.0, 1.0]) for a, b in pairwise(late)],
            "far apart": [([a, late[-1]], [-1.0, 1.0]) for a in late[: len(late) // 2]],
            "last quarter": [(quarter, along.tolist())],
        }
        for kind, sums in kinds.items():
            found = [_coverage(curves, places, weights) for places, weights in sums]
            ratio, paired, alone = (np.nanmean(each) for each in zip(*found, strict=True))
            yield name, kind, f"{ratio:.2f}", f"{paired:.2f}", f"{alone:.2f}"


def _coverage(
    curves: list[list[Point]], places: list[int], weights: list[float]
) -> tuple[float, float, float]:
    """Return the paired width over the independent one, and how often each covers."""
    paired = [sum_of([curve[i] for i in places], weights) for curve in curves]
    alone = [
        sum_of([curve[i]._replace(fingerprint="") for i in places], weights) for curve in curves
    ]
    known = [(p, a) for p, a in zip(paired, alone, strict=True) if p.margin and a.margin]
    if len(known) < 2:
        return math.nan, math.nan, math.nan
    mean = np.mean([p.value for p, _ in known])
    off = np.array([abs(p.value - mean) for p, _ in known])
    widths = np.array([(p.margin, a.margin) for p, a in known])
    covers = (off[:, None] <= widths).mean(axis=0)
    return float(np.median(widths[:, 0] / widths[:, 1])), float(covers[0]), float(covers[1])


def _point(reading, metric: str, part: str) -> Point:  # type: ignore[no-untyped-def]
    column = reading.column(metric, part)
    known = column.mean_margin if math.isfinite(column.mean_margin) else 0.0
    return Point(reading.step, column.mean, known, column.mean_without, reading.fingerprint)


def main(
    probes: Annotated[int, typer.Option(help="Disjoint probes of 128 windows.")] = 20,
    steps: Annotated[int, typer.Option(help="Steps of each training.")] = 600,
    least: Annotated[int, typer.Option(help="First step of the pairs.")] = 128,
) -> None:
    """Print a table for each of two decoders."""
    print_machine()
    text = load()
    held = text.validation
    starts = np.random.default_rng(3).permutation(len(held) // LENGTH)[: 128 * probes] * LENGTH
    for arch in ("gpt2", "llama"):
        weights = checkpoints(arch, text, steps)
        drawn = (np.sort(each) for each in starts.reshape(probes, 128))
        runs = [read_by(windows(held, each, LENGTH), arch, text, weights) for each in drawn]
        print_table(
            f"{arch}: {probes} probes, {len(weights)} checkpoints of {steps} steps",
            ("value", "change", "paired margin / independent", "paired covers", "independent"),
            rows(runs, least),
        )  # fmt: skip


if __name__ == "__main__":
    typer.run(main)
