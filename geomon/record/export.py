"""Values of a run in long form, a row for each: for pandas, CSV and Parquet."""

import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from geomon.record.columns import places_of
from geomon.record.reading import Reading, Readings

if TYPE_CHECKING:
    import pandas

# None is the name of a method of a data frame, as "head" and "stack" are.
COLUMNS = ("step", "source", "metric", "stack_name", "layer", "head_index", "part", "value")
_TEXTS = ("source", "metric", "stack_name", "part")
# What a spreadsheet takes for the beginning of a formula.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def to_pandas(readings: Readings) -> "pandas.DataFrame":
    """Build a data frame with a row for each value (see `Readings.to_pandas`).

    Args:
        readings: Readings of a run.

    Raises:
        ImportError: pandas is missing.
    """
    try:
        import pandas
    except ImportError as error:
        raise ImportError("to_pandas needs pandas: pip install 'geomon[export]'") from error
    columns: dict[str, list[Any]] = {name: [] for name in COLUMNS}
    appends = [columns[name].append for name in COLUMNS]
    for reading in readings:
        for row in _rows(reading):
            for append, field in zip(appends, row, strict=True):
                append(field)
    kinds = dict.fromkeys(_TEXTS, "category") | {"layer": "Int32", "head_index": "Int32"}
    kinds |= {"step": "int64", "value": "float64"}
    # A column at a time, so that its list is freed: a large run has tens of millions of values.
    return pandas.DataFrame(
        {name: pandas.Series(columns.pop(name), dtype=kinds[name]) for name in COLUMNS}
    )


def _rows(reading: Reading) -> Iterator[tuple[Any, ...]]:
    """List the values of a reading with what they are of, in the order of `COLUMNS`."""
    first = reading.step, reading.source
    for stack, columns in reading.stacks.items():
        for metric, column in columns.items():
            for place in places_of(metric, column, stack):
                head = place.head if place.kind == "head" else None
                kind = place.kind if place.kind in ("margin", "min", "max") else place.name
                part = "/".join(filter(None, (place.part, kind)))
                value = place.find(reading.stacks)
                yield *first, metric, stack, place.layer, head, part, value
    of_run = {("training", name): value for name, value in reading.training.items()}
    of_run["geomon", "seconds"] = reading.seconds
    if not math.isnan(reading.overhead):
        of_run["geomon", "overhead"] = reading.overhead
    for (group, name), value in of_run.items():
        yield *first, group, "", None, None, name, value


def export(readings: Readings, out: str | os.PathLike[str]) -> Path:
    """Write the values of a run in long form to a file.

    In CSV, text that a spreadsheet would take for a formula has an apostrophe before it.

    Args:
        readings: Readings of a run.
        out: Path of the file, which ends in .csv or .parquet; folders above it are made.

    Returns:
        The path.

    Raises:
        ValueError: The path has another ending.
        ImportError: pandas is missing, or pyarrow for Parquet.
    """
    path = Path(out)
    writers: dict[str, Callable[[pandas.DataFrame, Path], None]] = {
        ".csv": _write_csv,
        ".parquet": _write_parquet,
    }
    if path.suffix not in writers:
        raise ValueError(
            f"values are written to a file that ends in .csv or .parquet, got {path.suffix!r}"
        )
    frame = to_pandas(readings)
    path.parent.mkdir(parents=True, exist_ok=True)
    writers[path.suffix](frame, path)
    return path


def _write_csv(frame: "pandas.DataFrame", path: Path) -> None:
    safe = {
        name: frame[name].cat.rename_categories(
            lambda text: f"'{text}" if text.startswith(_FORMULA) else text
        )
        for name in _TEXTS
    }
    frame.assign(**safe).to_csv(path, index=False, encoding="utf-8")


def _write_parquet(frame: "pandas.DataFrame", path: Path) -> None:
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise ImportError("Parquet needs pyarrow: pip install 'geomon[export]'") from error
    frame.to_parquet(path, engine="pyarrow", index=False)


__all__ = ["COLUMNS", "export", "to_pandas"]
