"""The record that a page is made of, or one line on why it cannot be."""

from pathlib import Path

from geomon.record import Readings, read


def load(directory: Path, stack: str | None = None) -> Readings:
    """Read one stack of a record that has at least one reading.

    Args:
        directory: Folder of the run, or the path of its file.
        stack: Name of the stack, for a model with several; None for the main one.

    Raises:
        FileNotFoundError: The folder holds no record.
        ValueError: The file is not a record, has no readings, or its model no such stack.
    """
    return load_all(directory).of_stack(stack)


def load_all(directory: Path) -> Readings:
    """Read all stacks of a record that has at least one reading.

    Args:
        directory: Folder of the run, or the path of its file.

    Raises:
        FileNotFoundError: The folder holds no record.
        ValueError: The file is not a record, or has no readings.
    """
    readings = read(directory)
    if not len(readings):
        why = [*readings.remarks(), "try again when the run has begun"][0]
        raise ValueError(f"no readings yet in {directory}: {why}")
    return readings
