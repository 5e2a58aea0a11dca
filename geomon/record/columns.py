"""Values of a reading as one array, and their short form in a line of the record.

A large model has thousands of values in a reading, most of them of single layers and heads. With
its tag each takes some 50 characters of JSON, and parsing them takes minutes for a long run. In the
short form the tags of layers stand in blocks, products of metrics, layers and parts, and their
values as 64 bit numbers in base64, with a checksum: a fifth of the length, exact to the last bit.
"""

import binascii
import functools
import json
import math
import reprlib
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from geomon.record import tags

_Array = NDArray[np.float64]

# Values of layers from which on a line has the short form; with fewer, every value stands beside
# its tag, for people and other programs to read.
SHORT_FROM = 2000
# More values than a line of a record can hold: a layout that says so is not expanded.
_MOST = 2**23
_STORED = "<f8"


class Layout:
    """Tags of a reading with the positions of their values, shared by readings of the same tags.

    Attributes:
        tags: Tags in the order of the values.
        index: Position of each tag.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self.tags = names
        self.index = {name: position for position, name in enumerate(names)}
        self._found: tuple[tuple[str, ...], tuple[NDArray[np.intp], NDArray[np.intp]]] | None = None

    def positions(self, names: tuple[str, ...]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Find tags: which of the given names there are, and the positions of their values.

        The last answer is kept: the readings of a run are asked for the same names in turn.

        Args:
            names: Tags, of which some may be missing.
        """
        if self._found is None or self._found[0] != names:
            pairs = [(i, self.index[name]) for i, name in enumerate(names) if name in self.index]
            found = np.array(pairs, dtype=np.intp).reshape(-1, 2)
            self._found = names, (found[:, 0], found[:, 1])
        return self._found[1]


class Values(Mapping[str, float]):
    """Mapping from tags to values that keeps the values in one array.

    Args:
        layout: Tags of the values.
        array: The values, float64 [tags]; NaN where there is none.
    """

    __slots__ = ("array", "layout")

    def __init__(self, layout: Layout, array: _Array) -> None:
        self.layout = layout
        self.array = array

    @classmethod
    def of(cls, values: Mapping[str, float]) -> "Values":
        """Return the values of a mapping; those of a `Values` as they are."""
        if isinstance(values, cls):
            return values
        numbers = np.fromiter(values.values(), dtype=np.float64, count=len(values))
        return cls(layout_of(tuple(values)), numbers)

    def __getitem__(self, tag: str) -> float:
        """Return the value of a tag."""
        return float(self.array[self.layout.index[tag]])

    def get(self, tag: str, default: Any = None) -> Any:
        """Return the value of a tag, or the default where there is none."""
        position = self.layout.index.get(tag)
        return default if position is None else float(self.array[position])

    def __contains__(self, tag: object) -> bool:
        return tag in self.layout.index

    def __iter__(self) -> Iterator[str]:
        return iter(self.layout.tags)

    def __len__(self) -> int:
        return len(self.layout.tags)

    def __repr__(self) -> str:
        return reprlib.repr(dict(self))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mapping):
            return NotImplemented
        return dict(self) == dict(other)

    __hash__ = None  # type: ignore[assignment]

    def __deepcopy__(self, memo: dict[int, Any]) -> "Values":
        return type(self)(self.layout, self.array.copy())

    def select(self, positions: Sequence[int], layout: Layout) -> "Values":
        """Return the values at some positions, under the tags of another layout.

        Args:
            positions: Positions of the values.
            layout: As many tags.
        """
        return type(self)(layout, self.array[list(positions)])


@functools.lru_cache(maxsize=256)
def layout_of(names: tuple[str, ...]) -> Layout:
    """Return the layout of tags, the same object for the same tags.

    Args:
        names: The tags.
    """
    return Layout(names)


class Block(NamedTuple):
    """Tags that are a product: each metric at each place with each part, in this order.

    Attributes:
        metrics: Names of metrics.
        places: Layers, with their stack: "layer_03".
        parts: What stands after the place: "" for the value itself, "/std", "/head_1".
    """

    metrics: tuple[str, ...]
    places: tuple[str, ...]
    parts: tuple[str, ...]

    @property
    def size(self) -> int:
        """Number of tags."""
        return math.prod(map(len, self))

    def tags(self) -> Iterator[str]:
        """Build the tags."""
        for metric in self.metrics:
            for place in self.places:
                yield from (f"{metric}/{place}{part}" for part in self.parts)


def write_values(values: Mapping[str, float]) -> dict[str, Any]:
    """Build what a line holds of the values of a reading: "values", and "packed" where it is short.

    Args:
        values: Values by tag; those that are not finite are written as missing.
    """
    names, blocks, positions = _split(tuple(values))
    if len(positions) < SHORT_FROM:
        names, blocks = tuple(values), ()
    content: dict[str, Any] = {
        "values": {tag: _finite(values[tag]) for tag in names},
    }
    if blocks:
        array = Values.of(values).array[positions]
        data = np.where(np.isfinite(array), array, np.nan).astype(_STORED).tobytes()
        content["packed"] = {
            "tags": blocks,
            "crc32": zlib.crc32(data),
            "float64": binascii.b2a_base64(data, newline=False).decode(),
        }
    return content


# What stands before and behind the numbers of a line in the short form.
_NUMBERS, _BEHIND = b'"float64": "', b'"}}'


def parse_json(line: bytes) -> Any:
    """Parse the JSON of a line of a record.

    Nine tenths of a line in the short form are one text. It is cut out before the JSON is parsed
    and put into the result as bytes, which spares two copies of it and a search for its end.

    Args:
        line: Whole line, in UTF-8.

    Raises:
        ValueError: The line is no JSON.
        RecursionError: It is nested too deeply.
    """
    start = line.find(_NUMBERS) + len(_NUMBERS)
    end = line.find(b'"', start)
    if start >= len(_NUMBERS) and line[end:].rstrip() == _BEHIND and b"\\" not in line[start:end]:
        content = _parse(line[:start] + _BEHIND)
        packed = content.get("packed") if isinstance(content, dict) else None
        if isinstance(packed, dict) and packed.get("float64") == "":
            packed["float64"] = line[start:end]
            return content
    return _parse(line)


def _parse(line: bytes) -> Any:
    return json.loads(line.decode(), parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def read_values(content: Mapping[str, Any]) -> Values:
    """Build the values of a reading from the parsed JSON of its line.

    Args:
        content: "values", an object of numbers and nulls; "packed" where the line is short.

    Raises:
        ValueError: "packed" is not what `write_values` builds.
    """
    plain: Mapping[str, float | None] = content["values"]
    numbers = np.array(list(plain.values()), dtype=np.float64)  # None becomes NaN
    if "packed" not in content:
        return Values(layout_of(tuple(plain)), numbers)
    packed = content["packed"]
    if not isinstance(packed, dict):
        raise ValueError(f"'packed' is {reprlib.repr(packed)}, expected an object")
    blocks = _check_blocks(packed.get("tags"))
    array = _decode(packed, sum(block.size for block in blocks))
    return Values(_joined(tuple(plain), blocks), np.concatenate([numbers, array]))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


@functools.lru_cache(maxsize=64)
def _split(
    names: tuple[str, ...],
) -> tuple[tuple[str, ...], tuple[Block, ...], NDArray[np.intp]]:
    """Split tags into those of no layer and blocks, with the positions of the blocks' tags."""
    places: dict[str, dict[str, list[str]]] = {}  # by metric and place, the parts
    others = []
    for name in names:
        tag = tags.parse(name)
        if tag is None or tag.layer is None:
            others.append(name)
            continue
        metric, _, rest = name.partition("/")
        place, slash, part = rest.partition("/")
        places.setdefault(metric, {}).setdefault(place, []).append(slash + part)
    metrics: dict[tuple[tuple[str, ...], tuple[str, ...]], list[str]] = {}
    for metric, parts_of in places.items():
        alike: dict[tuple[str, ...], list[str]] = {}
        for place, parts in parts_of.items():
            alike.setdefault(tuple(parts), []).append(place)
        for parts_alike, at in alike.items():
            metrics.setdefault((tuple(at), parts_alike), []).append(metric)
    blocks = tuple(Block(tuple(m), at, parts) for (at, parts), m in metrics.items())
    index = layout_of(names).index
    order = [index[tag] for block in blocks for tag in block.tags()]
    return tuple(others), blocks, np.array(order, dtype=np.intp)


class _Known:
    """The blocks that were checked last: the lines of a run say the same again and again."""

    content: object = None
    blocks: tuple[Block, ...] = ()


def _check_blocks(content: object) -> tuple[Block, ...]:
    """Return the blocks that the JSON of a line describes, checked."""
    if content is None or content != _Known.content:
        _Known.blocks = _blocks_of(content)
        _Known.content = content
    return _Known.blocks


def _blocks_of(content: object) -> tuple[Block, ...]:
    expected = "expected lists of metrics, places and parts"
    if not isinstance(content, list):
        raise ValueError(f"the tags of 'packed' are {reprlib.repr(content)}, {expected}")
    blocks = []
    for block in content:
        right = (
            isinstance(block, list)
            and len(block) == len(Block._fields)
            and all(isinstance(part, list) for part in block)
            and all(isinstance(name, str) for part in block for name in part)
        )
        if not right:
            raise ValueError(f"a block of 'packed' is {reprlib.repr(block)}, {expected}")
        blocks.append(Block(*map(tuple, block)))
    return tuple(blocks)


def _decode(packed: Mapping[str, Any], count: int) -> _Array:
    """Decode the numbers of a line, and check that they are those that were written."""
    text: Any = packed.get("float64")
    checksum = packed.get("crc32")
    is_text = isinstance(text, str | bytes)
    if not is_text or isinstance(checksum, bool) or not isinstance(checksum, int):
        raise ValueError("'packed' has no 'float64' and 'crc32', expected text and a number")
    try:
        data = binascii.a2b_base64(text, strict_mode=True)
    except (ValueError, binascii.Error):
        raise ValueError("'float64' is no text in base64") from None
    if count > _MOST or len(data) != count * np.dtype(_STORED).itemsize:
        raise ValueError(
            f"'float64' has {len(data):,} bytes, expected 8 for each of {count:,} tags"
        )
    if zlib.crc32(data) != checksum:
        raise ValueError("'float64' has another checksum than 'crc32' says")
    array = np.frombuffer(data, dtype=_STORED).astype(np.float64)
    if np.isinf(array).any():
        raise ValueError("'float64' holds infinity, expected numbers")
    return array


@functools.lru_cache(maxsize=256)
def _joined(plain: tuple[str, ...], blocks: tuple[Block, ...]) -> Layout:
    """Return the layout of the plain tags of a line and those of its blocks."""
    layout = layout_of((*plain, *(tag for block in blocks for tag in block.tags())))
    if len(layout.index) < len(layout.tags):
        raise ValueError("it has two values of one tag")
    return layout


def distinct_layouts(values: Iterable[Mapping[str, float]]) -> Iterator[tuple[str, ...]]:
    """List the tags of mappings, those of the same layout once.

    Args:
        values: Values of readings.

    Yields:
        Tags of one of them.
    """
    seen: set[int] = set()
    for mapping in values:
        if isinstance(mapping, Values):
            if id(mapping.layout) in seen:
                continue
            seen.add(id(mapping.layout))
        yield tuple(mapping)


__all__ = [
    "SHORT_FROM",
    "Layout",
    "Values",
    "distinct_layouts",
    "layout_of",
    "parse_json",
    "read_values",
    "write_values",
]
