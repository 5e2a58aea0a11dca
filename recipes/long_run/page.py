"""The page of the longer training, written from its record."""

import json
import math
import os
from pathlib import Path

from geomon import Readings
from recipes.long_run.changes import DEMO_STEPS, DIMENSIONS, OTHERS, Change, changes, nearest

_BITS = "training/validation/bits_per_character"


def planned_steps(folder: Path) -> int | None:
    """Read how many steps a run of the recipe enwik8 was begun with; None where it is unknown.

    Args:
        folder: Folder of the run.
    """
    try:
        return int(json.loads((folder / "settings.json").read_text())["preset"]["steps"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def render(readings: Readings, *, planned: int | None, page: Path, picture: Path) -> str:
    """Write the page.

    Args:
        readings: Readings of the run.
        planned: Steps that the run was begun with; None where unknown.
        page: Path of the page, to which the link is relative.
        picture: Path of the picture.
    """
    steps = [reading.step for reading in readings]
    begin = steps[nearest(steps, DEMO_STEPS)]
    link = Path(os.path.relpath(picture.resolve(), page.resolve().parent)).as_posix()
    dimensions = changes(readings, DIMENSIONS)
    parts = [
        "# A longer run: does the compression go on?",
        "",
        _introduction(readings, planned),
        "",
        f"![Intrinsic dimension, its scales, loss and anisotropy over training]({link})",
        "",
        f"## From step {begin:,}, where the demo ends, to step {steps[-1]:,}",
        "",
        *_table(dimensions + changes(readings, OTHERS), begin, steps[-1]),
        "",
        *_sentences(dimensions),
        "",
        _CAUTIONS,
    ]
    return "\n".join(parts)


_CAUTIONS = """## What this does not say

- One seed. The intervals are over other windows of the text, and at least the scatter from reading
  to reading; not over other weights: `make decoder` has seeds, for a shorter training.
- Where the demo ends, its learning rate has come down to a tenth; here it is still near its highest
  at that step. The table compares two moments of this run, not this run with the demo.
- Each value is one number for all layers: the mean over the outputs of the blocks.
"""

_ANSWERS = {
    "falls": "The compression goes on: the paper's estimate (TwoNN, all tokens) falls further.",
    "grows": "The compression does not go on: the paper's estimate (TwoNN, all tokens) grows "
    "again.",
    "undecided": "Whether the compression goes on is undecided: the paper's estimate (TwoNN, "
    "all tokens) changes by less than its interval.",
}


def _introduction(readings: Readings, planned: int | None) -> str:
    last = readings[-1]
    text = (
        f"The recipe `enwik8` (4 layers of width 128, characters) ends after {DEMO_STEPS:,} steps "
        f"on two cores. The same model, trained on:\n\n```\n"
        f"make enwik8 ARGS='--steps {planned or last.step} --out runs/long_run'\n"
        "python -m recipes.long_run runs/long_run\n```\n\n"
        f"The second command writes this page and its picture from the record of {len(readings)} "
        f"readings, each of {last.tokens:,} held-out rows."
    )
    if planned is not None and last.step < planned:
        text += f" **This record ends at step {last.step:,} of {planned:,}.**"
    bits = last.values.get(_BITS, math.nan)
    if math.isfinite(bits):
        text += f" At its last validation the model needed {bits:.2f} bits per character."
    return text


def _table(found: list[Change], begin: int, end: int) -> list[str]:
    head = ["mean over layers", "peak after step 0", f"step {begin:,}", f"step {end:,}", "change"]
    lines = [f"| {' | '.join([*head, 'verdict'])} |", "|---|---:|---:|---:|---:|---|"]
    for change in found:
        peak, step = change.peak
        difference = f"{change.after - change.before:+.2g} ± {change.margin:.2g}"
        cells = [change.name, f"{peak:.3g} (step {step:,})", f"{change.before:.3g}"]
        cells += [f"{change.after:.3g}", difference, f"**{change.verdict}**"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _sentences(dimensions: list[Change]) -> list[str]:
    """Write what happens to the dimension in words: the paper's estimate first, then every one."""
    by_verdict: dict[str, list[str]] = {}
    for change in dimensions:
        by_verdict.setdefault(change.verdict, []).append(change.name)
    paper = [change for change in dimensions if change.name == next(iter(DIMENSIONS))]
    lines = [f"{_ANSWERS[change.verdict]} Its curve is {change.phase.words()}." for change in paper]
    for verdict, words in (
        ("falls", "Falling"),
        ("grows", "Growing"),
        ("undecided", "Undecided"),
    ):
        if names := by_verdict.get(verdict):
            lines.append(f"{words}: {'; '.join(names)}.")
    if {"falls", "grows"} <= set(by_verdict):
        lines.append("The sign depends on the scale: there is no one dimension that compresses.")
    return [f"- {line}" for line in lines]
