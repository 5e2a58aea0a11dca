"""Findings that experiments read off curves and records of known shape."""

import itertools
import math
import statistics

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
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
from recipes.grokking.leads import CURVES, alarm
from recipes.overfit.experiment import Overfit
from recipes.papers.alignment import LayerAlignment
from recipes.study.claim import answers
from recipes.study.history import History
from recipes.study.model import Architecture, Transformer
from support.readings import reading_of


def history(course, steps=(0, 25, 50, 75, 100)):
    """A history in which every tag has the value of its function at each step."""
    readings = [
        reading_of({tag: function(step) for tag, function in course.items()}, step)
        for step in steps
    ]
    return History(Readings([{}], readings))


def constant(value):
    return lambda step: value


def verdicts(claims):
    return {each.name: each.verdict for each in claims}


class MadeUp:
    """Records of an experiment: the same for every seed but for a little scatter."""

    def __init__(self, seeds):
        self.of = lambda kind, watch="": seeds[kind]


def layers(metric, *functions):
    return {f"{metric}/layer_{n:02d}": function for n, function in enumerate(functions)}


# -- values over a training ------------------------------------------------------------------------


def test_a_change_is_read_between_readings():
    linear = history({"a/mean": lambda step: 1.0 + step})
    assert linear.change("a/mean", 0, 1) == pytest.approx(100)
    assert linear.change("a/mean", 0.25, 0.75) == pytest.approx(76 / 26 - 1)


# -- decoder ---------------------------------------------------------------------------------------


def test_expansion_is_counted_for_the_paper_by_its_own_estimator():
    expanding = ("twonn/mean/discard_0", "twonn/mean/discard_80", "twonn/mean",
                 "twonn_distinct/mean", *(f"gride/mean/k{2**n}" for n in range(6)))  # fmt: skip
    course = dict.fromkeys(expanding, lambda step: {0: 2, 25: 8}.get(step, 4))
    for metric in ("anisotropy", "local_anisotropy"):
        course |= layers(metric, *[lambda step: 0.5 + step] * 3)
        course |= {f"{metric}/mean": float, f"{metric}/null": constant(0.25)}
    claims = answers(shape_questions(), [history(course)])
    changes = [claim for claim in claims if "dimension" in claim.asserts]
    assert [claim.values for claim in changes].count((3.0,)) == 10
    assert [claim.values for claim in changes].count((-0.5,)) == 10
    assert [claim.name for claim in changes if not claim.ours] == [
        "twonn_discard_0_expands", "twonn_discard_0_compresses",
    ]  # fmt: skip


def test_heads_are_counted_on_their_side():
    cosines = {"head_0": 0.9, "head_1": -0.9, "head_2": 0.1, "head_3": -0.8}
    course = {f"qk_cosine/layer_01/{name}": constant(value) for name, value in cosines.items()}
    course |= {f"qk_dot/layer_01/{name}": float for name in cosines}
    for metric in ("cosine", "drift_norm", "query_cosine", "key_cosine", "attention_entropy",
                   "mean_query_share", "anisotropy"):  # fmt: skip
        course |= layers(metric, *[constant(0.5 / n) for n in (1, 2, 3)])
    course |= {"qk_cosine/null_magnitude": constant(0.1), "anisotropy/null": constant(0.1)}
    claims = answers(attention_questions(128, 32), [history(course)])
    values = {claim.name: claim.values for claim in claims}
    expected = {
        "almost_all_heads_align": (0.75,), "some_heads_opposite": (0.5,),
        "similar_heads_align_early": (0,),
        "first_layers_sharper": (pytest.approx(0.25 - 0.5 / 3),),
    }  # fmt: skip
    assert {name: values[name] for name in expected} == expected
    assert len(values["opposite_heads_align_late"]) == 2


def pairs_of(curve):
    """Queries and keys with these cosines."""
    return [[value, math.sqrt(1 - value**2)] for value in curve], [[1.0, 0.0] for _ in curve]


def aligned(*curves):
    """Histories of seeds whose layers have these curves, [seeds][layers][steps]."""
    found = [history({}) for _ in curves]
    for seed, of_seed in zip(found, curves, strict=True):
        seed.__dict__["joined_heads"] = {
            number: LayerAlignment(
                number,
                tuple(range(len(curve))),
                *(np.array(each)[:, None] for each in pairs_of(curve)),
            )
            for number, curve in enumerate(of_seed, start=1)
        }
    return found


def test_trends_are_alike_where_their_directions_are():
    rise, fall, both = [0.0, 0.1, 0.4], [0.0, -0.2, -0.8], [0.1, -0.3, 0.2]
    assert trend_correlations(aligned([rise, fall], [rise, fall])) == pytest.approx([1, 1])
    assert trend_correlations(aligned([rise], [[-2 * v for v in rise]])) == pytest.approx([-1])
    # Three seeds, one against the other two: 1, -1 and -1.
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
    found = {kind: [] for kind in kinds}
    for (kind, (profile, cosine)), seed in itertools.product(kinds.items(), range(3)):
        scatter = 0.05 if kind == "decoder" else 0.001
        own = [v + scatter * (layer == 2 * seed + 1) for layer, v in enumerate(profile)]
        course = layers("anisotropy", *map(constant, own))
        course |= layers("cosine", *[constant(cosine)] * len(own))
        course["anisotropy/final_norm_layer_06"] = constant(own[-1])
        found[kind].append(history(course))
    return MadeUp(found)


def test_profiles_as_published_agree_and_their_opposites_disagree():
    flat = {"encoder": (LEVEL, 0.1), "decoder_uniform": (LEVEL, 0.1)}
    found = verdicts(EncoderDecoder().claims(profiles_of(decoder=(BELL, 0.5), **flat)))
    assert {*found.values()} == {"agrees"}
    bowl = [0.9 - value for value in BELL]
    runs = profiles_of(decoder=(bowl, 0.1), encoder=(BELL, 0.1), decoder_uniform=(BELL, 0.5))
    found = verdicts(EncoderDecoder().claims(runs))
    assert {name for name, verdict in found.items() if verdict == "disagrees"} >= {
        "decoder_bell", "decoder_bell_before_norm", "decoder_peak_in_the_middle", "encoder_flat",
        "encoder_flat_over_blocks", "attention_makes_the_bell",
    }  # fmt: skip


# -- overfit ---------------------------------------------------------------------------------------


STEPS = (0, 10, 20, 30, 40, 50)
LOSS = {"few": [5.0, 3.0, 2.5, 2.4, 2.6, 3.0], "plenty": [5.0, 3.0, 2.5, 2.4, 2.3, 2.2]}
DIMENSION = {"few": [2.0, 8.0, 5.0, 6.0, 7.0, 8.0], "plenty": [2.0, 8.0, 5.0, 4.9, 4.8, 4.7]}


def overfitting(dimension):
    """The claims on eight seeds whose held-out losses are as published."""
    found = {}
    for kind in ("few", "plenty"):
        curves = {
            "training/held_out_loss": LOSS[kind],
            "local_dimension/layer_01": [1.0] * 6,  # the last layer counts
            "local_dimension/layer_02": DIMENSION[dimension.get(kind, kind)],
        }
        course = {
            tag: lambda step, v=values: v[STEPS.index(step)] for tag, values in curves.items()
        }
        found[kind] = [history(course, STEPS)] * 8
    return {each.name: each for each in Overfit().claims(MadeUp(found))}


def test_turns_as_published_agree_and_a_control_that_turns_is_a_false_alarm():
    found = overfitting({})
    assert {each.verdict for each in found.values()} == {"agrees"}
    assert found["local_dimension_turns_before_the_loss"].values == (10.0,) * 8
    assert found["few_texts_overfit"].values == pytest.approx((0.6,) * 8)
    both = overfitting({"plenty": "few"})
    assert both["local_dimension_turns_with_overfitting_alone"].verdict == "disagrees"
    never = overfitting({"few": "plenty"})
    assert never["local_dimension_turns"].verdict == "disagrees"
    assert never["local_dimension_turns_before_the_loss"].values == ()


# -- grokking --------------------------------------------------------------------------------------


def course(values, held_out=0.0, memorised_from=0):
    """A training whose two curves are the same, read every 100 steps."""
    accuracies = held_out if isinstance(held_out, list) else [held_out] * len(values)
    curves = {
        f"{name}/layer_{n:02d}": [value * n for value in values] for name in CURVES for n in (0, 1)
    }  # the last layer counts
    curves["training/held_out_accuracy"] = accuracies
    found = {tag: lambda step, v=each: v[step // 100] for tag, each in curves.items()}
    found["training/training_accuracy"] = lambda step: float(step >= memorised_from)
    return history(found, [100 * number for number in range(len(values))])


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
    for controls, verdict in ((still, "agrees"), (falling, "disagrees")):
        found = {each.name: each for each in curve_claims("local_dimension", "", runs, controls)}
        falls = found["local_dimension_falls_before_generalisation"]
        stays = found["local_dimension_stays_without_generalisation"]
        assert (falls.verdict, falls.ours) == ("agrees", False)
        assert (stays.verdict, stays.ours) == (verdict, True)


# -- bias_drift ------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_a_bias_is_one_vector_that_is_added_to_every_embedding(norm):
    torch.manual_seed(1)
    architecture = Architecture(1, 32, 2, 12, causal=False, norm=norm)
    model = Transformer(nn.Embedding(500, 32), architecture)
    tokens, bias = torch.randint(500, (3, 12)), torch.randn(32)
    options = {"metrics": METRICS, "tokens": 36, "splits": 1}
    found = measure(Biased(model, bias), tokens, **options)
    with torch.no_grad():
        model.embedding.weight.add_(bias)
    plain = measure(Biased(model, torch.zeros(32)), tokens, **options)
    assert dict(found) == pytest.approx(dict(plain), rel=1e-5, abs=1e-7, nan_ok=True)
    assert {"attention_extremes/layer_01/sequence_min", "query_cosine/layer_01"} <= found.keys()


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
            values |= {
                tags.layer_tag(metric, layer, tags.head_part(head)): value
                for head, value in enumerate(heads if not part else ())
            }
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
