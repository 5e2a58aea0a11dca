"""Values of a run in long form, a row for each, as a file of CSV or Parquet."""

import os
from pathlib import Path

from geomon.record.reading import COLUMNS, Readings

# What a spreadsheet takes for the beginning of a formula.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


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
    if path.suffix not in (".csv", ".parquet"):
        raise ValueError(
            f"values are written to a file that ends in .csv or .parquet, got {path.suffix!r}"
        )
    frame = readings.to_pandas()
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".csv":
        for name in (name for name, kind in COLUMNS.items() if kind == "category"):
            frame[name] = frame[name].cat.rename_categories(_safe)
        frame.to_csv(path, index=False, encoding="utf-8")
        return path
    try:
        frame.to_parquet(path, engine="pyarrow", index=False)
    except ImportError as error:
        raise ImportError("Parquet needs pyarrow: pip install 'geomon[export]'") from error
    return path


def _safe(text: str) -> str:
    return f"'{text}" if text.startswith(_FORMULA) else text


__all__ = ["export"]
