"""Settings and names of runs in words: formats the description of a run, and compares two."""

import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from geomon.record import Readings, printable

# Keys of a description that are not settings.
OF_A_START = ("time", "from_step")
# Largest number of letters of a setting in a line.
_MOST_LETTERS = 60


def setting_words(name: str, value: Any) -> str:
    """Format a setting, with the length of a list; None stands for a setting without a record.

    Example:
        >>> setting_words("layers", ["a", "b"]), setting_words("tokens", 4096)
        ('2: a, b', '4,096')
    """
    if value is None:
        return "not recorded"
    if name == "time" and isinstance(value, int | float) and 0 <= value < 2**40:
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(value))
    if isinstance(value, list | dict):
        texts = list(map(str, value))
        return printable(f"{len(texts)}: " + ", ".join(texts))
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return printable(str(value))


def describe_settings(first: Readings, second: Readings) -> str:
    """List in one line the settings where two records differ; return "" if all agree."""
    if not (first.runs and second.runs):
        return ""
    one, other = first.runs[-1], second.runs[-1]
    differing = [
        f"{printable(name)} {_both(name, one.get(name), other.get(name))}"
        for name in {**one, **other}
        if name not in OF_A_START and one.get(name) != other.get(name)
    ]
    return f"the records differ in {', '.join(differing)}" if differing else ""


def _both(name: str, one: Any, other: Any) -> str:
    """Format two different settings, whose texts may look equal after shortening."""
    words = (setting_words(name, value) for value in (one, other))
    short = [x if len(x) <= _MOST_LETTERS else f"{x[:_MOST_LETTERS]} ..." for x in words]
    return " and ".join(short) if short[0] != short[1] else f"({short[0]}, with other values)"


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
