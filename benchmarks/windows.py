"""Windows that are opened as a monitor opens them, whatever the version of geomon."""

import inspect
from collections.abc import Collection
from typing import Any

import geomon.capture
from geomon.capture import Window

_LEARNS = "plans" in inspect.signature(Window).parameters


def new_plans() -> Any:
    """Return an empty collection of plans of blocks, for all windows on one model."""
    return getattr(geomon.capture, "Plans", dict)()


def watch(anatomy: Any, views: Collection[str], *, rows: int, plans: Any, seed: int = 0) -> Window:
    """Make a window on the next pass of a model.

    Args:
        anatomy: Anatomy of the model.
        views: Names of the captured views.
        rows: Number of rows to keep.
        plans: Plans that earlier windows on this model made, from `new_plans`.
        seed: Seed of the rows. Defaults to 0.
    """
    learned = {"plans": plans} if _LEARNS else {}
    return Window(anatomy, set(views), rows=rows, seed=seed, **learned)
