"""Evaluate every metric at every layer, over splits of the rows."""

import contextlib
import functools
import math
import random
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from geomon.capture import (
    HOST,
    OF_THE_BATCH,
    SOURCES,
    Layer,
    sources_shared_by,
    unseen,
    views_of,
)
from geomon.failures import failures
from geomon.kernels.groups import GROUPS
from geomon.kernels.products import without_autocast
from geomon.metrics.arrays import arrays_of
from geomon.metrics.at_once import in_pieces, layers_at_once
from geomon.metrics.combine import Evaluation, combine
from geomon.metrics.layer_values import LayerValues, Parts
from geomon.metrics.layer_views import (
    LayerViews,
    MissingViewError,
    NoRowsError,
    ViewsWithout,
    split_rows,
)
from geomon.metrics.metric import ENDING, Metric, said
from geomon.metrics.oddities import traits_of
from geomon.metrics.table import is_bundled
from geomon.metrics.views import (
    DISTANCE_QUERIES,
    neighbours_to_search,
    parameters,
    reader,
)
from geomon.metrics.without import NoMarginError
from geomon.record import tags

# Numbers of one split by part, with "" for the value itself.
_Numbers = dict[str, NDArray[np.float64]]


@dataclass(frozen=True)
class Evaluator:
    """Measures every metric at every layer, and combines the values into a reading.

    A metric of hidden states is measured on each split of the rows; its value is the mean over
    splits and, with at least two splits, `std` their standard deviation. A metric of heads has the
    mean over heads as its value, with `min`, `max` and each head as parts. `mean` is over all
    layers except layer 0. `margin` is the half width of a 95 % interval over other sequences (see
    `geomon.metrics.without.margin`). Autograd and autocast are off.

    Args:
        metrics: Checked metrics by name.
        splits: Largest number of splits.
        queries: Number of rows of a split from which distances are measured, or None for all.
            Defaults to 1024.
        strict: Whether to raise errors of metrics instead of leaving their values out. Defaults to
            False.
        has_margins: Whether to measure margins. Defaults to True.
        keeps_arrays: Whether to keep arrays for figures. Defaults to False.
        explains: Whether to make a note on every value that is not finite. Defaults to False.
    """

    metrics: Mapping[str, Metric]
    splits: int
    queries: int | None = DISTANCE_QUERIES
    strict: bool = False
    has_margins: bool = True
    keeps_arrays: bool = False
    explains: bool = False

    @property
    def views(self) -> set[str]:
        """Captured views that the metrics read."""
        return set().union(*(metric.captured for metric in self.metrics.values()))

    @property
    def has_own_metrics(self) -> bool:
        """Whether some metric is the user's own."""
        return not all(map(is_bundled, self.metrics.values()))

    @functools.cached_property
    def source_groups(self) -> list[frozenset[str]]:
        """Groups of sources that no metric reads together, the group of hidden states first."""
        read = [metric.sources for metric in self.metrics.values()]
        unread = frozenset(SOURCES).difference(*read)
        groups: list[frozenset[str]] = []
        for sources in [unread | {"hidden"} | sources_shared_by("whole"), *read]:
            joined = sources.union(*(group for group in groups if group & sources))
            groups = [joined, *(group for group in groups if not group & sources)]
        return sorted(groups, key=lambda group: ("hidden" not in group, min(group)))

    def _sizes(self, *, with_margins: bool) -> dict[str, int | None]:
        """Return the sizes of searches, with as many neighbours as one of the metrics reads."""
        names = {name for metric in self.metrics.values() for name in metric.reads}
        if with_margins:
            at_once = [one.each_group for one in self.metrics.values() if one.each_group]
            names.update(*map(parameters, at_once))
        found = neighbours_to_search(names, with_margins=with_margins)
        return {"queries": self.queries, **found}

    def layers_at_once(self, layers: Sequence[Layer], rows: int) -> int:
        """Return how many of the layers `measure_layers` measures at once on the host.

        The user's own metrics are called for one layer after another, in the calling thread unless
        a torch mode is active there.

        Args:
            layers: The layers, in order of depth.
            rows: Number of rows of hidden states in one split.
        """
        if not layers or self.has_own_metrics:
            return 1
        return min(len(layers), *(layers_at_once(layer, rows) for layer in layers))

    def measure_layers(self, layers: Sequence[Layer], rows: int) -> Iterator[LayerValues]:
        """Measure layers on the host, several at once if their operations are short."""
        return in_pieces(
            lambda parts: self.measure_layer(parts[0], rows),
            [(layer,) for layer in layers], self.source_groups, self.layers_at_once(layers, rows),
        )  # fmt: skip

    def measure_layer(self, layer: Layer, rows: int) -> LayerValues:
        """Measure every metric that applies to a layer.

        Args:
            layer: The layer. Its derived views are freed when the method returns.
            rows: Number of rows of hidden states in one split.

        Raises:
            OutOfMemoryError: If the device of the rows runs out of memory.
            Exception: If `strict`, any error of a metric.
        """
        result = LayerValues(layer.stack, layer.index, _shape(layer))
        result.fingerprint = _fingerprint(layer, rows, self.splits, self.queries)
        if "sequences" in layer.captured:
            result.sequences = len(layer.captured["sequences"].unique())
        if any(metric.null is not None for metric in self.metrics.values()):
            result.heads, result.queries = _sizes_of_attention(layer)
            result.log_visible = _log_visible(layer)
        with self._costing("oddities", {}, {}):
            result.traits = traits_of(layer)
        sizes = self._sizes(with_margins=self.has_margins and (result.sequences or 0) >= GROUPS)
        splits = split_rows(layer, rows, self.splits, sizes, has_groups=self.has_margins)
        views = layer.views
        with _plain_arithmetic(layer):
            for name, metric in self.metrics.items():
                if metric.sources <= layer.sources and metric.can_be_measured(views):
                    with self._costing(name, result.unseen, result.failed):
                        result.parts[name] = _measure_splits(metric, splits)
                        if not _are_finite(result.parts[name]):
                            result.not_finite[name] = _views_not_finite(metric, layer)
            self._take_arrays(splits[0], result)
            if self.has_margins:
                self._leave_out(splits, result)
        return result

    def _take_arrays(self, views: LayerViews, result: LayerValues) -> None:
        """Copy the arrays of a layer; a failure is noted and affects nothing else."""
        try:
            result.arrays = arrays_of(views) if self.keeps_arrays else {}
        except torch.OutOfMemoryError:
            raise
        except failures() as error:
            if self.strict:
                raise
            result.without_arrays = f"{type(error).__name__}: {error}"

    def _leave_out(self, splits: list[LayerViews], result: LayerValues) -> None:
        """Measure every metric again without each group of sequences, for the margins.

        A failure is noted with the layer and costs only the margin.
        """
        asked = self._with_margins(splits[0], result)
        unseen: dict[str, str] = {}  # views that have no form without a group are not failures
        for name, metric in asked.items():
            if metric.each_group is not None:
                with self._costing(name, unseen, result.without_margin):
                    at_once = reader(metric.each_group)
                    found = [one.apply(at_once) for one in _read_by(metric, splits)]
                    without = [_numbers(one) for one in _fetched(found)]
                    _append_groups(result.parts[name], without, metric)
        one_by_one = self._without_each_group(
            {name: metric for name, metric in asked.items() if metric.each_group is None},
            splits, result,
        )  # fmt: skip
        fetched = iter(_fetched([one for each in one_by_one.values() for one in each]))
        for name, each in one_by_one.items():
            count, results = len(each) // GROUPS, [next(fetched) for _ in each]
            with self._costing(name, unseen, result.without_margin):
                numbers = [*map(_numbers, results)]
                without = [_stacked(numbers[split::count]) for split in range(count)]
                _append_groups(result.parts[name], without, asked[name])

    def _with_margins(self, views: LayerViews, result: LayerValues) -> dict[str, Metric]:
        """Choose the measured metrics that can have a margin, given the sequences of their rows."""
        return {
            name: metric
            for name, metric in self.metrics.items()
            if name in result.parts
            and metric.has_margin
            and views.groups(metric.captured) == GROUPS
        }

    def _without_each_group(
        self, metrics: Mapping[str, Metric], splits: Sequence[LayerViews], result: LayerValues
    ) -> dict[str, list[Any]]:
        """Call metrics without each group of sequences: results by group and split.

        A metric that fails or cannot be measured without a group has no entry.
        """
        found: dict[str, list[Any]] = {name: [] for name in metrics}
        unseen: dict[str, str] = {}
        for group in range(GROUPS):
            views = [ViewsWithout(split, group) for split in splits]
            for name in [*found]:
                with self._costing(name, unseen, result.without_margin):
                    read = _read_by(metrics[name], views)
                    found[name] += [_apply(metrics[name], one) for one in read]
                if name in unseen or name in result.without_margin:
                    del found[name]
        return found

    @contextlib.contextmanager
    def _costing(self, name: str, unseen: dict[str, str], failed: dict[str, str]) -> Iterator[None]:
        """Store an error of a metric as the reason for its missing value."""
        try:
            yield
        except (MissingViewError, NoMarginError) as error:
            unseen[name] = str(error)
        except NoRowsError:
            failed[name] = ""
        except ENDING:
            raise
        except failures(BaseException) as error:
            if self.strict:
                raise
            failed[name] = said(error)

    def combine(self, measured: Sequence[LayerValues], rows: int) -> Evaluation:
        """Combine the values of layers into the values of a whole reading.

        Args:
            measured: Values of every layer, in order of depth.
            rows: Number of rows of hidden states in one split.
        """
        with unseen():
            return combine(measured, self.metrics, rows, explains=self.explains)

    def evaluate(self, layers: Iterable[Layer], rows: int) -> Evaluation:
        """Measure all layers, and combine their values into a whole reading.

        Args:
            layers: The layers of a snapshot.
            rows: Number of rows of hidden states in one split.
        """
        return self.combine([*self.measure_layers([*layers], rows)], rows)


@contextlib.contextmanager
def _plain_arithmetic(layer: Layer) -> Iterator[None]:
    """Turn off autograd, autocast and modes, on the host as well, where nulls are computed."""
    kinds = sorted({"cpu", *(device.type for device in layer.devices)})
    with unseen(), torch.no_grad(), without_autocast(kinds):
        yield


def _shape(layer: Layer) -> tuple[int, int] | None:
    """Return the number of rows and columns of hidden states, or None if there are none."""
    hidden = layer.captured.get("hidden")
    return None if hidden is None else (hidden.shape[0], hidden.shape[1])


def _fingerprint(layer: Layer, *sizes: int | None) -> str:
    """Return a checksum of the tokens of a layer's rows; "" if they are unknown."""
    if "token_ids" not in layer.captured and not layer.of_weights:
        return ""
    found = zlib.crc32(repr(sizes).encode())
    for name in views_of("hidden"):
        if name in layer.captured and name in OF_THE_BATCH:
            found = zlib.crc32(layer.captured[name].cpu().contiguous().numpy().tobytes(), found)
    return f"{found:08x}"


def _sizes_of_attention(layer: Layer) -> tuple[tuple[int, int] | None, int | None]:
    """Return (heads, head width) and the number of queries that see a key; None if unknown."""
    projected, query, visible = map(layer.captured.get, ("projected_query", "query", "visible"))
    heads = queries = None
    if projected is not None:
        heads = (projected.shape[1], projected.shape[2])
    if query is not None and visible is not None:
        real = visible.any(dim=3).any(dim=1)
        queries = int(real.expand(query.shape[0], query.shape[2]).sum())
    return heads, queries


def _log_visible(layer: Layer) -> float | None:
    """Average the logarithm of the number of visible keys over queries that see one."""
    visible = layer.captured.get("visible")
    if visible is None:
        return None
    keys = visible.sum(dim=3).double()
    known = keys[keys > 0]
    return float(known.log().mean()) if len(known) else None


def _read_by(metric: Metric, splits: Sequence[LayerViews]) -> list[LayerViews]:
    """Return the views that a metric reads: one per split, or one if its rows are not split."""
    if metric.rows == "last":
        return [splits[0].last]
    return [*splits] if "hidden" in metric.sources else [splits[0]]


def _views_not_finite(metric: Metric, layer: Layer) -> str:
    """Name the captured views that a metric reads and that are not finite."""
    return ", ".join(name for name in sorted(metric.captured) if _is_lost(layer.captured.get(name)))


def _is_lost(view: Any) -> bool:
    """Whether numbers are NaN or infinite; scores of -inf belong to hidden keys."""
    if isinstance(view, Mapping):
        return not all(map(math.isfinite, view.values()))
    return isinstance(view, Tensor) and bool((view.isnan() | view.isposinf()).any())


def _measure_splits(metric: Metric, splits: Sequence[LayerViews]) -> Parts:
    """Call a metric for each split: numbers by part, [splits, 1] or [splits, 1, heads]."""
    found = [_measure(metric, one) for one in _read_by(metric, splits)]
    values = _stacked([_numbers(one) for one in _fetched(found)])
    return {part: each[:, None] for part, each in values.items()}


def _are_finite(parts: Parts) -> bool:
    return all(np.isfinite(each).all() for each in parts.values())


def _append_groups(parts: Parts, without: Sequence[_Numbers], metric: Metric) -> None:
    """Append the values of each split without each group to the values of all rows."""
    for part, values in _stacked(without).items():
        if part in parts and part not in metric.without_margin:
            parts[part] = np.concatenate([parts[part], values], axis=1)


def _measure(metric: Metric, views: LayerViews) -> Any:
    """Call a metric, unless it reads hidden states and no row is left."""
    of_hidden = metric.rows == "last" or "hidden" in metric.sources
    if of_hidden and views.has("hidden") and not len(views["hidden"]):
        raise NoRowsError
    return _apply(metric, views)


def _apply(metric: Metric, views: LayerViews) -> Any:
    """Call a metric; the user's own get copies of views and leave random states unchanged."""
    if metric.rows == "last":
        sequences = len(views["hidden"])
        if sequences < metric.at_least:
            raise MissingViewError(
                f"fewer than {metric.at_least} sequences in a reading: use larger batches, or a "
                "probe with more sequences"
            )
    if is_bundled(metric):
        result = views.apply(metric)
    else:
        with _random_states_kept():
            result = views.apply_to_copies(metric)
    if metric.rows == "all":
        return result
    return {tags.ROWS: sequences, **(result if isinstance(result, Mapping) else {"": result})}


def _fetched(results: Sequence[Any]) -> list[Any]:
    """Copy the results of metrics to the host, with a single wait for the device."""
    values = [x for y in results for x in (y.values() if isinstance(y, Mapping) else (y,))]
    there = [x for x in values if isinstance(x, Tensor) and x.device != HOST and x.ndim < 2]
    if not there:
        return [*results]
    joined = torch.cat([x.detach().reshape(-1).double() for x in there]).cpu()
    pieces = joined.split([x.numel() for x in there])
    here = {id(x): part.view(x.shape) for x, part in zip(there, pieces, strict=True)}
    return [
        {name: here.get(id(x), x) for name, x in result.items()}
        if isinstance(result, Mapping)
        else here.get(id(result), result)
        for result in results
    ]


@contextlib.contextmanager
def _random_states_kept() -> Iterator[None]:
    """Restore the random states of torch, numpy and Python, which the training uses."""
    states = random.getstate(), np.random.get_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def _numbers(result: Any) -> _Numbers:
    """Return the result of a metric by part: a number, or one number per head."""
    parts = result if isinstance(result, Mapping) else {"": result}
    return {str(part): _as_array(value) for part, value in parts.items()}


def _as_array(value: Any) -> NDArray[np.float64]:
    if not isinstance(value, Tensor):
        return np.array(float(value))
    if value.ndim > 1:
        raise ValueError(
            "a metric must return a scalar, a vector [heads] or a dict of these, got shape "
            f"{list(value.shape)}"
        )
    return value.detach().cpu().double().numpy()


def _stacked(each: Sequence[_Numbers]) -> _Numbers:
    """Stack the numbers of several splits or groups; a part that one lacks is NaN there."""
    found = {part: np.full_like(value, np.nan) for one in each for part, value in one.items()}
    return {
        part: np.stack([one.get(part, lacking) for one in each]) for part, lacking in found.items()
    }
