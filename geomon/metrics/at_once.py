"""Layers at once: how many are measured beside one another, each with a part of the threads.

Operations on 4,096 rows of width 128 are too short to be shared out: with all threads for each of
them, all but one mostly wait. So each thread measures a layer of its own. Wide layers are measured
in turn, with all threads for each operation.
"""

import contextlib
import functools
import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

import threadpoolctl  # type: ignore[import-untyped]
import torch

from geomon.capture.snapshot import Layer

_Item = TypeVar("_Item")
_Found = TypeVar("_Found")

# Numbers in the rows of a layer for which one more thread pays: 4,096 rows of width 1,024.
_NUMBERS = 4_194_304
# More threads wait for one another: Python lets only one of them choose the next operation. Each
# layer that is measured takes memory beside its rows.
_MOST = 8
# Bytes of a thread's stack with which libraries of linear algebra end the process, with room above.
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
    function: Callable[[_Item], _Found], items: Iterable[_Item], at_once: int
) -> Iterator[_Found]:
    """Call a function on each item, several at once; yields what it returns, in order.

    The threads end with the last item. The number of threads that torch uses in the thread that
    calls, and in every other one, stays as it is. An item is not kept after its call. Where no
    thread can be had, the calls are made in this one.

    Args:
        function: What is done with an item.
        items: The items.
        at_once: Largest number of items at once.

    Raises:
        Exception: What the function raised for the first item that failed, once those that have
            begun are done; later ones are not begun.
    """
    left = deque(items)
    del items
    count = min(at_once, len(left))
    if count > 1 and _can_share_threads():
        yield from _beside_one_another(function, left, count)
    while left:
        yield function(left.popleft())


def start_thread(work: Callable[[], object], number: int = 0) -> threading.Thread | None:
    """Start a thread that measures; None where none can be had, which costs no more than time.

    A system limits the processes and the memory of its users, a program may give its threads stacks
    that are too small for linear algebra, and at its end none are started any more.

    Args:
        work: What the thread does.
        number: Number of the thread, for its name.
    """
    if 0 < threading.stack_size() < _SMALL_STACK:
        return None
    thread = threading.Thread(target=work, name=f"geomon_{number}")
    try:
        thread.start()
    except (RuntimeError, MemoryError):
        return None
    return thread


def _beside_one_another(
    function: Callable[[_Item], _Found], left: deque[_Item], count: int
) -> Iterator[_Found]:
    """Call a function on each item in threads; where none can be started, all items are left."""
    share = max(1, torch.get_num_threads() // count)
    results: deque[Future[_Found]] = deque(Future() for _ in left)
    waiting = deque(zip(results, left, strict=True))
    work = functools.partial(_work_off, function, waiting, share)
    threads: list[threading.Thread] = []
    try:
        while len(threads) < count:
            thread = start_thread(work, len(threads))
            if thread is None:
                break
            threads.append(thread)
        if not threads:
            return
        left.clear()
        while results:
            yield results.popleft().result()
    finally:  # after Ctrl-C too: nobody measures when the training goes on
        waiting.clear()
        for thread in threads:
            thread.join()


def _work_off(
    function: Callable[[_Item], _Found],
    waiting: deque[tuple[Future[_Found], _Item]],
    threads: int,
) -> None:
    """Call a function on the items that wait, one after another, with a number of threads each."""
    with contextlib.suppress(Exception):  # with more threads for each it takes longer, no more
        _limit_threads(threads)
    while True:
        try:
            future, item = waiting.popleft()
        except IndexError:
            return
        try:
            future.set_result(function(item))
        except BaseException as error:  # for the thread that waits
            future.set_exception(error)
        del future, item


def _can_share_threads() -> bool:
    """Whether the threads of operations can be shared out among threads that measure."""
    try:
        _openmp()
    except Exception:  # what it finds out of the system's libraries is not the same everywhere
        return False
    return True


def _limit_threads(count: int) -> None:
    """Limit the threads of operations that this thread starts.

    By OpenMP's own setting, which belongs to a thread: torch.set_num_threads would change what
    threads of the training get that start later, and how MKL chooses.
    """
    torch.get_num_threads()  # at its first question a thread takes torch's setting over
    _openmp().limit(limits=count)


@functools.cache
def _openmp() -> Any:
    """The OpenMP libraries of this process: torch and FAISS may each bring one."""
    return threadpoolctl.ThreadpoolController().select(user_api="openmp")
