"""The program of a process that measures, run by its path: nothing of the user's is imported.

Its arguments are the descriptors of a connection and of a file in memory, the process that started
it, and the folders to import from.
"""

import contextlib
import os
import signal
import sys
import threading
import time

# Signals that a terminal or a scheduler sends to all processes: they are the training's.
_IGNORED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
# The training comes first, and if memory is short, this process is ended before it.
_NICE, _FIRST_TO_GO = 5, "500"
# Seconds between two looks at whether the training still runs.
_INTERVAL = 0.25


def _main() -> None:
    connection, shared, training = map(int, sys.argv[1:4])
    sys.path[:] = sys.argv[4:]
    threading.Thread(target=_end_with, args=(training,), daemon=True).start()
    for name in _IGNORED:
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(_NICE)
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write(_FIRST_TO_GO)

    from geomon.monitor.worker import serve

    serve(connection, shared)
    os._exit(0)


def _end_with(training: int) -> None:
    """End with the process of the training, even if a fork of it holds the connection open."""
    while os.getppid() == training:
        time.sleep(_INTERVAL)
    os._exit(0)


if __name__ == "__main__":
    _main()
