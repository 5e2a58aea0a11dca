"""Keeps what windows capture of the zoo, and compares two versions of geomon by it.

PYTHONPATH=tests python -W ignore -m benchmarks.views dump before.views
PYTHONPATH=tests python -W ignore -m benchmarks.views compare before.views after.views

Each model of tests/support/zoo.py runs with each kind of attention, with padding and without, for
three passes: A, B on the same inputs, and C on shorter inputs if the model takes them, else on
fewer sequences or the same again. Each pass has a window of its own on one anatomy, as a monitor
has.
"""

import gzip
import hashlib
import pickle
import sys
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import typer
from torch import Tensor, nn

from benchmarks.timing import print_table
from benchmarks.windows import new_plans, watch
from geomon.capture.anatomy import find_anatomy
from geomon.capture.snapshot import CAPTURED, Layer, Snapshot
from support.referee import rebuilt, without_fast_path
from support.specimens import PADDING_MASKS, Specimen, built, inputs_of
from support.zoo import ZOO

ROWS = 512
SHORTER = 3  # by how many tokens
PASSES = "ABC"
TOLERANCE = 1e-6  # of the largest number of a view, for what counts as equal
# Attention probabilities, computed from the captured views: equal if only the way to write a bias,
# a scale or a mask has changed.
ATTENTION = "(attention)"

app = typer.Typer(help=__doc__)

_Inputs = dict[str, Any]
# One layer as captured: values by view, and reasons by view.
_Layers = dict[tuple[str, int], tuple[dict[str, Any], dict[str, str]]]


class Seen(NamedTuple):
    """One pass of a model, as captured.

    Attributes:
        inputs: Inputs of the pass: "same", "shorter" or "fewer".
        layers: By stack and depth: numbers of arrays by view, and why views are missing.
        notes: Words of all notes.
        error: The error that ended the pass, or "".
    """

    inputs: str
    layers: _Layers
    notes: list[str]
    error: str = ""


class Entry(NamedTuple):
    """Three passes of a specimen, with the arrays that their layers name.

    Attributes:
        key: Specimen, kind of attention, and "padded" or "".
        passes: The passes.
        arrays: Arrays by the digest that stands for them in `passes`.
    """

    key: tuple[str, str, str]
    passes: list[Seen]
    arrays: dict[str, Any]


# -- dump ------------------------------------------------------------------------------------------


def _cut(values: Any, how: str) -> Any:
    """Shorten an input that is [sequences, length] or [sequences, length, ...]."""
    if not isinstance(values, Tensor):
        return values
    if how == "fewer":
        return values[:-1]
    is_text = values.ndim == 2 and not values.is_floating_point()
    return values[:, :-SHORTER] if is_text else values


def _others(model: nn.Module, inputs: _Inputs) -> tuple[str, _Inputs]:
    """Find inputs of another shape that the model takes."""
    for how in ("shorter", "fewer"):
        other = {name: _cut(values, how) for name, values in inputs.items()}
        changed = any(
            isinstance(values, Tensor) and values.shape != other[name].shape
            for name, values in inputs.items()
        )
        if not changed:
            continue
        try:
            with without_fast_path():
                model(**other)
        except Exception:  # a model may want a length or a number of sequences
            continue
        return how, other
    return "same", inputs


def _kept(value: Any, arrays: dict[str, Any]) -> Any:
    """Put tensors aside, and return what stands for them."""
    if isinstance(value, Mapping):
        return {name: _kept(each, arrays) for name, each in value.items()}
    if not isinstance(value, Tensor):
        return value
    value = value.detach().cpu()
    own = (value.float() if value.is_floating_point() else value).contiguous().numpy()
    digest = hashlib.sha1(own.tobytes() + f"{own.dtype}{own.shape}".encode()).hexdigest()
    arrays.setdefault(digest, own)
    return f"#{digest}"


def _views_of(layer: Layer) -> dict[str, Any]:
    views = dict(layer.captured)
    if "visible" in views:
        probabilities, real = rebuilt(layer)
        views[ATTENTION] = probabilities.masked_fill(~real[..., None], 0)
    return views


def _layers_of(snapshot: Snapshot, arrays: dict[str, Any]) -> _Layers:
    return {
        (layer.stack, layer.index): (_kept(_views_of(layer), arrays), dict(layer.missing))
        for layer in snapshot.layers
    }


def _entry(specimen: Specimen, kind: str, *, padded: bool) -> Entry:
    model, inputs = built(specimen, kind), inputs_of(specimen, padded=padded)
    how, others = _others(model, inputs)
    anatomy, plans = find_anatomy(model), new_plans()
    arrays: dict[str, Any] = {}
    passes = []
    for number, name in enumerate(PASSES):
        given, shape = (others, how) if name == "C" else (inputs, "same")
        window = watch(anatomy, set(CAPTURED), rows=ROWS, seed=number, plans=plans)
        try:
            with without_fast_path(), window:
                model(**given)
            snapshot = window.snapshot()
            notes = sorted(f"{note.stack}: {note.words()}" for note in snapshot.info.notes)
            passes.append(Seen(shape, _layers_of(snapshot, arrays), notes))
        except Exception as error:
            passes.append(Seen(shape, {}, [], f"{type(error).__name__}: {error}"))
    return Entry((specimen.name, kind, "padded" if padded else ""), passes, arrays)


def _chosen(names: Iterable[str]) -> list[Specimen]:
    names = [*names]
    return [each for name, each in ZOO.items() if not names or any(x in name for x in names)]


@app.command()
def dump(
    out: Annotated[Path, typer.Argument(help="File to write.")],
    names: Annotated[list[str] | None, typer.Argument(help="Parts of names in the zoo.")] = None,
) -> None:
    """Write what windows capture of the models of the zoo."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    began = time.perf_counter()
    with gzip.open(out, "wb", compresslevel=1) as file:
        for specimen in _chosen(names or ()):
            masked = set(specimen.inputs()) & set(PADDING_MASKS)
            for kind in specimen.routes:
                for padded in (True, False) if masked else (False,):
                    key, passes, arrays = _entry(specimen, kind, padded=padded)
                    pickle.dump((key, [*map(tuple, passes)], arrays), file)
            print(f"{time.perf_counter() - began:.0f} s: {specimen.name}", file=sys.stderr)
    print(f"{out}: {out.stat().st_size / 1e6:.0f} MB in {time.perf_counter() - began:.0f} s")


def entries(path: Path) -> Iterator[Entry]:
    """Read what was dumped.

    Args:
        path: A file of `dump`.
    """
    with gzip.open(path, "rb") as file:
        while True:
            try:
                key, passes, arrays = pickle.load(file)
            except EOFError:
                return
            yield Entry(key, [Seen(*each) for each in passes], arrays)


# -- compare ---------------------------------------------------------------------------------------


def difference(one: Any, other: Any) -> float:
    """Return the largest difference as a share of the largest number; infinity if unlike.

    Args:
        one: An array, a number, None, or a dict of these.
        other: The same of another version.
    """
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        if one.keys() != other.keys():
            return np.inf
        return max((difference(each, other[name]) for name, each in one.items()), default=0.0)
    if one is None or other is None or isinstance(one, str) or isinstance(other, str):
        return 0.0 if one is other or one == other else np.inf
    one, other = np.asarray(one, dtype=np.float64), np.asarray(other, dtype=np.float64)
    try:
        one, other = np.broadcast_arrays(one, other)
    except ValueError:
        return np.inf
    same = (one == other) | (np.isnan(one) & np.isnan(other))
    if same.all():
        return 0.0
    if not np.isfinite(one[~same]).all() or not np.isfinite(other[~same]).all():
        return np.inf
    largest = np.abs(one[np.isfinite(one)]).max(initial=0.0)
    return float(np.abs(one[~same] - other[~same]).max() / max(largest, 1e-30))


def _at(value: Any, arrays: Mapping[str, Any]) -> Any:
    if isinstance(value, Mapping):
        return {name: _at(each, arrays) for name, each in value.items()}
    return arrays[value[1:]] if isinstance(value, str) and value.startswith("#") else value


class Comparison:
    """Counts of views by pass and view, and a line for everything that is not equal."""

    def __init__(self) -> None:
        self.counts: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
        self.lines: list[str] = []

    def add(self, old: Entry, new: Entry) -> None:
        """Compare all passes of a specimen."""
        for name, one, other in zip(PASSES, old.passes, new.passes, strict=True):
            where = ", ".join(filter(None, (*old.key, f"pass {name} ({other.inputs})")))
            found: dict[tuple[str, str], list[tuple[str, float]]] = defaultdict(list)
            for place in sorted(one.layers.keys() | other.layers.keys()):
                layer = " ".join(filter(None, (place[0], str(place[1]))))
                for view, verdict, size in self._layer(old, new, one, other, place):
                    self.counts[name, view][verdict] += 1
                    if verdict != "equal":
                        found[verdict, view].append((layer, size))
            for (verdict, view), layers in sorted(found.items()):
                size = max(size for _, size in layers)
                reasons = _reasons(one if verdict == "gained" else other, view)
                text = f" by {size:.2g}" if verdict == "different" else f": {reasons}"
                at = ", ".join(layer for layer, _ in layers)
                self.lines.append(f"{where}: {view} {verdict}{text} (layer {at})")
            self._words(where, one, other)

    def _layer(
        self, old: Entry, new: Entry, one: Seen, other: Seen, place: tuple[str, int]
    ) -> Iterator[tuple[str, str, float]]:
        before, after = (x.layers.get(place, ({}, {}))[0] for x in (one, other))
        for view in sorted(before.keys() | after.keys()):
            if view not in after or view not in before:
                yield view, "gained" if view in after else "lost", np.nan
                continue
            if before[view] == after[view] and not isinstance(before[view], float):
                yield view, "equal", 0.0  # the same digests
                continue
            size = difference(_at(before[view], old.arrays), _at(after[view], new.arrays))
            yield view, "equal" if size <= TOLERANCE else "different", size

    def _words(self, where: str, one: Seen, other: Seen) -> None:
        """Compare errors, notes and the reasons of views that both lack."""
        if one.error != other.error:
            self.lines.append(f"{where}: error {one.error!r} is now {other.error!r}")
        for sign, notes in (
            ("-", set(one.notes) - set(other.notes)),
            ("+", set(other.notes) - set(one.notes)),
        ):
            self.lines += [f"{where}: note {sign} {note}" for note in sorted(notes)]
        changed: dict[tuple[str, str], list[str]] = defaultdict(list)
        for place in one.layers.keys() & other.layers.keys():
            before, after = one.layers[place][1], other.layers[place][1]
            for view in before.keys() & after.keys():
                if before[view] != after[view]:
                    changed[before[view], after[view]].append(view)
        for (before, after), views in changed.items():
            names = ", ".join(sorted(set(views)))
            self.lines.append(f"{where}: reason for {names}: - {before} + {after}")


def _reasons(seen: Seen, view: str) -> str:
    found = {missing.get(view, "no reason") for _, missing in seen.layers.values()} - {"no reason"}
    return "; ".join(sorted(found)) or "no reason"


_VERDICTS = ("equal", "lost", "gained", "different")


def _print_counts(counts: Mapping[tuple[str, str], Counter[str]]) -> None:
    for title, place in (("view", 1), ("pass", 0)):
        total: dict[str, Counter[str]] = defaultdict(Counter)
        for key, each in counts.items():
            total[key[place]] += each
        rows = ([name, *(each[verdict] for verdict in _VERDICTS)] for name, each in total.items())
        print_table(f"Views by {title}", (title, *_VERDICTS), sorted(rows))


@app.command()
def compare(
    old: Annotated[Path, typer.Argument(help="What one version captured.")],
    new: Annotated[Path, typer.Argument(help="What another captured.")],
) -> None:
    """Count views that are equal, lost, gained or different, and name each difference."""
    made, before = Comparison(), {entry.key: entry for entry in entries(old)}
    for entry in entries(new):
        if entry.key not in before:
            print(f"{', '.join(entry.key)}: only in {new}")
            continue
        made.add(before.pop(entry.key), entry)
    for line in made.lines:
        print(line)
    for key in before:
        print(f"{', '.join(key)}: only in {old}")
    _print_counts(made.counts)


if __name__ == "__main__":
    app()
