"""Tags: the names under which values are recorded and charted. Built here and nowhere else.

`<metric>/layer_03`, `<metric>/mean` over the layers without layer 0, `<metric>/layer_03/head_1`,
and parts of either: `twonn/layer_03/std`, `gride/mean/k32`, `qk_cosine/layer_03/min`. A model with
several stacks of blocks names each: `twonn/encoder_layer_03`, `twonn/encoder_mean`.
"""

import functools
import re
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

MEAN = "mean"
SECONDS = "geomon/seconds"
OVERHEAD = "geomon/overhead"

# Parts that say how far a layer's value can be trusted: charts of them for every layer would bury
# the values, so sinks get those of the mean alone. The record holds them all.
_TRUST = frozenset({"std", "n", "duplicates", "repeated", "rounding", "error"})


def layer_tag(metric: str, layer: int, part: str = "") -> str:
    """Tag of a metric at a layer, or of one part of it.

    Example:
        >>> layer_tag("twonn", 3, "std")
        'twonn/layer_03/std'
    """
    return "/".join(filter(None, (metric, f"layer_{layer:02d}", part)))


def mean_tag(metric: str, part: str = "") -> str:
    """Tag of a metric's mean over layers, or of one part of it.

    Example:
        >>> mean_tag("gride", "k32")
        'gride/mean/k32'
    """
    return "/".join(filter(None, (metric, MEAN, part)))


def head_part(head: int) -> str:
    """The part that names a head.

    Example:
        >>> layer_tag("qk_cosine", 2, head_part(1))
        'qk_cosine/layer_02/head_1'
    """
    return f"head_{head}"


def in_stack(tag: str, stack: str) -> str:
    """The tag of the same value in a named stack; a tag of no metric's place stays as it is.

    Example:
        >>> in_stack("twonn/layer_03/std", "encoder"), in_stack("twonn/mean", "")
        ('twonn/encoder_layer_03/std', 'twonn/mean')
    """
    metric, slash, place = tag.partition("/")
    return f"{metric}/{stack}_{place}" if stack and slash else tag


def out_of_stack(tag: str, stacks: Collection[str]) -> tuple[str, str]:
    """The stack that a tag names, and the tag without it.

    Args:
        tag: Any tag.
        stacks: Names of the stacks there are.

    Example:
        >>> out_of_stack("anisotropy/encoder_null", {"encoder", "decoder"})
        ('encoder', 'anisotropy/null')
    """
    metric, _, place = tag.partition("/")
    named = [stack for stack in stacks if stack and place.startswith(f"{stack}_")]
    if not named:
        return "", tag
    stack = max(named, key=len)
    return stack, f"{metric}/{place.removeprefix(stack + '_')}"


def is_of_run(tag: str) -> bool:
    """Whether the tag is geomon's own (its cost, say) and so of no stack.

    Example:
        >>> is_of_run("geomon/overhead"), is_of_run("twonn/mean")
        (True, False)
    """
    return tag.startswith("geomon/")


class Tag(NamedTuple):
    """A tag taken apart; `layer` is None for a mean, `head` None where the tag names none."""

    metric: str
    layer: int | None
    head: int | None
    part: str
    stack: str = ""


_PLACE = re.compile(r"(?:(?P<stack>.+)_)?(?:layer_(?P<layer>\d+)|mean)", re.ASCII)


@functools.lru_cache(maxsize=65_536)  # a large run has thousands, asked for again and again
def parse(tag: str) -> Tag | None:
    """Take a tag apart; None where it is not the tag of a metric.

    Example:
        >>> parse("qk_cosine/encoder_layer_02/head_1")
        Tag(metric='qk_cosine', layer=2, head=1, part='', stack='encoder')
        >>> parse("geomon/seconds") is None
        True
    """
    metric, _, rest = tag.partition("/")
    place, _, part = rest.partition("/")
    found = _PLACE.fullmatch(place)
    if found is None:
        return None
    stack = found["stack"] or ""
    if found["layer"] is None:
        return Tag(metric, None, None, part, stack)
    if part.startswith("head_") and part[5:].isdigit():
        return Tag(metric, int(found["layer"]), int(part[5:]), "", stack)
    return Tag(metric, int(found["layer"]), None, part, stack)


def is_charted(tag: str) -> bool:
    """Whether sinks get the tag: not for single heads, nor for how sure a single layer's value is.

    Example:
        >>> [is_charted(tag) for tag in ("twonn/layer_03", "twonn/mean/std", "twonn/layer_03/std")]
        [True, True, False]
    """
    parsed = parse(tag)
    if parsed is None:
        return True
    return parsed.head is None and (parsed.layer is None or parsed.part not in _TRUST)


def layout(names: Iterable[str]) -> dict[str, dict[str, list[Any]]]:
    """Charts for TensorBoard's custom scalars: a metric's layers as lines of one chart.

    Args:
        names: The charted tags.

    Returns:
        By category and title, a kind of chart and the patterns of its tags.

    Example:
        >>> layout(["cosine/layer_01", "cosine/mean"])
        {'geomon': {'cosine, by layer': ['Multiline', ['cosine/layer_[0-9]+$', 'cosine/mean$']]}}
    """
    parsed = [tag for tag in map(parse, names) if tag is not None]
    charts: dict[str, list[Any]] = {}
    for stack in dict.fromkeys(tag.stack for tag in parsed):
        charts |= _charts_of_stack([tag for tag in parsed if tag.stack == stack], stack)
    return {"geomon": charts}


def _charts_of_stack(parsed: list[Tag], stack: str) -> dict[str, list[Any]]:
    prefix, name = (f"{stack}_", f"{stack}: ") if stack else ("", "")
    metrics = dict.fromkeys(tag.metric for tag in parsed)
    dimensions = [f"{metric}/{prefix}mean$" for metric in metrics if metric.startswith("twonn")]
    charts: dict[str, list[Any]] = {}
    if dimensions:
        title = f"{name}intrinsic dimension, mean over layers"
        charts[title] = ["Multiline", [*dimensions, f"gride/{prefix}mean/k32$"]]
    for metric in metrics:
        if any(tag.metric == metric and not tag.part for tag in parsed):
            patterns = [f"{metric}/{prefix}layer_[0-9]+$", f"{metric}/{prefix}mean$"]
            charts[f"{name}{metric}, by layer"] = ["Multiline", patterns]
    scales = sorted({tag.part for tag in parsed if tag.metric == "gride"})
    if scales:
        charts[f"{name}gride, by scale"] = ["Multiline", [f"gride/{prefix}mean/k[0-9]+$"]]
    return charts
