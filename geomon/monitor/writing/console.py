"""Messages in the terminal: a line each, for programs that have set up no log of their own."""

import logging
import sys


class Console(logging.Handler):
    """Prints messages to the standard error, one line each, above a progress bar.

    Where the program has handlers of its own, these show the messages, and nothing is printed.
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Print a message after the name of its logger: "geomon: ..."."""
        own = logging.getLogger(record.name.partition(".")[0]).handlers
        if logging.getLogger().handlers or any(handler is not self for handler in own):
            return
        try:
            line = f"{record.name}: {' '.join(record.getMessage().split())}"
            bars = sys.modules.get("tqdm")
            if bars is None:
                sys.stderr.write(f"{line}\n")
            else:  # takes bars away, and draws them again below the line
                bars.tqdm.write(line, file=sys.stderr)
        except Exception:  # a closed stream: no message ends a training
            self.handleError(record)


_CONSOLE = Console()


def print_log() -> None:
    """Have the log of geomon printed; called by every monitor, with an effect once."""
    logging.getLogger("geomon").addHandler(_CONSOLE)


__all__ = ["Console", "print_log"]
