"""Tags: the names under which values are charted and requested, built only here and never parsed.

A tag is `<metric>/layer_03`, `<metric>/mean` (over all layers except layer 0) or
`<metric>/layer_03/head_1`. The first two may have parts: `twonn/layer_03/std`, `gride/mean/k32`,
`qk_cosine/layer_03/min`. In a model with several stacks of blocks each tag names its stack:
`twonn/encoder_layer_03`, `twonn/encoder_mean`.

Two groups are not metrics: `geomon/...` holds geomon's cost, and `training/...` values that the
training logs, such as its loss.
"""

MEAN = "mean"
SECONDS = "geomon/seconds"
OVERHEAD = "geomon/overhead"
LOSS = "loss"  # name of the training's loss
PROBE_LOSS = "probe_loss"  # name of the loss on the probe's inputs

_TRAINING = "training"
# First parts of tags of a whole run, which belong to no metric and no stack.
OF_RUN = ("geomon", _TRAINING)

# Parts that say what a value rests on: the rows in one split, and the sequences of all rows.
ROWS = "n"
SEQUENCES = "sequences"


def layer_tag(metric: str, layer: int, part: str = "") -> str:
    """Build the tag of a metric at a layer.

    Args:
        metric: Name of the metric.
        layer: Index of the layer; 0 is the input of the first block.
        part: Name of a part of the value, such as "std". Defaults to "", for the value itself.

    Example:
        >>> layer_tag("twonn", 3, "std")
        'twonn/layer_03/std'
    """
    return "/".join(filter(None, (metric, f"layer_{layer:02d}", part)))


def mean_tag(metric: str, part: str = "") -> str:
    """Build the tag of a metric's mean over layers.

    Args:
        metric: Name of the metric.
        part: Name of a part of the value, such as "std". Defaults to "", for the value itself.

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


def training_tag(name: str) -> str:
    """Build the tag of a value that the training logs.

    Args:
        name: Name of the value, such as "loss".

    Raises:
        ValueError: If the name cannot be part of a tag.

    Example:
        >>> training_tag("loss"), training_tag("val/loss")
        ('training/loss', 'training/val/loss')
    """
    parts = name.split("/") if isinstance(name, str) else [""]
    if not all(part and part.isprintable() and part == part.strip() for part in parts):
        raise ValueError(
            f"{name!r} cannot name a value: expected printable text without a slash at its ends, "
            "such as 'loss' or 'val/loss'"
        )
    return f"{_TRAINING}/{name}"


def in_stack(tag: str, stack: str) -> str:
    """Add the name of a stack ("" for a model's only one) to a tag, if the tag has a slash.

    Example:
        >>> in_stack("twonn/layer_03/std", "encoder"), in_stack("twonn/mean", "")
        ('twonn/encoder_layer_03/std', 'twonn/mean')
    """
    metric, slash, place = tag.partition("/")
    return f"{metric}/{stack}_{place}" if stack and slash else tag
