"""What the experiments read off curves and records of known shape."""

import math
import statistics

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tagged import reading_of
from torch import nn

from geomon import Readings, measure
from geomon.record import tags
from recipes.bias_drift.assertions import Series, bias_claims, questions
from recipes.bias_drift.experiment import METRICS, Biased
from recipes.decoder.claims import (
    attention_questions,
    one_sign_at_end,
    shape_questions,
    trend_correlations,
)
from recipes.encoder_decoder.experiment import EncoderDecoder
from recipes.grokking.data import split, table
from recipes.grokking.experiment import curve_claims
from recipes.grokking.leads import CURVES, Course, alarm
from recipes.overfit.experiment import Overfit
from recipes.papers.alignment import LayerAlignment
from recipes.study.claim import answers
from recipes.study.history import History
from recipes.study.model import Architecture, Transformer


def history(course, steps=(0, 25, 50, 75, 100)):
    """A history in which every tag has the value of its function at each step."""
    readings = []
    for step in steps:
        values = {tag: function(step) for tag, function in course.items()}
        readings.append(reading_of(values, step))
    return History(Readings([{}], readings))


class MadeUp:
    """Records of an experiment: the same for every seed but for a little scatter."""

    def __init__(self, seeds):
        self._seeds = seeds

    def of(self, kind, watch=""):
        return self._seeds[kind]


def layers(metric, *functions):
    return {f"{metric}/layer_{n:02d}": function for n, function in enumerate(functions)}


# -- values over a training ------------------------------------------------------------------------


def test_a_change_is_read_between_readings():
    linear = history({"a/mean": lambda step: 1.0 + step})
    assert linear.change("a/mean", 0, 1) == pytest.approx(100)
    assert linear.change("a/mean", 0.25, 0.75) == pytest.approx(76 / 26 - 1)


# -- decoder ---------------------------------------------------------------------------------------


def test_expansion_is_counted_for_the_paper_by_its_own_estimator():
    course = {
        f"{tag}": lambda step: {0: 2, 25: 8}.get(step, 4)
        for tag in ("twonn/mean/discard_0", "twonn/mean/discard_80", "twonn/mean",
                    "twonn_distinct/mean", *(f"gride/mean/k{2**n}" for n in range(6)))
    }  # fmt: skip
    for metric in ("anisotropy", "local_anisotropy"):
        course |= layers(metric, *[lambda step: 0.5 + step] * 3)
        course |= {f"{metric}/mean": float, f"{metric}/null": lambda _: 0.25}
    claims = list(answers(shape_questions(), [history(course)]))
    changes = [claim for claim in claims if "dimension" in claim.asserts]
    assert len(changes) == 20
    assert {claim.values for claim in changes} == {(3.0,), (-0.5,)}
    assert [claim.name for claim in changes if not claim.ours] == [
        "twonn_discard_0_expands", "twonn_discard_0_compresses",
    ]  # fmt: skip


def test_heads_are_counted_on_their_side():
    cosines = {"head_0": 0.9, "head_1": -0.9, "head_2": 0.1, "head_3": -0.8}
    course = {f"qk_cosine/layer_01/{name}": lambda _, v=v: v for name, v in cosines.items()}
    course |= {f"qk_dot/layer_01/{name}": float for name in cosines}
    for metric in ("cosine", "drift_norm", "query_cosine", "key_cosine", "attention_entropy",
                   "mean_query_share", "anisotropy"):  # fmt: skip
        course |= layers(metric, *[lambda _, n=n: 0.5 / n for n in (1, 2, 3)])
    course |= {"qk_cosine/null_magnitude": lambda _: 0.1, "anisotropy/null": lambda _: 0.1}
    claims = answers(attention_questions(128, 32), [history(course)])
    values = {claim.name: claim.values for claim in claims}
    assert values["almost_all_heads_align"] == (0.75,)
    assert values["some_heads_opposite"] == (0.5,)
    assert values["similar_heads_align_early"] == (0,)
    assert len(values["opposite_heads_align_late"]) == 2
    assert values["first_layers_sharper"] == pytest.approx((0.25 - 0.5 / 3,))


def aligned(*curves):
    """Histories of seeds whose layers have these curves, [seeds][layers][steps]."""
    found = []
    for of_seed in curves:
        seed = history({})
        seed.__dict__["joined_heads"] = {
            number: LayerAlignment(number, 32, tuple(range(len(curve))), tuple(curve))
            for number, curve in enumerate(of_seed, start=1)
        }
        found.append(seed)
    return found


def test_trends_are_alike_where_their_directions_are():
    rise, fall, both = [0.0, 0.1, 0.4], [0.0, -0.2, -0.8], [0.1, -0.3, 0.2]
    assert trend_correlations(aligned([rise, fall], [rise, fall])) == pytest.approx([1, 1])
    assert trend_correlations(aligned([rise], [[-2 * v for v in rise]])) == pytest.approx([-1])
    # Of three seeds with one against the other two: 1, -1 and -1.
    against = [[-v for v in rise]]
    assert trend_correlations(aligned([rise], [rise], against)) == pytest.approx([-1 / 3])
    assert one_sign_at_end(aligned([rise, fall, rise], [both, fall, fall])) == [1, 1, 0]
    # Layers without a whole curve for every seed, or that stay where they are, are left out.
    torn = [0.0, math.nan, 0.4]
    assert len(trend_correlations(aligned([rise, torn], [rise, rise]))) == 1
    assert trend_correlations(aligned([[0.5] * 3], [rise])) == []


# -- encoder_decoder -------------------------------------------------------------------------------

BELL = [0.2, 0.4, 0.6, 0.8, 0.6, 0.4, 0.2]
LEVEL = [0.15, 0.15, 0.16, 0.16, 0.16, 0.15, 0.15]


def profiles_of(**kinds):
    """Three seeds of each kind with a profile of anisotropy and a cosine."""
    found = {}
    for kind, (profile, cosine) in kinds.items():
        found[kind] = []
        for seed in range(3):
            scatter = 0.05 if kind == "decoder" else 0.001
            own = [v + scatter * (layer == 2 * seed + 1) for layer, v in enumerate(profile)]
            course = layers("anisotropy", *(lambda _, v=v: v for v in own))
            course |= layers("cosine", *[lambda _, c=cosine: c] * len(own))
            course["anisotropy/final_norm_layer_06"] = lambda _, v=own[-1]: v
            found[kind].append(history(course))
    return MadeUp(found)


def test_profiles_as_published_agree_and_their_opposites_disagree():
    flat = {"encoder": (LEVEL, 0.1), "decoder_uniform": (LEVEL, 0.1)}
    found = list(EncoderDecoder().claims(profiles_of(decoder=(BELL, 0.5), **flat)))
    assert {each.name: each.verdict for each in found if each.verdict != "agrees"} == {}
    bowl = [0.9 - value for value in BELL]
    runs = profiles_of(decoder=(bowl, 0.1), encoder=(BELL, 0.1), decoder_uniform=(BELL, 0.5))
    verdicts = {each.name: each.verdict for each in EncoderDecoder().claims(runs)}
    for name in (
        "decoder_bell", "decoder_bell_before_norm", "decoder_peak_in_the_middle", "encoder_flat",
        "encoder_flat_over_blocks", "attention_makes_the_bell",
    ):  # fmt: skip
        assert verdicts[name] == "disagrees", name


# -- overfit ---------------------------------------------------------------------------------------


STEPS = (0, 10, 20, 30, 40, 50)
LOSS = {"few": [5.0, 3.0, 2.5, 2.4, 2.6, 3.0], "plenty": [5.0, 3.0, 2.5, 2.4, 2.3, 2.2]}
DIMENSION = {"few": [2.0, 8.0, 5.0, 6.0, 7.0, 8.0], "plenty": [2.0, 8.0, 5.0, 4.9, 4.8, 4.7]}


def overfitting(loss, dimension, seeds=8):
    found = {}
    for kind in ("few", "plenty"):
        curves = {
            "training/held_out_loss": loss[kind],
            "local_dimension/layer_01": [1.0] * 6,  # the last layer counts
            "local_dimension/layer_02": dimension[kind],
        }
        course = {
            tag: lambda step, v=values: v[STEPS.index(step)] for tag, values in curves.items()
        }
        found[kind] = [history(course, STEPS)] * seeds
    return MadeUp(found)


def test_turns_as_published_agree_and_a_control_that_turns_is_a_false_alarm():
    found = {each.name: each for each in Overfit().claims(overfitting(LOSS, DIMENSION))}
    assert {name: each.verdict for name, each in found.items() if each.verdict != "agrees"} == {}
    assert found["local_dimension_turns_before_the_loss"].values == (10.0,) * 8
    assert found["few_texts_overfit"].values == pytest.approx((0.6,) * 8)
    both = dict.fromkeys(("few", "plenty"), DIMENSION["few"])
    verdicts = {each.name: each.verdict for each in Overfit().claims(overfitting(LOSS, both))}
    assert verdicts["local_dimension_turns_with_overfitting_alone"] == "disagrees"
    never = dict.fromkeys(("few", "plenty"), DIMENSION["plenty"])
    found = {each.name: each for each in Overfit().claims(overfitting(LOSS, never))}
    assert found["local_dimension_turns"].verdict == "disagrees"
    assert found["local_dimension_turns_before_the_loss"].values == ()


# -- grokking --------------------------------------------------------------------------------------


def course(values, held_out=0.0, memorised_from=0):
    """A training whose two curves are the same, read every 100 steps."""
    steps = [100 * number for number in range(len(values))]
    accuracies = held_out if isinstance(held_out, list) else [held_out] * len(values)
    learnt = [float(step >= memorised_from) for step in steps]
    return Course(steps, learnt, accuracies, dict.fromkeys(CURVES, values))


@settings(deadline=None, max_examples=20)
@given(modulus=st.integers(2, 30), fraction=st.floats(0.1, 0.9), seed=st.integers(0, 99))
def test_a_split_shares_out_the_whole_table(modulus, fraction, seed):
    train, held_out = split(table(modulus), fraction, seed)
    assert len(train.answers) == round(fraction * modulus**2)
    assert len(torch.cat([train.tokens, held_out.tokens]).unique(dim=0)) == modulus**2
    for part in (train, held_out):
        a, b = part.tokens[:, 0], part.tokens[:, 2]
        assert torch.equal((part.answers + b) % modulus, a)


def test_the_alarm_comes_at_the_first_value_below_all_of_the_controls_so_far():
    controls = [course([9.0, 8.0, 6.0, 7.0, 7.0]), course([9.0, 9.0, 8.0, 7.0, 3.0])]
    run = course([9.0, 8.5, 6.0, 5.9, 5.0])
    assert alarm(run, controls, "local_dimension", 0.0) == 300  # not below 6.0 at step 200
    assert alarm(run, controls, "local_dimension", 0.1) is None  # 5.4, then 2.7


def test_claims_on_a_curve_are_decided_by_it():
    solved = [0.0, 0.0, 0.05, 0.8]
    runs = [course([9.0, 9.0, 4.0 + d, 3.0], held_out=solved) for d in (0.0, 0.1)]
    still = [course([9.0, 9.0, 8.9 + d, 8.9 - d]) for d in (0.0, 0.01) * 6]
    falling = [course([9.0, 9.0, 4.0, 3.0]), course([9.0, 9.0, 4.0, 3.1])]
    found = {each.name: each for each in curve_claims("local_dimension", "", runs, still)}
    names = [
        f"local_dimension_{end}"
        for end in ("falls_before_generalisation", "stays_without_generalisation")
    ]
    assert [found[name].verdict for name in names] == ["agrees"] * 2
    assert [found[name].ours for name in names] == [False, True]
    found = {each.name: each for each in curve_claims("local_dimension", "", runs, falling)}
    assert found[names[1]].verdict == "disagrees"


# -- bias_drift ------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_a_reading_under_a_bias_holds_what_a_direct_computation_gives(norm):
    torch.manual_seed(1)
    architecture = Architecture(1, 32, 2, 12, causal=False, norm=norm)
    model = Transformer(nn.Embedding(500, 32), architecture)
    attention = model.blocks[0].mixing
    with torch.no_grad():
        for part in (attention.query, attention.key):
            part.weight.mul_(20)
            part.bias.normal_()
    tokens, bias = torch.randint(500, (3, 12)), torch.randn(32)
    values = measure(Biased(model, bias), tokens, metrics=METRICS, tokens=36, splits=1)
    with torch.no_grad():
        hidden = model.embedding(tokens) + bias
        output = model.blocks[0](hidden)
        entering = hidden if norm == "post" else model.blocks[0].attention_norm(hidden)
        query, key = (
            part(entering).unflatten(2, (2, -1)) for part in (attention.query, attention.key)
        )
        scores = torch.einsum("bihw,bjhw->bhij", query, key) / 4
    weights = scores.softmax(dim=-1)
    expected = {
        "cosine/layer_00": pair_cosine(hidden.flatten(0, 1)),
        "cosine/layer_01": pair_cosine(output.flatten(0, 1)),
        "drift_norm/layer_01": output.mean(dim=(0, 1)).norm(),
        "mean_norm/layer_00": hidden.norm(dim=2).mean(),
        "query_norm/layer_01": query.norm(dim=3).mean(),
        "key_norm/layer_01": key.norm(dim=3).mean(),
        "score_mean/layer_01": scores.mean(),
        "score_spread/layer_01": scores.var(dim=3, correction=0).mean(dim=(0, 2)).sqrt().mean(),
        "attention_extremes/layer_01/max": weights.amax(dim=3).mean(),
        "attention_extremes/layer_01/sequence_min": weights.amin(dim=(2, 3)).mean(),
    }
    for tag, value in expected.items():
        assert values[tag] == pytest.approx(value.item(), rel=2e-4, abs=2e-6), tag
    # Equation 1 of the paper: E Q = W_Q mean(x) + b_Q.
    mean = attention.query(entering.mean(dim=(0, 1)))
    assert torch.allclose(query.flatten(2).mean(dim=(0, 1)), mean, atol=1e-4)


def pair_cosine(rows):
    unit = rows / rows.norm(dim=1, keepdim=True)
    count = len(rows)
    return ((unit @ unit.T).sum() - count) / (count * (count - 1))


def made_up(levels, **profiles):
    """A series with the given values of metrics by level."""
    readings = []
    for index, _ in enumerate(levels):
        values = {}
        for name, profile in profiles.items():
            metric, _, place = name.partition("__")
            layer, part = (int(place), "") if place.isdigit() else (1, place)
            heads = np.atleast_1d(profile[index]).tolist()
            values[tags.layer_tag(metric, layer, part)] = statistics.fmean(heads)
            for head, value in enumerate(heads if not part else ()):
                values[tags.layer_tag(metric, layer, tags.head_part(head))] = value
        readings.append(reading_of(values, 0))
    return Series(levels, readings)


def test_assertions_measure_what_they_say():
    series = made_up(
        (0.0, 1.0, 8.0),
        cosine__0=[0.0, 0.5, 0.9], cosine__1=[0.1, 0.45, 0.95],
        drift_norm__1=[3.0, 4.0, 4.5],
        score_mean=[[0.0, 0.1], [0.2, -0.2], [0.5, -0.3]], score_spread=[1.0, 2.0, 3.0],
        attention_extremes__max=[0.01, 0.0102, 0.02], attention_extremes__min=[0.2, 0.1, 0.1],
        attention_extremes__sequence_max=[1.0, 1.0, 3.0],
        attention_extremes__sequence_min=[1.0, 1.0, 0.25],
        attention_entropy_normalised=[1.0, 0.9, 0.8], query_norm=[1.0, 1.0, 5.0],
        query_cosine=[0.2, 0.3, 0.3], key_cosine=[0.4, 0.3, 0.3],
        query_anisotropy=[0.2, 0.3, 0.3], key_anisotropy=[0.4, 0.3, 0.3],
    )  # fmt: skip
    expected = {
        "output_cosine_above_input": -0.1,  # of the .5 that are left to 1
        "norm_of_mean_output_rises": 0.5,
        "scores_leave_zero": 0.35,
        "max_rises": 2.0,
        "sequence_min_falls": 0.25,
        "weak_at_low_bias": 1.02,
        "entropy_falls": -0.2,
        "queries_and_keys_lengthen": 5.0,
        "queries_and_keys_cosine_without_bias": 0.3,
    }
    measured = {claim.name: measure(series) for _, claim, measure in questions(2048, 64)}
    for name, value in expected.items():
        assert measured[name] == pytest.approx(value), name
    claims = {one.name: one for one in bias_claims("post_norm", [[series]] * 3, 2048, 64)}
    ours = [claim.name for claim in claims.values() if claim.ours]
    assert ours == ["queries_and_keys_variance_without_bias_post_norm"]
    sign = claims["sign_of_scores_depends_on_the_draw_post_norm"]
    assert sign.values == (1.0,) * 3
    others = list(bias_claims("pre_norm_trained", [[series]] * 3, 2048, 64))
    assert 0 < len(others) < len(claims)
    assert all(claim.ours for claim in others)
