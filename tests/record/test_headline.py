"""Charts show few values of a reading, each of them alive, whatever the size of the model."""

import math

import pytest

from geomon import Logger
from geomon.record import Readings
from support import readings as tagged
from support.readings import reading_of as reading

MOST = 15
TEXTS = tagged.TEXTS | {
    "attention_sink": {"title": "attention on the sink"},
    "drift_norm": {"title": "norm of the mean row"},
    "effective_rank": {"title": "effective rank"},
    "cosine": {"title": "mean cosine between tokens"},
}
NAMES = {
    "twonn", "twonn_low", "twonn_high", "twonn_distinct", "gride_k32", "anisotropy",
    "anisotropy_max", "attention_entropy", "attention_entropy_min", "qk_cosine_size",
    "attention_sink", "drift_norm", "effective_rank", "overhead",
}  # fmt: skip


def charts_of(detail="headline"):
    return tagged.charts_of(Readings([{"metrics": TEXTS}], []), detail)


def shown_over(readings, detail="headline"):
    charts, shown = charts_of(detail), {}
    for each in readings:
        shown |= charts.select(each)
    return shown


def values_of(layers, heads=4):
    """Values of a whole reading by tag, all different."""
    values = {"geomon/overhead": 0.125}
    for number, metric in enumerate(TEXTS, start=1):
        part = "/k32" if metric == "gride" else ""
        for layer in range(1, layers + 1):
            values[f"{metric}/layer_{layer:02d}{part}"] = number + 0.01 * layer
            for head in range(heads if metric in ("qk_cosine", "attention_entropy") else 0):
                sign = -1 if head % 2 else 1
                size = number + 0.01 * layer + 0.001 * head
                values[f"{metric}/layer_{layer:02d}/head_{head}"] = sign * size
        values[f"{metric}/mean{part}"] = number + 0.005 * layers
    return values | {"twonn/mean/margin": 0.25, "anisotropy/layer_00": 100.0}


LAST = reading(values_of(2))
SHOWN = shown_over([LAST])
# Tags that say how far values can be trusted; charts show them for the mean alone.
TRUST = {f"twonn/{place}/{part}": 64.0
         for place in ("layer_01", "mean")
         for part in ("margin", "n", "std", "sequences", "duplicates", "repeated", "rounding",
                      "rows", "types")}  # fmt: skip
TRUSTED = reading({**values_of(2), **TRUST, "twonn/null": 9.0})
OWN = reading({**LAST.values, "own/mean": 12.5})
ODD = reading({"twonn/mean": 5.0, "twonn/mean/margin": math.nan, "anisotropy/mean": math.nan})
PROBED = reading({**LAST.values, "training/probe_loss": 2.5})
STACKS = reading(
    {
        f"twonn/{stack}_{place}": value + len(place)
        for stack, value in (("encoder", 1.0), ("decoder", 2.0))
        for place in ("layer_01", "mean")
    }
    | {"geomon/overhead": 0.5, "training/loss": 3.0}
)
BY_SCALE = reading(
    {
        "gride/mean/k1": 3.0,
        "gride/mean/k32": 2.0,
        "gride/layer_01/k1": 3.0,
        "gride/layer_01/k32": 2.0,
        "attention_entropy/layer_01": 1.0,
        "attention_entropy/mean": 1.0,
    }
)
ENDS = charts_of()
ENDS.select(LAST)
OF_STACKS = {"geomon/twonn": 6.0, "geomon/overhead": 0.5, "geomon/encoder/twonn": 5.0}
LOSS = {"loss on the probe's inputs": ["Margin", ["geomon/probe_loss"] * 3]}


def alone(values, detail="headline"):
    return shown_over([reading(values)], detail)


def layout(one, detail="headline"):
    return charts_of(detail).layout(one)


def of_lines(stack):
    words = f"geomon/{'encoder/' * (stack == 'encoder')}twonn$"
    return ["Multiline", [f"twonn/{stack}_layer_[0-9]+$", words]]


# Values that are shown, and what they have to be.
CASES = {
    **{
        f"names of a model with {layers} layers": (
            lambda layers=layers: set(alone(values_of(layers))),
            {f"geomon/{name}" for name in NAMES},
        )
        for layers in (4, 12, 32)
    },
    "other metrics take the places that are free": (
        lambda: alone(
            {"variance/mean": 3.0, "attention_entropy/mean": 2.0, "geomon/overhead": 0.5}
        ),
        {"geomon/variance": 3.0, "geomon/attention_entropy": 2.0, "geomon/overhead": 0.5},
    ),
    "the largest of heads and of layers": (
        lambda: alone(
            {f"max_logit/layer_01/head_{head}": 3.0 + head for head in range(4)}
            | {"massive_share/layer_01": 0.25, "massive_share/layer_02": 0.125}
        ),
        {"geomon/max_logit_max": 6.0, "geomon/massive_share_max": 0.25},
    ),
    "of many metrics some": (  # and no overhead or loss on a probe
        lambda: len(alone({f"mine_{i}/mean": float(i + 1) for i in range(100)})),
        MOST - 2,
    ),
    "no place is free": (lambda: "geomon/own" in shown_over([OWN]), False),
    "a metric that is asked for by name": (
        lambda: shown_over([OWN], ("own",)),
        SHOWN | {"geomon/own": 12.5},
    ),
    "a name that has a meaning: step": (
        lambda: alone({"step/mean": 1.0, "cosine/mean": 2.0}),
        {"geomon/cosine": 2.0},
    ),
    "a name that has a meaning: seconds": (
        lambda: alone({"seconds/mean": 1.0, "cosine/mean": 2.0}),
        {"geomon/cosine": 2.0},
    ),
    "what is not a number": (
        lambda: shown_over([ODD], "layers"),
        {"geomon/twonn": 5.0, "geomon/seconds": 2.0},
    ),
    "charts of what is not a number": (
        lambda: {words: names for words, (_, names) in layout(ODD)["geomon"].items()},
        {
            "intrinsic dimension, mean over layers": ["geomon/twonn"] * 3,
            "anisotropy, mean over layers": ["geomon/anisotropy"] * 3,
            "anisotropy, largest layer": ["geomon/anisotropy_max"] * 3,
            # Unknown at the first reading.
            "share of the time that geomon takes": ["geomon/overhead"] * 3,
        },
    ),
    "stacks": (lambda: shown_over([STACKS]), OF_STACKS),
    "layers of stacks": (
        lambda: shown_over([STACKS], "layers"),
        OF_STACKS
        | {
            "twonn/encoder_layer_01": 9.0,
            "twonn/decoder_layer_01": 10.0,
            "training/loss": 3.0,
            "geomon/seconds": 2.0,
        },
    ),
    **{
        f"charts of the {stack}": (
            lambda stack=stack: layout(STACKS, "layers")["by layer"][
                f"{stack}: intrinsic dimension"
            ],
            of_lines(stack),
        )
        for stack in ("encoder", "decoder")
    },
    "groups of charts": (lambda: list(layout(LAST)), ["geomon"]),
    "groups of charts with layers": (lambda: list(layout(LAST, "layers")), ["geomon", "by layer"]),
    "charts that TensorBoard does not smooth": (
        lambda: {kind for kind, _ in layout(LAST)["geomon"].values()},
        {"Margin"},
    ),
    "the last chart is drawn first": (  # TensorBoard draws charts of this kind in reverse order
        lambda: [*layout(LAST)["geomon"].items()][-1],
        (
            "intrinsic dimension, mean over layers, 95 % interval",
            ["Margin", ["geomon/twonn", "geomon/twonn_low", "geomon/twonn_high"]],
        ),
    ),
    "charts by scale and by layer": (
        lambda: layout(BY_SCALE, "layers"),
        {
            "geomon": {
                # Shared by other metrics of the dimension; of other scales there is no curve.
                "intrinsic dimension by scale, scale 32, mean over layers": [
                    "Margin",
                    ["geomon/gride_k32"] * 3,
                ],
                "attention entropy, mean over layers (nats)": [
                    "Margin",
                    ["geomon/attention_entropy"] * 3,
                ],
                "attention entropy, lowest head (nats)": [
                    "Margin",
                    ["geomon/attention_entropy_min"] * 3,
                ],
                "share of the time that geomon takes": ["Margin", ["geomon/overhead"] * 3],
            },
            "by layer": {
                "intrinsic dimension by scale, by scale": [
                    "Multiline",
                    ["gride/mean/k1$", "geomon/gride_k32$"],
                ],
                "attention entropy (nats)": [
                    "Multiline",
                    ["attention_entropy/layer_[0-9]+$", "geomon/attention_entropy$"],
                ],
            },
        },
    ),
    "the ends of an interval": (
        lambda: [name for name in SHOWN if ENDS.is_end(name)],
        ["geomon/twonn_low", "geomon/twonn_high"],
    ),
    "each value has a chart": (
        lambda: {name for _, names in layout(LAST)["geomon"].values() for name in names},
        set(SHOWN),
    ),
    **{
        f"the loss on the probe, {detail}": (
            lambda detail=detail: shown_over([PROBED], detail),
            shown_over([LAST], detail) | {"geomon/probe_loss": 2.5},
        )
        for detail in ("headline", "layers")
    },
    "a chart of the loss on the probe": (
        lambda: layout(PROBED)["geomon"],
        layout(LAST)["geomon"] | LOSS,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_charts_show_few_values_and_all_that_are_asked_for(name):
    show, expected = CASES[name]
    assert show() == expected


def test_a_metric_that_asks_for_it_is_charted_by_its_mean_though_no_place_is_free():
    charted = {name: TEXTS.get(name, {"title": name}) | {"is_charted": True}
               for name in ("own", "twonn", "max_logit")}  # fmt: skip
    charts = tagged.charts_of(Readings([{"metrics": TEXTS | charted}], []), "headline")
    assert charts.select(OWN) == SHOWN | {"geomon/own": 12.5}
    assert charts.select(reading({"max_logit/mean": 2.0})) == {}  # has a value of its own


def test_headlines_are_made_of_the_values_of_the_record():
    values = LAST.values
    heads = {
        metric: [values[f"{metric}/layer_0{n}/head_{head}"] for n in (1, 2) for head in range(4)]
        for metric in ("qk_cosine", "attention_entropy")
    }
    expected = {
        **{name: values[f"{name}/mean"] for name in NAMES & TEXTS.keys()},
        "twonn_low": values["twonn/mean"] - 0.25,
        "twonn_high": values["twonn/mean"] + 0.25,
        "gride_k32": values["gride/mean/k32"],
        "anisotropy_max": max(values[f"anisotropy/layer_0{layer}"] for layer in (1, 2)),
        "attention_entropy_min": min(heads["attention_entropy"]),
        "qk_cosine_size": sum(map(abs, heads["qk_cosine"])) / 8,
        "overhead": 0.125,
    }
    assert pytest.approx({f"geomon/{name}": value for name, value in expected.items()}) == SHOWN


def test_with_layers_everything_that_is_charted_is_shown_once():
    shown = shown_over([TRUSTED], "layers")
    copied = {f"{name}/mean" for name in TEXTS.keys() & NAMES} | {"geomon/overhead"}
    copied |= {"gride/mean/k32", "attention_entropy/mean/min"}
    copied |= {tag for tag in TRUST if "layer_01" in tag}
    left_out = {tag for tag in TRUSTED.values if "head_" in tag or tag in copied}
    assert shown.keys() - shown_over([TRUSTED]).keys() == (TRUSTED.values.keys() - left_out)
    assert {"twonn/mean/n", "twonn/null", "qk_cosine/layer_01/max"} <= shown.keys()


@pytest.mark.parametrize("detail", ["heads", "", None, 3, ("a", 1), [""]])
def test_a_detail_is_one_of_two_words_or_names(detail):
    with pytest.raises(ValueError, match="detail must be 'headline', 'layers' or a tuple of names"):
        Logger(lambda values, step: None, detail=detail)
