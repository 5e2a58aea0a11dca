"""All captured views of the zoo, before a change and after it.

`python tests/compare_views.py save FILE` keeps the views of this checkout, and `compare FILE` says
how those of this checkout differ from them. Names of the zoo may follow.
"""

import collections
import pickle
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from referee import watch, without_fast_path
from specimens import PADDING_MASKS, built, inputs_of
from torch import Tensor
from zoo import ZOO

Views = dict[tuple[str, int], dict[str, Any]]

_ROUNDING = 1e-6


@torch.no_grad()
def views_of(name: str, implementation: str, *, padded: bool) -> Views:
    """The captured views of a model of the zoo, by stack and depth."""
    specimen = ZOO[name]
    with without_fast_path():
        window = watch(built(specimen, implementation), inputs_of(specimen, padded=padded))[1]
    return {(layer.stack, layer.index): dict(layer.captured) for layer in window.snapshot().layers}


def all_views(names: list[str]) -> dict[tuple[str, str, bool], Views]:
    """The views of some models, each way to attend, padded and not."""
    found = {}
    for name in names or ZOO:
        maskable = bool(set(ZOO[name].inputs()) & set(PADDING_MASKS))
        for kind in ZOO[name].routes:
            for padded in (True, False) if maskable else (False,):
                found[name, kind, padded] = views_of(name, kind, padded=padded)
    return found


def is_same(one: Any, other: Any) -> bool:
    """Whether two views are the same up to the rounding of float32."""
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return bool(one == other)
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    return torch.allclose(one, other, rtol=_ROUNDING, atol=_ROUNDING, equal_nan=True)


def compare(before: Views, after: Views) -> collections.Counter[tuple[str, str]]:
    """Count the views that are equal, different, lost and gained, by name."""
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    for place in before.keys() | after.keys():
        old, new = before.get(place, {}), after.get(place, {})
        for view in old.keys() | new.keys():
            if view not in new or view not in old:
                counts["lost" if view in old else "gained", view] += 1
            else:
                counts["equal" if is_same(old[view], new[view]) else "different", view] += 1
    return counts


def main(action: str, file: str, *names: str) -> None:
    """Save the views, or compare them with saved ones."""
    warnings.simplefilter("ignore")
    found = all_views([*names])
    if action == "save":
        Path(file).write_bytes(pickle.dumps(found))
        return
    saved, total = pickle.loads(Path(file).read_bytes()), collections.Counter()
    for key, after in found.items():
        counts = compare(saved[key], after)
        total += counts
        if changed := {
            f"{what} {view}": n for (what, view), n in counts.items() if what != "equal"
        }:
            print(*key, changed)
    for what in ("equal", "different", "lost", "gained"):
        print(what, sum(n for (kind, _), n in total.items() if kind == what))


if __name__ == "__main__":
    main(*sys.argv[1:])
