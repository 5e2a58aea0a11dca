"""Synthetic runs shared by the tests of analysis and show."""

import gc
import math
import os
import random
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from forks import Forks
from hypothesis import HealthCheck, settings
from own_errors import no_own_errors
from tagged import TEXTS, reading_of

from geomon.note import Note
from geomon.record import Readings, tags

# How long an example takes says how busy the machine is, and nothing about the code.
settings.register_profile("geomon", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("geomon")
# The same of W&B's own process: seconds in which it has to start.
os.environ |= {"WANDB__SERVICE_WAIT": "300", "WANDB_INIT_TIMEOUT": "300"}

STEPS = (0, 16, 32, 64, 128, 256, 512, 1024, 1500)
# Curves of a character decoder on enwik8: expansion and compression of the paper's estimate, while
# the distinct tokens' falls throughout and scale 32 falls and then grows.
CURVES = {
    "twonn/mean": (2.5, 2.8, 3.3, 5.0, 7.3, 7.4, 6.4, 5.7, 5.3),
    "twonn_distinct/mean": (32.1, 24.0, 18.6, 11.0, 7.5, 6.2, 5.9, 5.3, 4.9),
    "gride/mean/k1": (2.6, 2.9, 3.4, 5.0, 7.2, 7.3, 6.4, 5.6, 5.2),
    "gride/mean/k32": (14.6, 10.0, 7.2, 4.1, 3.2, 3.8, 4.5, 5.6, 6.0),
    "attention_entropy/mean": (3.2, 3.2, 3.1, 3.0, 2.8, 2.4, 2.0, 1.8, 1.6),
    "geomon/overhead": (0.9, 0.8, 0.7, 0.5, 0.3, 0.2, 0.1, 0.06, 0.04),
}


def pytest_runtest_setup() -> None:
    """Give each test the same random numbers, whichever tests run before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Search for no garbage during the imports: of twelve seconds that took four."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(autouse=True, scope="module")
def _imports_are_not_searched_for_garbage():
    """Exclude what is imported by now from all searches to come.

    The Trainer searches when a training begins, among a million objects of torch and transformers:
    that took three times as long as a training of a few steps.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def forks():
    """Starts programs from a process that has imported geomon and the small models."""
    forks = Forks("import models, plain_models, geomon, scipy.stats, faiss; geomon.Monitor")
    yield forks
    forks.close()


@pytest.fixture
def own_metrics_in_background(monkeypatch):
    """Measure a user's metrics in the background too: they stand for slow or broken ones.

    geomon measures them where the training is, since they may draw its random numbers.
    """
    from geomon.metrics import Evaluator

    monkeypatch.setattr(Evaluator, "has_own_metrics", False)


@pytest.fixture(autouse=True)
def failures():
    """Errors of geomon's own; a test that plants some clears them."""
    with no_own_errors() as found:
        yield found


@pytest.fixture(autouse=True)
def _wandb_begins_anew():
    """W&B reads its environment once: the next test would write to the folder of this one."""
    yield
    if "wandb" in sys.modules:
        sys.modules["wandb"].teardown()


def _at(steps: Sequence[int], index: int, layers: int, heads: int) -> dict[str, float]:
    """Layers and heads: a bell of anisotropy that grows, cosines that grow with either sign."""
    progress = index / max(len(steps) - 1, 1)
    values = {}
    for layer in range(layers + 1):
        bell = math.exp(-((4 * layer / layers - 2) ** 2))
        values[tags.layer_tag("anisotropy", layer)] = 0.1 + 0.5 * progress * bell
        if layer:
            values[tags.layer_tag("attention_entropy", layer)] = 3.0 - progress * layer / layers
            values[tags.layer_tag("qk_cosine", layer)] = (
                -(heads % 2) * (0.1 + 0.6 * progress) / max(heads, 1)
            )
        for head in range(heads if layer else 0):
            sign = 1 if head % 2 else -1
            part = tags.head_part(head)
            values[tags.layer_tag("qk_cosine", layer, part)] = sign * (0.1 + 0.6 * progress)
            values[tags.layer_tag("attention_entropy", layer, part)] = (
                3.0 - progress * layer / layers
            )
    return values


def _make(
    steps: Sequence[int] = STEPS,
    *,
    curves: Mapping[str, Sequence[float]] | None = None,
    layers: int = 4,
    heads: int = 4,
    error: float = 0.1,
    without: Sequence[str] = (),
    notes: Sequence[Note | str] = (),
    source: str = "probe",
) -> Readings:
    curves = {name: values[: len(steps)] for name, values in {**CURVES, **(curves or {})}.items()}
    readings = []
    for index, step in enumerate(steps):
        values = _at(steps, index, layers, heads)
        for name, curve in curves.items():
            values[name] = curve[index]
            if name.startswith("twonn"):
                values[f"{name}/margin"] = error
        kept = {tag: value for tag, value in values.items() if tag.split("/")[0] not in without}
        readings.append(reading_of(kept, step, source, notes))
    return Readings([{"model": "Synthetic", "metrics": TEXTS}], readings)


@pytest.fixture
def make_readings() -> Callable[..., Readings]:
    """Builds a run: `make_readings(steps, curves={tag: values}, layers=, heads=, without=)`."""
    return _make
