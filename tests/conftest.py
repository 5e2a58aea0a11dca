"""Random numbers, processes and checks that every test has, and a synthetic run."""

import gc
import os
import random
import sys
from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

from geomon.record import Readings
from support.forks import Forks
from support.own_errors import no_own_errors
from support.readings import synthetic_run

# How long an example takes says how busy the machine is, and nothing about the code.
settings.register_profile("geomon", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("geomon")
# The same of W&B's own process: seconds in which it has to start.
os.environ |= {"WANDB__SERVICE_WAIT": "300", "WANDB_INIT_TIMEOUT": "300"}

# torch's optimizers import torch._dynamo, so that most programs would.
PREPARATION = (
    "from support import models, plain_models; "
    "import geomon, scipy.stats, faiss, torch._dynamo; geomon.Monitor"
)


def pytest_runtest_setup() -> None:
    """Give each test the same random numbers, whichever tests run before it."""
    random.seed(0)
    np.random.seed(0)
    # torch.manual_seed writes the stack down for each accelerator that may come: seconds in all.
    torch.default_generator.manual_seed(0)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Search for no garbage during the imports: of twelve seconds that took four."""
    gc.disable()
    gc.set_threshold(20_000, 20, 20)  # the young are many, and nearly all of them go by themselves
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
    """Start programs from a process that has imported geomon and the small models."""
    forks = Forks(PREPARATION)
    yield forks
    forks.close()


@pytest.fixture
def own_metrics_in_background(monkeypatch):
    """Measure a user's metrics in the background too: they stand for slow or broken ones.

    Otherwise geomon measures them in the training's thread, since they may draw random numbers.
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


@pytest.fixture
def make_readings() -> Callable[..., Readings]:
    """Builds a run: `make_readings(steps, curves={tag: values}, layers=, heads=, without=)`."""
    return synthetic_run
