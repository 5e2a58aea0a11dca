"""Layers at once: how many are measured beside one another, each with a part of the threads.

Operations on 4,096 rows of width 128 are too short to be shared out: with all threads for each of
them, all but one mostly wait. So each thread measures a layer of its own. Wide layers are measured
in turn, with all threads for each operation.
"""

import contextlib
import functools
import math
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import threadpoolctl  # type: ignore[import-untyped]
import torch

from geomon.capture.snapshot import Layer
from geomon.metrics.layer_values import LayerValues

_Item = TypeVar("_Item")
_Found = TypeVar("_Found")

# Numbers in the rows of a layer for which one more thread pays: 4,096 rows of width 1,024.
_NUMBERS = 4_194_304
# More threads wait for one another: Python lets only one of them choose the next operation. Each
# layer that is measured takes memory beside its rows.
_MOST = 8
# Smallest stack of a thread, in bytes: with 64 kB, libraries of linear algebra end the process.
_SMALL_STACK = 2**20


def layers_at_once(layer: Layer, rows: int) -> int:
    """Count the layers of a size that are measured at once: as many as torch's threads, or fewer.

    Args:
        layer: One of the layers, or what one rank has of it.
        rows: Number of rows of hidden states in one split.
    """
    hidden = layer.captured.get("hidden")
    width = 0 if hidden is None else hidden.shape[1]
    threads_of_each = max(1, math.ceil(rows * width / _NUMBERS))
    return max(1, min(_MOST, torch.get_num_threads() // threads_of_each))


def in_threads(
    function: Callable[[_Item], _Found],
    items: Iterable[_Item],
    at_once: int,
    *,
    outside: bool = False,
) -> Iterator[_Found]:
    """Call a function on each item, several at once; yields what it returns, in order.

    The threads end with the last item. The number of threads that torch uses in the thread that
    calls, and in every other one, stays as it is. An item is not kept after its call. Where no
    thread can be had, the calls are made in this one.
    """
    left = deque(items)
    del items
    count = min(at_once, len(left))
    pool = _start_threads(count) if count > 1 or (outside and left) else None
    if pool is None:
        while left:
            yield function(left.popleft())
        return
    try:
        for begun in [pool.submit(function, left.popleft()) for _ in range(len(left))]:
            yield begun.result()
    finally:  # after Ctrl-C too: nobody measures when the training goes on
        pool.shutdown(wait=True, cancel_futures=True)


def in_modes() -> bool:
    """Say whether this thread is in a mode of torch that sees or changes operations.

    One counts them (FlopCounterMode), another rounds products as a quantised model does: what is
    measured would be counted with the training, and rounded.
    """
    return any(count() > 0 for count in _MODES)


# Private names of torch: without them metrics are measured inside such modes as without.
_STACKS = ("_len_torch_dispatch_stack", "_len_torch_function_stack")
_MODES = [getattr(torch._C, name) for name in _STACKS if hasattr(torch._C, name)]


def stacks_suffice() -> bool:
    """Say whether a thread that is started now can measure.

    A program may give its threads stacks with which libraries of linear algebra end the process.
    """
    return not 0 < threading.stack_size() < _SMALL_STACK


def _start_threads(count: int) -> ThreadPoolExecutor | None:
    """Start threads, each with a part of torch's threads; None if they cannot be started.

    A system limits the threads and the memory of its users; a program that ends starts none.
    """
    if not stacks_suffice():
        return None
    start = functools.partial(_limit_threads, max(1, torch.get_num_threads() // count))
    pool = ThreadPoolExecutor(count, thread_name_prefix="geomon", initializer=start)
    all_there = threading.Barrier(count)  # each thread waits until all have started
    try:
        for _ in range(count):
            pool.submit(all_there.wait)
    except BaseException as error:
        all_there.abort()
        pool.shutdown(wait=True, cancel_futures=True)
        if isinstance(error, (RuntimeError, MemoryError)):
            return None
        raise
    return pool


def in_pieces(
    measure: Callable[[tuple[Layer, ...]], LayerValues],
    layers: Sequence[tuple[Layer, ...]],
    apart: Sequence[frozenset[str]],
    at_once: int,
    *,
    outside: bool = False,
) -> Iterator[LayerValues]:
    """Measure layers, several at once, each in pieces; yields the values of each, in order.

    The metrics of attention and those of hidden states share no view, so that they are measured
    apart. The small pieces come last: no thread waits long for the last layer.

    Args:
        measure: Measures a layer, of which each rank has a part, or a piece of it.
        layers: Parts of each layer.
        apart: Groups of sources that no metric reads together, the slowest group first.
        at_once: Number of layers at once; 1 measures each as a whole.
        outside: Whether to measure in another thread in any case (see `in_threads`).
    """
    if at_once == 1:
        yield from in_threads(measure, layers, at_once, outside=outside)
        return
    pieces = [
        (place, tuple(part.only(sources) for part in parts))
        for number, sources in enumerate(apart)
        for place, parts in enumerate(layers)
        if number == 0 or any(part.sources & sources for part in parts)
    ]
    left = Counter(place for place, _ in pieces)
    measured = in_threads(lambda piece: (piece[0], measure(piece[1])), pieces, at_once)
    del layers, pieces
    found: dict[int, LayerValues] = {}
    following = 0
    for place, values in measured:
        found[place] = found[place].joined_with(values) if place in found else values
        left[place] -= 1
        while following in found and left[following] == 0:
            yield found.pop(following)
            following += 1


def _limit_threads(count: int) -> None:
    """Limit the threads of operations that this thread starts.

    By OpenMP's own setting, which belongs to a thread: torch.set_num_threads would change what
    threads of the training get that start later, and how MKL chooses.
    """
    with contextlib.suppress(Exception):  # without a limit the thread is slower, and right
        torch.get_num_threads()  # at its first question a thread takes torch's setting over
        _openmp().limit(limits=count)


@functools.cache
def _openmp() -> Any:
    """The OpenMP libraries of this process: torch and FAISS may each bring one."""
    return threadpoolctl.ThreadpoolController().select(user_api="openmp")
