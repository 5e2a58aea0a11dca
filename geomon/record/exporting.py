"""Export the values of a run in long form, one row per value, as CSV or Parquet."""

import os
from pathlib import Path

from geomon.advice import to_install
from geomon.record.reading import COLUMNS, Readings

# First characters of text that a spreadsheet reads as a formula.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def export(readings: Readings, out: str | os.PathLike[str]) -> Path:
    """Write the values of a run in long form to a file.

    In CSV, text that a spreadsheet would read as a formula gets an apostrophe in front.

    Args:
        readings: Readings of a run.
        out: Path of the file, ending in .csv or .parquet. Missing folders are created.

    Returns:
        The path.

    Raises:
        ValueError: If the path has another ending.
        ImportError: If pandas is missing, or pyarrow for Parquet.
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
        raise ImportError(f"Parquet needs pyarrow: {to_install('export')}") from error
    return path


def _safe(text: str) -> str:
    return f"'{text}" if text.startswith(_FORMULA) else text


__all__ = ["export"]
