"""Contracts of all metrics: one table has their ranges and the changes that leave them equal.

The metrics are found in the table of metrics: a new one is measured here as it is added, and fails
until it has its line in `CONTRACTS`.
"""

import copy
import functools
import math
import re
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from scipy import stats

from geomon import METRICS, MORE_METRICS
from geomon.metrics import Evaluator
from support import definitions as by_book
from support.kernels import row_additions
from support.measuring import Sizes, tagged
from support.whole_layer import HEAD_WIDTH, LENGTH, ROWS, WIDTH, normal, whole_layer

ALL = METRICS | MORE_METRICS
EVALUATOR = Evaluator(ALL, 1, strict=True)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# Rounding errors depend on how far the rows are from the origin.
OF_ROUNDING = "rounding"


class Contract(NamedTuple):
    """The range of a metric, and how it follows its rows.

    `scale` is the power of a factor on all rows with which the value grows, by part where parts
    differ; `shift` says that one vector added to all rows changes nothing. No metric changes
    under a rotation or with the order of the rows.
    """

    low: float = -math.inf
    high: float = math.inf
    scale: int | dict[str, int] = 0
    shift: bool = False


SHARE = Contract(0, 1, shift=True)
COSINE, DIMENSION = Contract(-1, 1), Contract(0, shift=True)
RANK = Contract(1, WIDTH, shift=True)
UNBOUNDED = Contract(shift=True)
CONTRACTS = {
    "twonn": DIMENSION,
    "twonn_distinct": DIMENSION,
    "gride": DIMENSION,
    "local_dimension": DIMENSION,
    "local_anisotropy": Contract(1 / 63, 1, shift=True),
    "anisotropy": SHARE,
    "anisotropy_without_massive": SHARE,
    "massive_share": SHARE,
    "effective_rank": RANK,
    "effective_rank_last": RANK,
    "participation_ratio": RANK,
    "alpha": DIMENSION,
    "alpha_last": DIMENSION,
    "cosine": COSINE,
    "cosine_centred": Contract(-1, 1, shift=True),
    "drift_norm": Contract(0, scale=1),
    "variance": Contract(0, scale=2, shift=True),
    "within_variance": Contract(0, scale=2, shift=True),
    "mean_square_norm": Contract(0, scale=2),
    "variance_shares": Contract(0, 1.1, scale={"between_variance": 2}),
    "norm_variance_slope": Contract(),
    "query_mean_norm": Contract(0, scale=1),
    "key_mean_norm": Contract(0, scale=1),
    "query_cosine": COSINE,
    "key_cosine": COSINE,
    "query_anisotropy": SHARE,
    "key_anisotropy": SHARE,
    "norm_growth": Contract(0),
    "residual_cosine": COSINE,
    "qk_cosine": COSINE,
    "qk_dot": Contract(scale=2),
    "attention_entropy": Contract(0, math.log(LENGTH + 1), shift=True),
    "attention_entropy_normalised": SHARE,
    "attention_sink": SHARE,
    "attention_extremes": SHARE,
    "max_logit": UNBOUNDED,
    "head_output_norm": Contract(0, shift=True),
    "weight_norm": Contract(0, shift=True),
    "update_size": Contract(0, shift=True),
    "unmoved": Contract(-1, 1, shift=True),
    "expert_load": SHARE,
    "score_mean": UNBOUNDED,
    "score_spread": Contract(0, shift=True),
    "mean_query_share": Contract(0, shift=True),
}
OF_ROWS = ("hidden", "token_ids", "positions", "sequences")
PROJECTED = ("projected_query", "projected_key")
FEW = 4
SCALE = 2.0**60  # whose square is beyond float32
UPDATE = 0.5 * (1024 * normal(ROWS, WIDTH, seed=13).double()).round() / 1024
STATES = ("hidden", "last_hidden", *PROJECTED)


def last_tokens(captured):
    """As many last tokens as a spectrum takes."""
    return {f"last_{name}": captured[name][::3] for name in OF_ROWS}


def layer(index=1):
    """One of two layers, in float64; the rows are multiples of 2^-10, so that a shift is exact.

    They are of 4 sequences, too few for the groups that margins need.
    """
    whole = whole_layer()
    captured = {
        name: view.double() if torch.is_tensor(view) and view.is_floating_point() else view
        for name, view in whole.captured.items()
    }
    moved = captured["hidden"] + 0.3 * index * normal(ROWS, WIDTH, seed=11).double()
    captured["hidden"] = (moved * 1024).round() / 1024
    for name in ("sequences", "query_sequences", "key_sequences"):
        captured[name] = torch.arange(ROWS) // (ROWS // FEW)
    captured["positions"] = torch.arange(ROWS) % (ROWS // FEW)
    captured |= {name: captured[name][:FEW] for name in ("query", "key")}
    captured |= last_tokens(captured)
    return replace(whole, index=index, captured=captured)


def each(names, function):
    """A change of a layer: a function of some of its views."""

    def change(one):
        changed = {name: function(view) for name, view in one.captured.items() if name in names}
        return replace(one, captured=one.captured | changed)

    return change


def turn(view):
    width = view.shape[-1]
    return view @ torch.linalg.qr(normal(width, width, seed=12).double()).Q


def shuffle(one):
    captured = dict(one.captured)
    for prefix, names in (("", OF_ROWS), ("last_", OF_ROWS), ("", (*PROJECTED, "query_sequences"))):
        count = len(captured[prefix + names[0]])
        order = torch.randperm(count, generator=torch.Generator().manual_seed(3))
        captured |= {f"{prefix}{name}": captured[prefix + name][order] for name in names}
        captured["key_sequences"] = captured["query_sequences"]
    return replace(one, captured=captured)


CHANGES = {
    "none": lambda one: one,
    "scale": each(STATES, lambda view: SCALE * view),
    "shift": each(STATES, lambda view: view + 1024),
    "turn": each((*STATES, "query", "key"), turn),
    "order": shuffle,
    "far": each(STATES, lambda view: (view + 1e4).float()),
    "near-duplicates": each(("hidden",), lambda view: view[::8].repeat(8, 1) + 1e-7 * view),
    "a grid": each(("hidden",), torch.round),
}
for _dtype in DTYPES:
    _views = ("max_logits", "bias", "sink", "query", "key", *STATES)
    CHANGES[str(_dtype)] = each(_views, lambda view, _dtype=_dtype: view.to(_dtype))
    CHANGES[f"{_dtype} as float64"] = each(
        _views, lambda view, _dtype=_dtype: view.to(_dtype).double()
    )


def changed(change, index=1):
    """A layer after a change of it and of the layer before."""
    one, before = layer(index), layer(index).captured["hidden"] - UPDATE
    other = CHANGES[change](replace(one, captured=one.captured | {"hidden": before}))
    one, before = CHANGES[change](one), other.captured["hidden"]
    return replace(
        one, captured=one.captured | {"additions": row_additions(before, one.captured["hidden"])}
    ), before


def measured(layers):
    """Every value of the second of two layers, by tag."""
    found = EVALUATOR.combine([EVALUATOR.measure_layer(one, ROWS) for one in layers], ROWS)
    return {
        tag.replace("/layer_01", ""): value
        for tag, value in tagged(found.stacks).items() if "/layer_01" in tag
    }  # fmt: skip


@functools.cache
def values(change):
    """Every value of the second layer, by tag, after a change of both."""
    layers = [changed(change, index)[0] for index in (0, 1)]
    before, after = copy.deepcopy(layers[1].captured), layers[1].captured
    found = measured(layers)
    assert all(torch.equal(view, after[n]) for n, view in before.items() if torch.is_tensor(view))
    return found


def of_metric(name, change="none"):
    return {tag: value for tag, value in values(change).items() if tag.split("/")[0] == name}


def test_every_metric_has_a_contract():
    assert CONTRACTS.keys() == ALL.keys()
    assert {tag.split("/")[0] for tag in definitions("none")} == ALL.keys() - ELSEWHERE
    found = values("none")
    assert [tag for tag in definitions("none") if not {tag, f"{tag}/head_0"} & found.keys()] == []


# Metrics that choose rows, or read attention, are tested elsewhere.
ELSEWHERE = {"twonn_distinct"}
ELSEWHERE |= {name for name in ALL if name.startswith(("attention", "score", "mean_query_share"))}


@functools.cache
def definitions(change):
    """Values of the second layer by their definitions, by tag: numbers, or one for each head."""
    one, before = changed(change)
    views = {
        name: np.asarray(view, dtype=float if view.is_floating_point() else None)
        if torch.is_tensor(view)
        else view
        for name, view in one.captured.items()
    }
    last = by_book.of_rows({name: views[f"last_{name}"] for name in OF_ROWS})
    of_all = by_book.of_rows(views) | by_book.of_neighbours(views["hidden"])
    of_all |= by_book.of_updates(np.asarray(before, dtype=float), views["hidden"])
    of_last = {f"{name}_last": last[name] for name in ("effective_rank", "alpha")}
    of_heads = by_book.of_heads(views["projected_query"], views["projected_key"])
    norms, loads = views["weight_norms"], views["expert_counts"]
    whole = {
        "max_logit": views["max_logits"],
        "head_output_norm": np.sqrt(views["head_outputs"][:, 0] / views["head_outputs"][:, 1]),
        "weight_norm": np.linalg.norm([*norms.values()]),
        **{f"weight_norm/{name}": norm for name, norm in norms.items()},
        "update_size": 0.002,
        "update_size/relative": 1.25,
        "update_size/over_rate": 4.0,
        "unmoved": 0.25,
        "unmoved/relative": -0.5,
        "expert_load": stats.gmean(np.maximum(loads / loads.mean(), 0.01)),
        "expert_load/expert_2": 0.01,
        "expert_load/expert_3": 2.0,
    }
    return of_all | of_last | of_heads | whole


@pytest.mark.parametrize("change", ["none", "far", "near-duplicates", "a grid"])
@pytest.mark.parametrize("name", sorted(ALL.keys() - ELSEWHERE))
def test_a_value_is_that_of_its_definition(name, change):
    if (name[:5], change) == ("local", "a grid"):
        return  # which of the rows at one distance are in a neighbourhood is left open
    found, about = of_metric(name, change), 1 if CONTRACTS[name] is COSINE else 0
    for tag, wanted in definitions(change).items():
        if tag.split("/")[0] == name:
            heads = range(np.size(wanted) if np.ndim(wanted) else 0)
            got = [found[f"{tag}/head_{head}"] for head in heads] or found[tag]
            # Far away a cosine is 1 to seven digits.
            near = pytest.approx(wanted - about, rel=1e-5, abs=1e-13)
            assert np.subtract(got, about) == near, tag


@pytest.mark.parametrize("name", ALL)
def test_a_value_is_finite_and_in_its_range(name):
    contract, found = CONTRACTS[name], of_metric(name)
    assert found
    assert all(math.isfinite(value) for value in found.values()), found
    own = [value for tag, value in found.items() if tag == name or "/head" in tag]
    assert all(contract.low - 1e-9 <= value <= contract.high + 1e-9 for value in own), own


@pytest.mark.parametrize("change", ["scale", "shift", "turn", "order"])
@pytest.mark.parametrize("name", ALL)
def test_a_value_follows_its_rows_as_the_contract_says(name, change):
    contract, plain, changed = CONTRACTS[name], of_metric(name), of_metric(name, change)
    assert plain.keys() == changed.keys()
    if change == "shift" and not contract.shift:
        assert plain != pytest.approx(changed, rel=1e-3)
        return
    for tag, value in plain.items():
        part, power = tag.rpartition("/")[2], contract.scale
        if part == OF_ROUNDING and change == "shift":
            continue
        power = power.get(part, 0) if isinstance(power, dict) else power
        factor = SCALE**power if change == "scale" else 1
        assert changed[tag] == pytest.approx(factor * value, rel=1e-6, abs=1e-9), tag


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ALL)
def test_a_value_is_that_of_the_same_numbers_in_float64(name, dtype):
    found, wanted = of_metric(name, str(dtype)), of_metric(name, f"{dtype} as float64")
    # Scores are computed in float32.
    assert found == pytest.approx(wanted, rel=1e-5, abs=1e-6)


@pytest.fixture(scope="module")
def margins():
    """Values of a layer of 16 sequences, by tag."""
    whole = whole_layer().captured
    captured = whole | last_tokens(whole)
    return measured([replace(whole_layer(), index=n, captured=captured) for n in (0, 1)])


@pytest.mark.parametrize("name", ALL)
def test_a_part_has_a_margin_where_the_record_of_the_metric_gives_it_one(name, margins):
    metric = ALL[name]
    parts = {"", *metric.text.parts, *metric.without_margin}
    there = {part for part in parts if f"{name}/{part}".rstrip("/") in margins}
    assert there >= metric.text.parts.keys()
    for part in there:
        found = margins.get(f"{name}/{part}/margin".replace("//", "/"), math.nan)
        wanted = metric.has_margin and part not in metric.without_margin
        assert (math.isfinite(found), found < 0) == (wanted, False), part


@pytest.mark.parametrize("name", [name for name in ALL if ALL[name].null is not None])
def test_a_null_is_finite_and_in_the_range_of_the_metric(name):
    contract = CONTRACTS[name]
    for rows, width in ((4096, 64), (300, WIDTH)):
        sizes = Sizes(rows, width, (4, HEAD_WIDTH), (rows,), (math.log(LENGTH),), 86)
        found = ALL[name].null(sizes)
        assert found.keys() & {"null", "null_magnitude"}
        high = max(contract.high, width) if contract is RANK else contract.high
        assert all(contract.low - 1e-9 <= number <= high + 1e-9 for number in found.values())


def few(rows):
    """The first rows; of heads and sequences there are as many as before."""
    names = (*OF_ROWS, *PROJECTED, "query_sequences", "key_sequences")
    return each({*names, *(f"last_{name}" for name in OF_ROWS)}, lambda view: view[:rows])


def ending(value):
    def spoil(view):
        return torch.cat([view[:-1], torch.full_like(view[-1:], value)])

    return each((*STATES, "query", "key"), spoil)


EDGES = {
    "one row": few(1),
    "two rows": few(2),
    "equal rows": each((*STATES, "query", "key"), lambda view: view[:1].expand_as(view)),
    "rows of zero": each((*STATES, "query", "key"), torch.zeros_like),
    "one column": each(STATES, lambda view: view[..., :1]),
    "a row of NaN": ending(math.nan),
    "a row of infinity": ending(math.inf),
}


@pytest.mark.parametrize("edge", EDGES)
def test_at_an_edge_every_metric_has_a_value_or_a_reason(edge):
    layers = [EDGES[edge](layer(index)) for index in (0, 1)]
    found = Evaluator(ALL, 1, explains=True).evaluate(layers, ROWS)
    said = "; ".join(note.words() for note in found.notes)
    values = tagged(found.stacks)
    for name, metric in ALL.items():
        own = [v for t, v in values.items() if re.match(f"{name}/layer_01(/|$)(?!margin)", t)]
        assert name in said or (own and all(map(math.isfinite, own))), name
        assert metric.text.missing or f"{name}: NaN" not in said or edge.startswith("a row of"), (
            said
        )


@pytest.mark.parametrize("name", ALL)
def test_the_views_that_a_metric_reads_come_down_to_captured_views(name):
    metric = ALL[name]
    assert metric.captured <= whole_layer().captured.keys() | {"scores"}
    assert metric.text.title != name
    assert metric.text.meaning.endswith(".")
