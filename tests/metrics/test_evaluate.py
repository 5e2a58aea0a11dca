import math
import random
import re

import numpy as np
import pytest
import torch

from geomon import at_last, select
from geomon.metrics import Evaluator, LayerValues, check_metrics
from support.fingerprint import random_state
from support.measuring import SOURCES, Layer, PassInfo, Sizes, Snapshot, evaluate


def snapshot(*hidden, **captured) -> Snapshot:
    """A stack of layers with hidden states; layer 0 has nothing but these."""
    layers = [
        Layer(
            i, f"layer {i}", {"hidden": h, "precision": 1e-7, **captured},
            sources=frozenset(SOURCES if i else ["hidden"]),
        )
        for i, h in enumerate(hidden)
    ]  # fmt: skip
    return Snapshot(layers, PassInfo(len(hidden[0]), "eval", "float32"))


def of_layers(*layers):
    return Snapshot([*layers], PassInfo(4, "eval", "float32"))


def full(value, count=4):
    return torch.full((count, 1), float(value))


def fails_at_two(hidden):
    if hidden[0, 0] == 2:
        raise ValueError("two")
    return hidden.mean()


class Norm:
    """A metric of one's own that has no hash."""

    __hash__ = None

    def __call__(self, hidden):
        return hidden.norm()


def mean(hidden):
    return hidden.mean()


def query_mean(query):
    return query.mean()


TWELVE, FOUR, NAN = torch.arange(12.0)[:, None], [full(value) for value in range(4)], math.nan
HEADS = torch.tensor([1.0, 5.0, NAN])
QUERY = {"query": torch.ones(2)}
ATTENTION, HIDDEN = frozenset({"attention"}), frozenset({"hidden"})
# Snapshot and metrics; all values, or some of them; words of each note.
EVALUATED = {
    # Batches 0..3 and 4..7: the rest is left out.
    "mean of two batches and their deviation": (
        snapshot(2 * TWELVE, TWELVE), {"m": mean},
        {"m/layer_00": 7.0, "m/layer_00/std": 32**0.5, "m/layer_01": 3.5, "m/layer_01/std": 8**0.5,
         "m/mean": 3.5, "m/mean/std": 8**0.5},
        [],
    ),
    "no deviation if a batch has no value": (
        snapshot(TWELVE - 9, TWELVE - 9), {"m": lambda hidden: hidden.mean().log()},
        {"m/layer_01/std": NAN}, [],
    ),
    "a part": (
        snapshot(TWELVE), {"m": lambda hidden: {1: hidden.mean()}}, {"m/layer_00/1": 3.5}, [],
    ),
    "heads have mean, extremes and each": (
        snapshot(full(0), full(0), query=HEADS), {"m": lambda query: query},
        {"m/layer_01": 3.0, "m/layer_01/min": 1.0, "m/layer_01/max": 5.0, "m/layer_01/head_0": 1.0,
         "m/layer_01/head_1": 5.0, "m/layer_01/head_2": NAN, "m/mean": 3.0, "m/mean/min": 1.0,
         "m/mean/max": 5.0, "m/mean/head_0": None, "m/layer_00": None},
        [],
    ),
    "a layer that failed has a part in the mean": (
        snapshot(*FOUR), {"m": fails_at_two},
        {"m/layer_01": 1.0, "m/layer_02": NAN, "m/mean": NAN}, ["m, layer 2: two"],
    ),
    "a layer that was not seen has none": (
        of_layers(*(Layer(n, "", {"hidden": FOUR[n]}) for n in (0, 1, 3)),
                  Layer(2, "two", {}, {"hidden": "it was skipped"})),
        {"m": fails_at_two}, {"m/layer_02": NAN, "m/mean": 2.0}, [".*it was skipped"],
    ),
    "a result of the wrong shape": (
        snapshot(torch.ones(4, 2)), {"m": lambda hidden: hidden}, {"m/layer_00": NAN},
        [r".*a scalar, a vector \[heads\] or a dict of these, got shape \[4, 2\]"],
    ),
    "stacks have their own means": (
        of_layers(
            *(Layer(n, "", {"hidden": full(start + n)}, stack=stack)
              for stack, start in (("encoder", 1), ("decoder", 10)) for n in range(3)),
            Layer(1, "", QUERY, stack="cross", sources=ATTENTION),
        ),
        {"m": mean, "q": query_mean},
        {"m/encoder_layer_02": 3.0, "m/encoder_mean": 2.5, "m/decoder_mean": 11.5,
         "q/cross_layer_01": 1.0, "m/cross_layer_01": None, "m/mean": None},
        ["encoder: q.*", "decoder: q.*"],
    ),
    "a layer without attention is no failure of its metrics": (
        of_layers(*(Layer(n, "", QUERY, sources=ATTENTION) for n in (1, 3)),
                  Layer(2, "", {"hidden": torch.ones(4, 2)}, sources=HIDDEN)),
        {"q": lambda query: query}, {"q/layer_01/head_1": 1.0, "q/layer_02": NAN, "q/mean": 1.0},
        [],
    ),
    "an object without a hash": (
        snapshot(*[torch.eye(4)] * 2, last_hidden=torch.eye(3), last_precision=1e-7),
        {"all": (norm := Norm()), "last": at_last(norm)},
        {"all/layer_01": 2.0, "last/layer_01": 3**0.5}, [],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", EVALUATED)
def test_values_and_notes(case):
    seen, metrics, expected, notes = EVALUATED[case]
    splits = 2 if seen.info.tokens > 4 else 1
    found = evaluate(seen, metrics, rows=4, splits=splits)
    assert {tag: found.values.get(tag) for tag in expected} == pytest.approx(expected, nan_ok=True)
    said = "\n".join(note.words() for note in found.notes)
    assert re.fullmatch("\n".join(notes), said)


def test_the_note_on_a_metric_that_failed_is_an_error_and_that_on_an_unseen_view_is_not():
    unseen = Layer(2, "two", {}, {"hidden": "it was skipped"})
    layers = of_layers(*(Layer(n, "", {"hidden": FOUR[n + 1]}) for n in (0, 1)), unseen)
    found = evaluate(layers, {"m": fails_at_two}, rows=4, splits=1)
    assert {note.words(): note.is_error for note in found.notes} == {
        "m, layer 2: 'hidden' is missing: it was skipped": False, "m, layer 1: two": True,
    }  # fmt: skip


def test_the_mean_needs_no_note_of_its_own_if_a_layer_failed():
    evaluator = Evaluator(check_metrics({"m": fails_at_two}), 1, explains=True)
    found = evaluator.evaluate(snapshot(*FOUR).layers, 4)
    assert math.isnan(found.stacks[""]["m"].mean)
    assert [note.words() for note in found.notes] == ["m, layer 2: two"]


def test_a_strict_evaluation_raises():
    with pytest.raises(ValueError, match="two"):
        values({"m": fails_at_two}, snapshot(*FOUR), strict=True)


def values(metrics, seen, rows=4, splits=2, **kwargs):
    return evaluate(seen, metrics, rows=rows, splits=splits, **kwargs).values


def test_a_metric_that_draws_random_numbers_leaves_those_of_the_training():
    def draws(hidden):
        return torch.rand(1) + np.random.rand() + random.random()

    before = random_state()
    values({"m": draws}, snapshot(torch.ones(4, 1)))
    assert random_state() == before


def test_metrics_do_not_run_under_autocast_nor_autograd():
    seen = snapshot(torch.ones(4, 4), torch.ones(4, 4, requires_grad=True))
    dtypes = []

    def product(hidden):
        result = hidden @ hidden.T
        dtypes.append((result.dtype, result.requires_grad))
        return result.sum()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        values({"m": product}, seen)
    assert set(dtypes) == {(torch.float32, False)}


def test_nulls_are_of_the_rows_that_were_measured():
    rows = torch.randn(500, 6, generator=torch.Generator().manual_seed(0))
    metrics = select("anisotropy", "twonn")
    for asked, measured in ((100, 100), (500, 500), (4000, 500)):
        found = values(metrics, snapshot(rows, rows), rows=asked, splits=1)
        for name, metric in metrics.items():
            expected = metric.null(Sizes(measured, 6))
            assert expected
            assert {part: found[f"{name}/{part}"] for part in expected} == expected
    copied = torch.cat([rows, rows[:125]])  # a fifth are copies: the null is that of the others
    found = values(metrics, snapshot(copied, copied), rows=625, splits=1)
    assert found["anisotropy/null"] == metrics["anisotropy"].null(Sizes(500, 6))["null"]


def test_the_number_of_sequences_stands_beside_that_of_rows():
    hidden = torch.randn(240, 4, generator=torch.Generator().manual_seed(0))
    numbers = torch.arange(240) % 12
    found = values(select("twonn", "variance"), snapshot(hidden, sequences=numbers), rows=120)
    assert found["twonn/layer_00/n"] == 120  # in one of two splits
    assert found["twonn/layer_00/sequences"] == 12
    assert "variance/layer_00/sequences" not in found
    unknown = values(select("twonn"), snapshot(hidden), rows=120)
    assert not [tag for tag in unknown if tag.endswith("/sequences")]


def test_a_metric_that_changes_its_views_changes_no_other_metric_and_no_second_measurement():
    def changes(hidden, token_ids, precision, spectrum, nearest):
        for view in (hidden, token_ids, spectrum, *nearest):
            view.zero_()
        return float(hidden.sum())

    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(40, 4, generator=generator)
    ids = torch.randint(9, (40,), generator=generator)
    seen = snapshot(rows, rows.clone(), token_ids=ids)
    plain = select("effective_rank", "cosine", "within_variance", "twonn")
    expected = values(plain, seen, rows=20)
    for _ in range(2):  # as after a trial of what a layer costs
        found = values({"changes": changes} | plain, seen, rows=20)
        assert found.pop("changes/mean") == 0.0
        assert {t: v for t, v in found.items() if not t.startswith("changes")} == expected


@pytest.mark.parametrize(
    ("metric", "shape", "said"),
    [
        ("anisotropy", (2049, 1025), True), ("anisotropy", (2048, 1025), False),
        ("anisotropy", (2049, 1024), False), ("cosine", (2049, 1025), False),
    ],
)  # fmt: skip
def test_a_note_says_where_spectra_stand_on_fewer_rows(metric, shape, said):
    measured = LayerValues("", 3, shape, {metric: {"": np.array([[0.5]])}}, sequences=8)
    notes = Evaluator(check_metrics([metric]), 1).combine([measured], shape[0]).notes
    text = "spectra of layers wider than 1024 columns use only 2048 rows, layer 3"
    assert [note.words() for note in notes] == [text] * said


def one(value, groups=0):
    """A value of one split, and as many without a group of sequences."""
    return np.full((1, 1 + groups), value)


def measured_at(layer, parts, shape=(600, 40), **more):
    return LayerValues("", layer, shape, parts, **more)


RANK, ENTROPY = "effective_rank_last", "attention_entropy"
FEW_LAST = "{}: {} sequences for a width of {} are few: compare only with readings of as many sequ"
NO_INTERVALS = "no 95 % intervals: they need 8 sequences in a reading, but it has "
# Values of layers, and notes on the number of sequences.
FEW_SEQUENCES = [
    ([measured_at(1, {"cosine": {"": one(0.5)}}, sequences=5),
      measured_at(2, {"cosine": {"": one(0.5)}}, sequences=7)], [f"{NO_INTERVALS}7"]),
    ([measured_at(1, {"cosine": {"": one(0.5)}}, sequences=8)], []),
    ([measured_at(1, {"cosine": {"": one(0.5)}})], []),
    ([measured_at(1, {RANK: {"": one(3.0), "n": one(79.0)}})], [FEW_LAST.format(RANK, 79, 40)]),
    ([measured_at(1, {RANK: {"": one(3.0), "n": one(80.0)}})], []),
    ([measured_at(1, {RANK: {"": one(3.0), "n": one(80.0)}}, (600, 30)),
      measured_at(2, {RANK: {"": one(3.0), "n": one(80.0)}}, (600, 41))],
     [FEW_LAST.format(RANK, 80, 41)]),
    ([measured_at(1, {"drift_norm": {"": one(3.0, 8)}, ENTROPY: {"": one(2.0)},
                      "attention_sink": {"": one(0.1)}}, sequences=8)],
     [f"no 95 % intervals for {ENTROPY}, attention_sink: they need 8 sequences, but queries came "
      "from fewer; a larger tokens takes them from more"]),
    ([measured_at(1, {"drift_norm": {"": one(3.0, 8)}, ENTROPY: {"": one(2.0, 8)}}, sequences=8)],
     []),
    ([measured_at(1, {ENTROPY: {"": one(2.0)}}, sequences=8)], []),  # no value has an interval
]  # fmt: skip


@pytest.mark.parametrize(("layers", "said"), FEW_SEQUENCES)
def test_notes_say_what_stands_on_few_sequences(layers, said):
    names = dict.fromkeys(name for layer in layers for name in layer.parts)
    evaluator = Evaluator(check_metrics([*names]), 1)
    notes = [note.words() for note in evaluator.combine(layers, 600).notes]
    assert [note[: len(words)] for note, words in zip(notes, said, strict=True)] == said


@pytest.mark.parametrize(
    "error", [SystemExit("usage: tool FILE"), GeneratorExit(), SystemExit(2), KeyboardInterrupt()]
)
def test_a_metric_that_exits_costs_its_own_values_alone_but_for_ctrl_c(error):
    def leaves(hidden):
        raise error

    seen, is_exit = snapshot(full(1), full(1)), not isinstance(error, KeyboardInterrupt)
    with pytest.raises(type(error)):
        values({"leaves": leaves}, seen, strict=is_exit)
    if is_exit:
        found = evaluate(seen, {"leaves": leaves, "m": mean}, rows=4, splits=1)
        expected = {"m/layer_01": 1.0, "leaves/layer_01": NAN}
        assert {tag: found.values[tag] for tag in expected} == pytest.approx(expected, nan_ok=True)
        assert any(type(error).__name__ in str(note) for note in found.notes)
