"""Reads the records that pages are made from, or says in one line why a page cannot be made."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from geomon.record import Readings, read
from geomon.record.printable import printable


def load(directory: Path, stack: str | None = None) -> Readings:
    """Read one stack of a record that has at least one reading.

    Args:
        directory: Folder of the run, or the path of its file.
        stack: Name of the stack. Defaults to None, the main one.

    Raises:
        ValueError: If the record is still empty, or if the model has no such stack.
    """
    return load_all(directory).of_stack(stack)


def load_all(directory: Path) -> Readings:
    """Read all stacks of a record that has at least one reading."""
    readings = read(directory)
    if not readings:
        why = [*readings.remarks(), "try again when the run has begun"][0]
        raise ValueError(f"no readings yet in {directory}: {why}")
    return readings


def name_runs(paths: Iterable[Path]) -> list[str]:
    """Name runs by the shortest ends of their folders' paths that tell them apart.

    Example:
        >>> name_runs([Path("runs/a"), Path("runs/b")]), name_runs([Path("x/run"), Path("y/run")])
        (['a', 'b'], ['x/run', 'y/run'])
    """
    folders = [path.absolute() for path in paths]
    folders = [path.parent if path.suffix == ".jsonl" else path for path in folders]
    names: list[str] = []
    for length in range(1, max((len(path.parts) for path in folders), default=0) + 1):
        names = [printable(Path(*path.parts[-length:]).as_posix()) for path in folders]
        if len(set(names)) == len(set(folders)):
            break
    same, seen = Counter(names), Counter[str]()
    for place, name in enumerate(names):
        if same[name] > 1:
            seen[name] += 1
            names[place] = f"{name} ({seen[name]})"
    return names
