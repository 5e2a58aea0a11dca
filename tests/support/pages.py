"""Synthetic runs for tests of pages: on disk, with arrays, and with alerts."""

import io
import json
import math
import os
from dataclasses import replace

import numpy as np
from matplotlib.testing.compare import compare_images
from typer.testing import CliRunner

from geomon.cli import make_app
from geomon.record import FILE_NAME, Course, Readings, read, tags
from geomon.record.arrays import ArrayPlace
from support.readings import TEXTS, raised_of, with_values


def invoke(*arguments):
    """Run a command of `geomon`."""
    return CliRunner().invoke(make_app(), list(map(str, arguments)))


def holds_picture(approved, drawn):
    """Compare a picture with the file of one that a person has approved."""
    if "APPROVE" in os.environ:
        approved.parent.mkdir(exist_ok=True)
        approved.write_bytes(drawn.read_bytes())
    differs = compare_images(str(approved), str(drawn), TOLERANCE)
    assert differs is None, differs


def write(folder, readings, arrays=None, **description):
    """Write a record, with its alerts, and with the arrays that a function of a reading gives."""
    folder.mkdir(parents=True, exist_ok=True)
    run = {"run": {"model": "Synthetic", "metrics": TEXTS, **description}}
    alerts = list(getattr(readings, "raised", ()))
    lines = [json.dumps(run)]
    for reading in readings:
        while alerts and alerts[0].step < reading.step:
            lines.append(alerts.pop(0).line())
        lines.append(reading.line())
    lines += [alert.line() for alert in alerts]
    (folder / FILE_NAME).write_text("\n".join(lines) + "\n")
    run = read(folder)
    for reading in readings if arrays is not None else ():
        run.folder.write(reading.step, reading.source, arrays(reading))
    return folder


def alerted(readings, alerts, courses=()):
    """The same run with alerts: kinds, with their steps."""
    raised = [raised_of(kind, step, courses=tuple(courses)) for step, kind in alerts]
    return replace(readings, raised=raised)


def course_of(tag, step):
    """The course of a value that jumps at the last of 32 steps, after one that failed."""
    values = [3 + 0.2 * math.sin(n) for n in range(30)]
    return Course(tag, tuple(range(step - 31, step + 1)), (*values, math.nan, 9.0))


# Root mean square of the differences of two pictures, of 255: what another processor may round.
TOLERANCE = 0.1
LAYERS, HEADS, WIDTH, ROWS = 4, 4, 8, 6
STEPS = (0, 16, 128, 1500)


def more_values(progress: float) -> dict[str, float]:
    """Add the values that the synthetic runs of other tests lack."""
    found = {"attention_entropy/null": 3.1, "qk_cosine/null_magnitude": 0.3}
    found |= {"twonn/null": 4.0, "gride/null": 3.0}
    found["training/loss"] = 5 - 3 * progress
    for layer in range(LAYERS + 1):
        shares = {"mean": 0.2 + 0.1 * layer * progress, "between": 0.3}
        shares["within"] = 1 - sum(shares.values())
        for part, value in shares.items():
            found[tags.layer_tag("variance_shares", layer, part)] = value
        found[tags.layer_tag("variance_shares", layer)] = 0.5
        found |= {tags.layer_tag(n, layer): 0.1 * (layer + 1) for n in ("drift_norm", "twonn")}
        found[tags.layer_tag("cosine", layer)] = (0.1, 0.3, 0.2, 0.4, 0.5)[layer]
        found[tags.layer_tag("variance", layer)] = 10.0
    return found


def arrays_at(reading) -> dict[ArrayPlace, np.ndarray]:
    """Mean queries and keys of head h of layer l at a planted angle, growing."""
    progress = reading.step / STEPS[-1]
    generator = np.random.default_rng(3)
    found = {}
    for layer in range(LAYERS + 1):
        eigenvalues = np.sort(generator.exponential(size=WIDTH))[::-1]
        counts = generator.integers(10, 40, 12)
        found |= {
            ArrayPlace("", "eigenvalues", layer): eigenvalues,
            ArrayPlace("", "type_ids", layer): np.arange(12),
            ArrayPlace("", "type_rows", layer): counts,
            ArrayPlace("", "type_square_of_mean", layer): 5 + generator.random(12),
            ArrayPlace("", "type_scatter", layer): counts * (2 + generator.random(12)),
        }
        if layer == 0:
            continue
        angles = np.pi * (np.arange(HEADS) + HEADS * (layer - 1)) / (HEADS * LAYERS)
        query = np.zeros((HEADS, WIDTH))
        key = np.zeros((HEADS // 2, WIDTH))  # two query heads share a key head
        key[:, 0] = 1 + progress
        query[:, 0], query[:, 1] = np.cos(angles), np.sin(angles)
        query *= 1 + 2 * progress
        found[ArrayPlace("", "mean_query", layer)] = query.astype(np.float32)
        found[ArrayPlace("", "mean_key", layer)] = key.astype(np.float32)
        for name, mean in (("queries", query), ("keys", key)):
            noise = 0.3 * generator.standard_normal((ROWS, *mean.shape))
            found[ArrayPlace("", name, layer)] = (mean + noise).astype(np.float16)
    return found


def write_run(folder, readings, arrays=arrays_at) -> Readings:
    last = max(readings[-1].step, 1)
    whole = [with_values(r, {**more_values(r.step / last), **r.values}) for r in readings]
    facts = {"parameters": 1_234_567, "layers": ["block"] * LAYERS, "compiled": True, "time": 1.8e9}
    return read(write(folder, replace(readings, readings=whole), arrays, **facts))


class Terminal(io.StringIO):
    """Standard output and input of a terminal, of an encoding."""

    def __init__(self, encoding):
        super().__init__()
        self._encoding = encoding

    encoding = property(lambda self: self._encoding)

    def isatty(self):
        return True
