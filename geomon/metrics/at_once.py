"""Measure several layers at once, each with a part of the threads.

Operations on 4,096 rows of width 128 are too short to split: if each of them used all threads, most
threads would wait. Each thread therefore measures a layer of its own. Wide layers are measured in
turn, with all threads for each operation.
"""

import functools
import math
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import threadpoolctl  # type: ignore[import-untyped]
import torch

from geomon.capture import Layer
from geomon.failures import failures, ignored
from geomon.metrics.layer_values import LayerValues

_Item = TypeVar("_Item")
_Found = TypeVar("_Found")

# One more thread per layer pays for this many numbers: 4,096 rows of width 1,024.
_NUMBERS = 4_194_304
# More threads would wait for one another, because Python lets only one of them issue operations.
# Each layer that is being measured also takes memory in addition to its rows.
_MOST = 8
# Smallest stack of a thread, in bytes: with 64 kB, linear algebra libraries crash the process.
_SMALL_STACK = 2**20


def layers_at_once(layer: Layer, rows: int) -> int:
    """Return how many layers of this size to measure at once, at most as many as torch's threads.

    Args:
        layer: One of the layers, or one rank's part of it.
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
    """Call a function on each item, several at once, and yield the results in order.

    The threads end with the last item. Torch's thread counts stay as they are, in the calling
    thread and in all others. An item is not kept after its call. If threads cannot be started, the
    calls are made in this thread.
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
    finally:  # also after Ctrl-C: measuring must end before the training goes on
        pool.shutdown(wait=True, cancel_futures=True)


def in_modes() -> bool:
    """Whether this thread is in a torch mode that sees or changes operations.

    Such a mode would also count (FlopCounterMode) or round (quantisation) what is measured.
    """
    return any(count() > 0 for count in _MODES)


# Private names of torch: without them, such modes are not noticed.
_STACKS = ("_len_torch_dispatch_stack", "_len_torch_function_stack")
_MODES = [getattr(torch._C, name) for name in _STACKS if hasattr(torch._C, name)]


def stacks_suffice() -> bool:
    """Whether a thread started now can measure.

    A program may give its threads stacks too small for linear algebra libraries, which then crash.
    """
    return not 0 < threading.stack_size() < _SMALL_STACK


def _start_threads(count: int) -> ThreadPoolExecutor | None:
    """Start threads, each with a part of torch's threads, or return None if that is impossible.

    A system may limit threads and memory, and a program that is ending cannot start any.
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
        if isinstance(error, failures(RuntimeError, MemoryError)):
            return None
        raise
    return pool


def in_pieces(
    measure: Callable[[tuple[Layer, ...]], LayerValues],
    layers: Sequence[tuple[Layer, ...]],
    source_groups: Sequence[frozenset[str]],
    at_once: int,
    *,
    outside: bool = False,
) -> Iterator[LayerValues]:
    """Measure layers, several at once and each in pieces, and yield their values in order.

    Metrics of attention and of hidden states share no view, so they can be measured separately.
    Small pieces come last, so that no thread waits long for the last layer.

    Args:
        measure: Measures a layer or a piece of it, given the parts of all ranks.
        layers: Parts of each layer.
        source_groups: Groups of sources that no metric reads together, the slowest group first.
        at_once: Number of layers at once; 1 measures each layer as a whole.
        outside: Whether to measure in another thread in any case (see `in_threads`). Defaults to
            False.

    Yields:
        The values of each layer, in order.
    """
    if at_once == 1:
        yield from in_threads(measure, layers, at_once, outside=outside)
        return
    pieces = [
        (place, tuple(part.only(sources) for part in parts))
        for number, sources in enumerate(source_groups)
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

    It uses OpenMP's per-thread setting: torch.set_num_threads would also affect threads that the
    training starts later, and MKL's choices.
    """
    with ignored():  # without a limit, the thread is only slower
        torch.get_num_threads()  # a thread adopts torch's setting at its first query
        _openmp().limit(limits=count)


@functools.cache
def _openmp() -> Any:
    """OpenMP libraries of this process; torch and FAISS may each bring one."""
    return threadpoolctl.ThreadpoolController().select(user_api="openmp")
