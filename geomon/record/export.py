"""Values of a run in long form, a row for each: for pandas, CSV and Parquet."""

import csv
import functools
import io
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from geomon.record import tags
from geomon.record.columns import Layout, Values
from geomon.record.reading import Reading, Readings

if TYPE_CHECKING:
    import pandas

COLUMNS = ("step", "source", "metric", "stack", "layer", "head", "part", "value")
# Values that are written at once: a large run has tens of millions.
_ROWS = 2**20
_NONE = -1  # of layer and head


class _Place(NamedTuple):
    """What the tags of a layout say, by value.

    Attributes:
        texts: Codes and names of the columns metric, stack and part.
        layer: Number of the layer, -1 for none.
        head: Number of the head, -1 for none.
    """

    texts: dict[str, tuple[NDArray[np.int32], list[str]]]
    layer: NDArray[np.int32]
    head: NDArray[np.int32]


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
    frames = [_frame(part) for part in _parts(readings.readings)] or [_frame([])]
    texts = [name for name in COLUMNS if name not in ("step", "layer", "head", "value")]
    for name in texts:  # frames that are joined keep categories that are the same
        every = pandas.api.types.union_categoricals([frame[name] for frame in frames])
        for frame in frames:
            frame[name] = frame[name].cat.set_categories(every.categories)
    return pandas.concat(frames, ignore_index=True)


def export(readings: Readings, out: str | os.PathLike[str]) -> Path:
    """Write the values of a run in long form to a file.

    Args:
        readings: Readings of a run.
        out: Path of the file, which ends in .csv or .parquet; folders above it are made.

    Returns:
        The path.

    Raises:
        ValueError: The path has another ending.
        ImportError: pyarrow is missing, for Parquet.
    """
    path = Path(out)
    writers = {".csv": _write_csv, ".parquet": _write_parquet}
    if path.suffix not in writers:
        raise ValueError(
            f"values are written to a file that ends in .csv or .parquet, got {path.suffix!r}"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    writers[path.suffix](readings, path)
    return path


def _write_csv(readings: Readings, path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        file.write(_csv_text(COLUMNS))
        for reading in readings:
            values = Values.of(reading.values)
            first = _csv_text((reading.step, reading.source)).removesuffix(_END)
            # Written by hand: the writer of the standard library takes three times as long.
            file.write(
                "".join(
                    [
                        f"{first},{place},{_END if math.isnan(value) else f'{value!r}{_END}'}"
                        for place, value in zip(
                            _csv_places(values.layout), values.array.tolist(), strict=True
                        )
                    ]
                )
            )


_END = "\r\n"  # of a line of CSV, RFC 4180


def _csv_text(fields: Iterable[object]) -> str:
    """Format fields as a line of CSV, in quotes where it needs them."""
    text = io.StringIO(newline="")
    csv.writer(text).writerow(fields)
    return text.getvalue()


@functools.lru_cache(maxsize=64)
def _csv_places(layout: Layout) -> list[str]:
    """Format metric, stack, layer, head and part of each tag as fields of CSV."""
    return [_csv_text(row).removesuffix(_END) for row in _rows(layout)]


def _write_parquet(readings: Readings, path: Path) -> None:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ImportError("Parquet needs pyarrow: pip install 'geomon[export]'") from error
    text = pyarrow.dictionary(pyarrow.int32(), pyarrow.string())
    kinds = dict.fromkeys(COLUMNS, text)
    kinds |= {"step": pyarrow.int64(), "value": pyarrow.float64()}
    kinds |= {"layer": pyarrow.int32(), "head": pyarrow.int32()}
    schema = pyarrow.schema(list(kinds.items()))

    def convert(name: str, column: _Column) -> Any:
        if isinstance(column, tuple):
            codes = pyarrow.array(column[0], pyarrow.int32())
            return pyarrow.DictionaryArray.from_arrays(codes, pyarrow.array(column[1]))
        missing = {"layer": _NONE, "head": _NONE}.get(name)
        mask = np.isnan(column) if missing is None else column == missing
        return pyarrow.array(column, kinds[name], mask=mask)

    @functools.lru_cache(maxsize=1)
    def of_tags(layout: Layout, count: int) -> dict[str, Any]:
        return {name: convert(name, column) for name, column in _of_tags(layout, count).items()}

    # Of numbers of noise neither a dictionary nor a range is of use, and both take their time.
    coded = [name for name in kinds if name not in ("step", "value")]
    with parquet.ParquetWriter(
        path, schema, use_dictionary=coded, write_statistics=["step"]
    ) as writer:
        for part in _parts(readings.readings):
            arrays = {name: convert(name, column) for name, column in _of_readings(part).items()}
            arrays |= of_tags(_layout(part), len(part))
            table = pyarrow.Table.from_arrays([arrays[name] for name in kinds], schema=schema)
            writer.write_table(table)


def _parts(readings: Sequence[Reading]) -> Iterator[list[Reading]]:
    """Split readings that have values into parts of the same tags, of bounded size."""
    part: list[Reading] = []
    rows = 0
    for reading in readings:
        layout = Values.of(reading.values).layout
        if not layout.tags:  # no row; and no names, which pandas would take for another kind
            continue
        other = part and Values.of(part[-1].values).layout is not layout
        if other or (rows + len(layout.tags) > _ROWS and part):
            yield part
            part, rows = [], 0
        part.append(reading)
        rows += len(layout.tags)
    if part:
        yield part


# A column of numbers, or the codes and names of one of texts.
_Column = NDArray[Any] | tuple[NDArray[np.int32], list[str]]


def _layout(part: Sequence[Reading]) -> Layout:
    return Values.of(part[0].values).layout if part else Layout(())


def _of_readings(part: Sequence[Reading]) -> dict[str, _Column]:
    """Build the columns that differ between readings of the same tags."""
    size = len(_layout(part).tags)
    values = [Values.of(reading.values).array for reading in part]
    sources = list(dict.fromkeys(reading.source for reading in part))
    codes = np.array([sources.index(reading.source) for reading in part], dtype=np.int32)
    return {
        "step": np.repeat(np.array([reading.step for reading in part], dtype=np.int64), size),
        "source": (np.repeat(codes, size), sources),
        "value": np.concatenate(values) if values else np.empty(0),
    }


def _of_tags(layout: Layout, count: int) -> dict[str, _Column]:
    """Build the columns that are the same for each reading, for a number of readings."""
    place = _place(layout)
    columns: dict[str, _Column] = {
        "layer": np.tile(place.layer, count),
        "head": np.tile(place.head, count),
    }
    for name, (codes, names) in place.texts.items():
        columns[name] = np.tile(codes, count), names
    return columns


def _columns(part: Sequence[Reading]) -> dict[str, _Column]:
    """Build all columns of readings that have the same tags."""
    columns = _of_readings(part) | _of_tags(_layout(part), len(part))
    return {name: columns[name] for name in COLUMNS}


def _frame(part: Sequence[Reading]) -> "pandas.DataFrame":
    import pandas

    content: dict[str, Any] = {}
    for name, column in _columns(part).items():
        if isinstance(column, tuple):
            content[name] = pandas.Categorical.from_codes(column[0], column[1])
        elif name in ("layer", "head"):
            content[name] = pandas.arrays.IntegerArray(column, column == _NONE)
        else:
            content[name] = column
    return pandas.DataFrame(content)


@functools.lru_cache(maxsize=64)
def _rows(layout: Layout) -> list[tuple[str, str, int | str, int | str, str]]:
    """Metric, stack, layer, head and part of each tag; "" for what it does not name."""
    rows: list[tuple[str, str, int | str, int | str, str]] = []
    for name in layout.tags:
        tag = tags.parse(name)
        if tag is None:  # the loss, a null: what stands behind the group is its part
            metric, _, part = name.partition("/")
            rows.append((metric, "", "", "", part))
            continue
        layer = "" if tag.layer is None else tag.layer
        head = "" if tag.head is None else tag.head
        rows.append((tag.metric, tag.stack, layer, head, tag.part))
    return rows


@functools.lru_cache(maxsize=64)
def _place(layout: Layout) -> _Place:
    rows = _rows(layout)
    texts = {}
    for name, at in (("metric", 0), ("stack", 1), ("part", 4)):
        known = {text: code for code, text in enumerate(dict.fromkeys(row[at] for row in rows))}
        codes = np.array([known[row[at]] for row in rows], dtype=np.int32)
        texts[name] = codes, [str(text) for text in known]
    layer, head = (
        np.array([_NONE if row[at] == "" else row[at] for row in rows], dtype=np.int32)
        for at in (2, 3)
    )
    return _Place(texts, layer, head)


__all__ = ["COLUMNS", "export", "to_pandas"]
