"""A process that measures readings, so that they do not compete for the training's Python lock.

It runs a program of geomon's own (`worker_program`), never the user's. Rows go through a file in
memory without a name, so that nothing is left behind however the processes end; values come back as
messages.
"""

import contextlib
import mmap
import multiprocessing
import multiprocessing.spawn
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from io import BytesIO
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from geomon.capture import HOST
from geomon.failures import failures

_Result = TypeVar("_Result")

# Folder from which geomon is imported.
_FOLDER = str(Path(__file__).parents[2])
# The program of the process, which imports this module.
PROGRAM = str(Path(__file__).with_name("worker_program.py"))
# Tensors begin at multiples of this many bytes, as in memory that torch allocates.
_ALIGNED = 64
# Threads wait for one another without spinning, unless the user says so: where cores are busy, a
# layer is then measured in a tenth of the time, and the training keeps its cores.
_ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE"}
# Seconds between two looks at whether a process that measures still runs.
_PATIENCE = 1.0


class WorkerError(RuntimeError):
    """The process cannot measure something; the message says why."""


class _Running(NamedTuple):
    """A process that was started by this one, and what the two share."""

    process: subprocess.Popen[bytes]
    connection: Any
    shared: IO[bytes]
    starter: int


class Worker:
    """A process that calls functions, started when it is first needed.

    It ends with the process that started it, however that ends. Calls come from one thread at a
    time. Methods raise WorkerError if something fails; the process is then ended for good.

    Attributes:
        has_failed: Whether something failed.
    """

    def __init__(self) -> None:
        self._running: _Running | None = None
        self._is_ready = False
        self.has_failed = False

    def start(self) -> None:
        """Start the process, unless it runs; this does not wait until it is ready."""
        with self._ending_at_failure():
            if self._running is None:
                self._running = _start()

    def is_ready(self) -> bool:
        """Whether a call does not wait for the process to start."""
        running = self._running
        if running is None or self._is_ready:
            return self._is_ready
        return running.connection.poll() or _has_ended(running)

    def call(self, function: Callable[..., _Result], *args: Any) -> _Result:
        """Call a function in the process, and return its result."""
        with self._ending_at_failure():
            data, buffers = _pickled((function, args))
            self.start()
            assert self._running is not None
            if not self._is_ready:
                _receive(self._running)
                self._is_ready = True
            result: _Result = _call(self._running, data, buffers)
            return result

    @contextlib.contextmanager
    def _ending_at_failure(self) -> Iterator[None]:
        try:
            yield
        except failures() as error:
            self.has_failed = True
            self.close()
            if isinstance(error, WorkerError):
                raise
            raise WorkerError(f"{type(error).__name__}: {error}") from error

    def close(self) -> None:
        """End the process; the next call starts another."""
        running = self._running
        if running is None:
            return
        if running.starter == os.getpid():
            running.process.kill()  # it holds nothing that could be lost
            running.process.wait()
        else:  # a fork, in which a lock of this object may be held forever
            running.process.returncode = 0
        running.connection.close()
        running.shared.close()
        self._running, self._is_ready = None, False


def _start() -> _Running:
    """Start the program, which imports from the same places as this process."""
    python = multiprocessing.spawn.get_executable()
    python = os.fsdecode(python) if python else ""
    name = Path(python).name.lower()
    if getattr(sys, "frozen", False) or not name.startswith(("python", "pypy")):
        raise WorkerError(f"{python or 'this program'} is not an interpreter of Python")
    ours, theirs = multiprocessing.Pipe()
    with theirs, contextlib.ExitStack() as if_it_fails:
        if_it_fails.callback(ours.close)
        shared = if_it_fails.enter_context(_file_in_memory())
        # Python's own options, except that warnings are not errors there.
        options = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        numbers = (theirs.fileno(), shared.fileno(), os.getpid())
        folders = [os.path.abspath(folder) for folder in (*sys.path, _FOLDER)]
        process = subprocess.Popen(
            [
                python, *options, "-P", "-W", "ignore", PROGRAM,
                *map(str, numbers), *folders,
            ],
            pass_fds=numbers[:2], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, env=_ENVIRONMENT | os.environ,
            process_group=0,  # Ctrl-C in a terminal is the training's
        )  # fmt: skip
        if_it_fails.pop_all()
    return _Running(process, ours, shared, os.getpid())


def _file_in_memory() -> IO[bytes]:
    """Open a file without a name, whose memory is freed with the last process that has it open."""
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("geomon"), "w+b", buffering=0)
    return tempfile.TemporaryFile(buffering=0)  # its name is removed at once


def _call(running: _Running, data: bytes, buffers: Sequence[memoryview]) -> Any:
    settings = [get() for get, _ in _SETTINGS]
    places = _write(running.shared.fileno(), buffers)
    running.connection.send_bytes(pickle.dumps((settings, places, data)))
    error, result = pickle.loads(_receive(running))
    if error:
        raise WorkerError(error)
    return result


def _receive(running: _Running) -> bytes:
    """Wait for a message; raises WorkerError if the process ends before."""
    # A fork of this process may hold the other end open, so that a wait would not end by itself.
    while not running.connection.poll(_PATIENCE):
        if _has_ended(running) and not running.connection.poll():
            break
    with contextlib.suppress(EOFError, ConnectionError):
        received: bytes = running.connection.recv_bytes()
        return received
    status = running.process.wait()
    how = f"by signal {-status}" if status < 0 else f"with status {status}"
    raise WorkerError(f"the process ended {how}; the system may lack memory")


def _has_ended(running: _Running) -> bool:
    return running.process.poll() is not None


class _TensorPickler(pickle.Pickler):
    """Pickles tensors of the host as buffers out of band, with their strides."""

    def reducer_override(self, obj: Any) -> Any:
        """Return how to pickle a tensor, or NotImplemented for the usual way."""
        if getattr(obj, "__module__", None) == "__main__":  # which is another program there
            raise pickle.PicklingError(f"{obj!r} is defined in the program that was started")
        if type(obj) is not Tensor or obj.device != HOST or obj.is_sparse or not obj.numel():
            return NotImplemented
        tensor, shape = obj.detach(), tuple(obj.shape)
        steps = zip(shape, tensor.stride(), strict=True)
        span = 1 + sum((size - 1) * stride for size, stride in steps)
        if span > tensor.numel():  # a part of something larger
            tensor, span = tensor.contiguous(), tensor.numel()
        numbers: Any = tensor.as_strided((span,), (1,)).view(torch.uint8).numpy()
        buffer = pickle.PickleBuffer(numbers)
        return _as_tensor, (buffer, tensor.dtype, shape, tensor.stride())


def _pickled(value: object) -> tuple[bytes, list[memoryview]]:
    """Pickle a value; returns its pickle, and the buffers of its tensors."""
    data, buffers = BytesIO(), list[pickle.PickleBuffer]()
    _TensorPickler(data, 5, buffer_callback=buffers.append).dump(value)
    return data.getvalue(), [buffer.raw() for buffer in buffers]


def _as_tensor(
    buffer: memoryview, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]
) -> Tensor:
    return torch.frombuffer(buffer, dtype=dtype).as_strided(shape, stride)


def _write(descriptor: int, buffers: Sequence[memoryview]) -> list[slice]:
    """Write buffers into a file, and return the place of each."""
    places, end = list[slice](), 0
    for buffer in buffers:
        start = end = -(-end // _ALIGNED) * _ALIGNED
        left = buffer
        while left:
            written = os.pwrite(descriptor, left, end)
            left, end = left[written:], end + written
        places.append(slice(start, end))
    os.ftruncate(descriptor, end)
    return places


# -- in the process --------------------------------------------------------------------------------


def serve(connection: int, shared: int) -> None:
    """Call the functions that come, until the process that sends them has ended."""
    channel: Any = Connection(connection)
    channel.send_bytes(b"ready")
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            settings, places, data = pickle.loads(channel.recv_bytes())
            channel.send_bytes(pickle.dumps(_answer(shared, settings, places, data), 5))


def _answer(
    shared: int, settings: Sequence[Any], places: Sequence[slice], data: bytes
) -> tuple[str, Any]:
    """Call a function; returns its error, "" if there was none, and its result."""
    try:
        for (get, apply), value in zip(_SETTINGS, settings, strict=True):
            if get() != value:
                apply(value)
        size = places[-1].stop if places else 0
        rows = memoryview(mmap.mmap(shared, size)) if size else memoryview(b"")
        function, args = pickle.loads(data, buffers=[rows[place] for place in places])
        return "", function(*args)
    except BaseException as error:  # which the caller says, and measures by itself
        return f"{type(error).__name__}: {error}", None


def _precision() -> str:
    """Return how products of float32 are rounded, by the interface that can be read."""
    matmul = getattr(torch.backends.mkldnn, "matmul", None)
    precision = torch.get_float32_matmul_precision() if matmul is None else matmul.fp32_precision
    return str(precision)


def _set_precision(precision: str) -> None:
    matmul = getattr(torch.backends.mkldnn, "matmul", None)
    if matmul is None:  # before torch 2.9
        torch.set_float32_matmul_precision(precision)
    else:
        matmul.fp32_precision = precision


# Settings of a process that values depend on, at least in their last bits.
_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    (_precision, _set_precision),
)


__all__ = ["Worker", "WorkerError", "serve"]
