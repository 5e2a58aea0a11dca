"""Tags: the names under which values are recorded and charted, built and parsed only here.

A tag is `<metric>/layer_03`, `<metric>/mean` (over the layers without layer 0) or
`<metric>/layer_03/head_1`. The first two may have parts: `twonn/layer_03/std`, `gride/mean/k32`,
`qk_cosine/layer_03/min`. In a model with several stacks of blocks each tag names its stack:
`twonn/encoder_layer_03`, `twonn/encoder_mean`.

Two groups are no metrics: `geomon/...` is what geomon costs, `training/...` what the training logs
beside the geometry, its loss for instance.
"""

import functools
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

MEAN = "mean"
SECONDS = "geomon/seconds"
OVERHEAD = "geomon/overhead"
LOSS = "loss"  # the name under which the training's loss is logged
PROBE_LOSS = "probe_loss"  # the same for the loss on the probe's inputs

_TRAINING = "training"
# What stands before the first slash in tags of a whole run: of no metric, and of no stack.
OF_RUN = ("geomon", _TRAINING)

# Parts that say what a value stands on: rows in one split, sequences that all rows are of, and
# steps since the reading that it is compared with.
ROWS = "n"
SEQUENCES = "sequences"
STEPS = "steps"

# Parts that say how far a layer's value can be trusted. Charts of them for every layer would bury
# the values, so charts show those of the mean only; the record holds all.
_TRUST = frozenset({"std", "margin", "error", ROWS, SEQUENCES, STEPS}) | {
    "duplicates", "repeated", "rounding", "rows", "types",
}  # fmt: skip


def layer_tag(metric: str, layer: int, part: str = "") -> str:
    """Build the tag of a metric at a layer.

    Args:
        metric: Name of the metric.
        layer: Number of the layer; 0 for what enters the first block.
        part: Name of a part of the value, for instance "std"; "" for the value itself.

    Example:
        >>> layer_tag("twonn", 3, "std")
        'twonn/layer_03/std'
    """
    return "/".join(filter(None, (metric, f"layer_{layer:02d}", part)))


def mean_tag(metric: str, part: str = "") -> str:
    """Build the tag of a metric's mean over layers.

    Args:
        metric: Name of the metric.
        part: Name of a part of the value, for instance "std"; "" for the value itself.

    Example:
        >>> mean_tag("gride", "k32")
        'gride/mean/k32'
    """
    return "/".join(filter(None, (metric, MEAN, part)))


def head_part(head: int) -> str:
    """Build the part of a tag that names a head, counted from 0.

    Example:
        >>> layer_tag("qk_cosine", 2, head_part(1))
        'qk_cosine/layer_02/head_1'
    """
    return f"head_{head}"


def margin_part(part: str = "") -> str:
    """Build the part of a tag that holds the half width of the 95 % interval of a value.

    Args:
        part: Name of the part whose interval it is; "" for the value itself.

    Example:
        >>> mean_tag("twonn", margin_part()), mean_tag("gride", margin_part("k32"))
        ('twonn/mean/margin', 'gride/mean/k32/margin')
    """
    return "/".join(filter(None, (part, "margin")))


def training_tag(name: str) -> str:
    """Build the tag of a value that the training logs beside the geometry.

    Args:
        name: Name of the value, for instance "loss".

    Raises:
        ValueError: The name cannot be part of a tag.

    Example:
        >>> training_tag("loss"), training_tag("val/loss")
        ('training/loss', 'training/val/loss')
    """
    parts = name.split("/") if isinstance(name, str) else [""]
    if not all(part and part.isprintable() and part == part.strip() for part in parts):
        raise ValueError(
            f"{name!r} cannot name a value: expected printable text without a slash at its ends, "
            "'loss' or 'val/loss' for instance"
        )
    return f"{_TRAINING}/{name}"


def in_stack(tag: str, stack: str) -> str:
    """Add the name of a stack to a tag; a tag without a slash stays as it is.

    Args:
        tag: Tag without a stack.
        stack: Name of the stack; "" for the only stack of a model, which is not named.

    Example:
        >>> in_stack("twonn/layer_03/std", "encoder"), in_stack("twonn/mean", "")
        ('twonn/encoder_layer_03/std', 'twonn/mean')
    """
    metric, slash, place = tag.partition("/")
    return f"{metric}/{stack}_{place}" if stack and slash else tag


def out_of_stack(tag: str, stacks: Collection[str]) -> tuple[str, str]:
    """Split a tag into the stack that it names and the tag without it.

    Args:
        tag: Any tag.
        stacks: Names of the model's stacks.

    Returns:
        Name of the stack ("" where the tag names none of them), and the tag without it.

    Example:
        >>> out_of_stack("anisotropy/encoder_null", {"encoder", "decoder"})
        ('encoder', 'anisotropy/null')
    """
    if is_of_run(tag):
        return "", tag
    metric, _, place = tag.partition("/")
    named = [stack for stack in stacks if stack and place.startswith(f"{stack}_")]
    if not named:
        return "", tag
    stack = max(named, key=len)
    return stack, f"{metric}/{place.removeprefix(stack + '_')}"


def is_of_run(tag: str) -> bool:
    """Return whether a tag is of the run as a whole, and so of no metric and no stack.

    Example:
        >>> [is_of_run(tag) for tag in ("geomon/overhead", "training/loss", "twonn/mean")]
        [True, True, False]
    """
    group, slash, _ = tag.partition("/")
    return bool(slash) and group in OF_RUN


class Tag(NamedTuple):
    """Parts of a tag.

    Attributes:
        metric: Name of the metric.
        layer: Number of the layer; None for the mean over layers.
        head: Number of the head; None where the tag names no head.
        part: Name of a part of the value, for instance "std"; "" for the value itself.
        stack: Name of the stack; "" where the tag names none.
    """

    metric: str
    layer: int | None
    head: int | None
    part: str
    stack: str = ""


_PLACE = re.compile(r"(?:(?P<stack>.+)_)?(?:layer_(?P<layer>\d+)|mean)", re.ASCII)


@functools.lru_cache(maxsize=65_536)  # a large run has thousands, parsed again at every reading
def parse(tag: str) -> Tag | None:
    """Parse a tag; None where it is not the tag of a metric.

    Example:
        >>> parse("qk_cosine/encoder_layer_02/head_1")
        Tag(metric='qk_cosine', layer=2, head=1, part='', stack='encoder')
        >>> parse("geomon/seconds") is None
        True
    """
    if is_of_run(tag):
        return None
    metric, _, rest = tag.partition("/")
    place, _, part = rest.partition("/")
    match = _PLACE.fullmatch(place)
    if match is None:
        return None
    stack = match["stack"] or ""
    if match["layer"] is None:
        return Tag(metric, None, None, part, stack)
    if part.startswith("head_") and part[5:].isdigit():
        return Tag(metric, int(match["layer"]), int(part[5:]), "", stack)
    return Tag(metric, int(match["layer"]), None, part, stack)


def heads_of(names: Iterable[str], metric: str) -> dict[tuple[int, int], str]:
    """Find the tags of a metric's heads, by layer and head in ascending order.

    Args:
        names: Tags of one stack, under the names that a model with one stack has.
        metric: Name of a metric with values of heads.

    Example:
        >>> heads_of(["q/layer_02/head_0", "q/layer_01/head_1", "q/layer_01", "q/mean"], "q")
        {(1, 1): 'q/layer_01/head_1', (2, 0): 'q/layer_02/head_0'}
    """
    found = {
        (tag.layer, tag.head): name
        for name in names
        if name.startswith(f"{metric}/layer_")
        and (tag := parse(name)) is not None
        and tag.layer is not None
        and tag.head is not None
    }
    return dict(sorted(found.items()))


def is_charted(tag: str) -> bool:
    """Return whether charts of all layers show a tag: no heads, no error parts of single layers.

    Example:
        >>> [is_charted(tag) for tag in ("twonn/layer_03", "twonn/mean/std", "twonn/layer_03/std")]
        [True, True, False]
    """
    parsed = parse(tag)
    if parsed is None:
        return True
    trust = parsed.part.rpartition("/")[2] in _TRUST
    return parsed.head is None and (parsed.layer is None or not trust)


def layout(names: Iterable[str], shown_as: Mapping[str, str]) -> dict[str, dict[str, list[Any]]]:
    """Lay out charts for TensorBoard's custom scalars: all layers of a metric in one chart.

    Args:
        names: Tags that are charted.
        shown_as: Names under which some of them are shown, by tag.

    Returns:
        Kind of chart and patterns of its tags, by category and title.

    Example:
        >>> layout(["cosine/layer_01", "cosine/mean"], {"cosine/mean": "geomon/cosine"})["by layer"]
        {'cosine': ['Multiline', ['cosine/layer_[0-9]+$', 'geomon/cosine$']]}
    """
    parsed = [tag for tag in map(parse, names) if tag is not None]
    charts: dict[str, list[Any]] = {}
    for stack in dict.fromkeys(tag.stack for tag in parsed):
        charts |= _charts_of_stack([tag for tag in parsed if tag.stack == stack], stack, shown_as)
    return {"by layer": charts}


def _charts_of_stack(
    parsed: list[Tag], stack: str, shown_as: Mapping[str, str]
) -> dict[str, list[Any]]:
    prefix, name = (f"{stack}_", f"{stack}: ") if stack else ("", "")
    charts: dict[str, list[Any]] = {}
    for metric in dict.fromkeys(tag.metric for tag in parsed):
        if any(tag.metric == metric and not tag.part for tag in parsed):
            mean = f"{metric}/{prefix}mean"
            patterns = [f"{metric}/{prefix}layer_[0-9]+$", f"{shown_as.get(mean, mean)}$"]
            charts[f"{name}{metric}"] = ["Multiline", patterns]
    if any(tag.metric == "gride" for tag in parsed):
        start = f"gride/{prefix}mean/k"
        others = [f"{shown}$" for tag, shown in shown_as.items() if tag.startswith(start)]
        charts[f"{name}gride, by scale"] = ["Multiline", [f"{start}[0-9]+$", *others]]
    return charts
