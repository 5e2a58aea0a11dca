"""The layers that one rank measures for a reading, on its device or on the host."""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from geomon.capture import HOST, Layer
from geomon.distributed import merge_layers
from geomon.metrics import Evaluation, Evaluator, LayerValues, in_modes, in_pieces
from geomon.monitor.device import MeasuringDevice, first_line
from geomon.monitor.moves import Moves
from geomon.note import Note
from geomon.note_kinds import NoteKind

# Each rank's part of one layer.
Parts = tuple[Layer, ...]
# Calls a function with arguments, somewhere.
Call = Callable[..., Any]


class LayerQueue:
    """Layers of one reading that this rank measures, in order of depth.

    If a layer cannot be measured on its device, it and later ones are measured on the host.

    Args:
        evaluator: Measures the layers.
        rows: Number of rows of hidden states in one split.
        place: Device that measures the layers.
        moves: How the weights have moved since the last look, or None if that is unknown.

    Attributes:
        call: Calls a function on the host with its arguments, perhaps in another process; None to
            call it here.
        measured: Values of the layers that were measured so far.
        notes: Notes on where and why rows were measured.
        failure: Why the others are not measured, or None.
    """

    def __init__(
        self, evaluator: Evaluator, rows: int, place: MeasuringDevice, moves: Moves | None
    ) -> None:
        self._evaluator, self._rows, self._moves = evaluator, rows, moves
        self._place = place
        self.call: Call | None = None
        self.measured: list[LayerValues] = []
        self.notes: list[Note] = []
        self.failure: Exception | None = None
        self._failing: set[str] = set()  # metrics that fail on the host as well

    def begin(self, parts: list[Parts]) -> None:
        """Take the layers, all in order, and choose a device; `parts` is emptied as they go."""
        self._parts = parts
        self._device = self._place.device
        why = self._place.why_not([layer for parts in self._parts for layer in parts])
        if why is not None:
            self._go_to_host(why)
        self._ready = self._place.mark_ready()

    @property
    def left(self) -> int:
        """Number of layers that are still to be measured."""
        return len(self._parts) - len(self.measured)

    def measure(self, count: int) -> None:
        """Measure more layers, as many at once as pays, and free their captured views."""
        if self._device == HOST and self._ready is not None:
            self._ready.synchronize()  # copies to the host are queued behind the training's work
        for found in self._measure(self._left[:count]):
            # Only this line marks a layer as measured: an interrupted one is measured again.
            self.measured.append(found)
            self._parts[len(self.measured) - 1] = ()

    def give_up(self, error: BaseException) -> None:
        """Measure no more layers, for this reason."""
        self.failure = error if isinstance(error, Exception) else RuntimeError(repr(error))
        del self._parts[len(self.measured) :]

    def combine(self, measured: Sequence[LayerValues]) -> Evaluation:
        """Combine the values of the layers of all ranks."""
        call = self.call or _call_here
        evaluation: Evaluation = call(self._evaluator.combine, measured, self._rows)
        if self._moves is not None:
            self._moves.complete(evaluation.stacks)
        return evaluation

    def alongside_training(self) -> AbstractContextManager[None]:
        """Return a context manager for measuring in this thread while another thread trains."""
        return self._place.alongside_training(self._ready)

    @property
    def _left(self) -> list[Parts]:
        return self._parts[len(self.measured) :]

    def _measure(self, layers: Sequence[Parts]) -> Iterator[LayerValues]:
        """Yield the values of layers in order, several measured at once on the host.

        On the host, this happens outside of the training's torch modes.
        """
        on_host = self._device == HOST
        left = [parts[0] for parts in self._left]
        at_once = self._evaluator.layers_at_once(left, self._rows) if on_host else 1
        if on_host and self.call is not None:
            measure = functools.partial(self.call, _measure_at_once, self._evaluator)
            return (measure(self._whole(parts), self._rows, at_once) for parts in layers)
        return in_pieces(
            self._measure_one, layers, self._evaluator.source_groups, at_once,
            outside=on_host and in_modes(),
        )  # fmt: skip

    def _measure_one(self, parts: Parts) -> LayerValues:
        """Measure a layer on its device; if that fails, move it and later ones to the host."""
        if self._device == HOST:
            return self._evaluator.measure_layer(self._whole(parts), self._rows)
        try:
            whole = self._whole(parts, self._device)
            found = self._evaluator.measure_layer(whole, self._rows)
        except torch.OutOfMemoryError as error:
            name, why = "", f"{self._device} does not have enough memory ({first_line(error)})"
        else:
            failed = found.failed | found.without_margin
            if failed.keys() <= self._failing:
                return found
            name = min(failed.keys() - self._failing)
            why = f"{name} failed on {self._device} ({first_line(failed[name])})"
        on_host = self._evaluator.measure_layer(self._whole(parts), self._rows)
        self._failing |= on_host.failed.keys() | on_host.without_margin.keys()
        if name not in self._failing:
            self._go_to_host(why)
        return on_host

    def _whole(self, parts: Parts, device: torch.device = HOST) -> Layer:
        """Join a layer's parts with the rows of all ranks, on a device."""
        layer = merge_layers(parts).to(device)
        return layer if self._moves is None else self._moves.added_to(layer)

    def _go_to_host(self, why: str) -> None:
        """Move the layers that are still to be measured to the host."""
        self._parts[:] = [tuple(layer.to(HOST) for layer in parts) for parts in self._parts]
        self._device = HOST
        text = "measured on the host: {why}"
        self.notes.append(Note(NoteKind.ON_HOST, text, numbers={"why": why}))


def _call_here(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def _measure_at_once(evaluator: Evaluator, layer: Layer, rows: int, at_once: int) -> LayerValues:
    """Measure a layer, in pieces if several can be measured at once."""
    [values] = in_pieces(
        lambda parts: evaluator.measure_layer(parts[0], rows), [(layer,)],
        evaluator.source_groups, at_once,
    )  # fmt: skip
    return values


__all__ = ["Call", "LayerQueue", "Parts"]
