"""Sentences about a run are held to its numbers, by a checker that knows only these.

Records of many shapes are made in memory. A sentence is taken apart by one pattern, and each value,
margin, step and difference in it is compared with the record's.
"""

import dataclasses
import itertools
import math
import random
import re
from statistics import fmean

import pytest

from geomon import Reading, Readings, WandB
from geomon.analysis import compare, curve_of, facts_of, summarise
from geomon.analysis.alerts import RULES, Alert
from geomon.note import Note
from support.readings import TEXTS, raised_of, reading_of
from support.wandb_file import Run

SCHEDULES = (
    [0, *(2**n for n in range(13))],
    [0, *sorted({round(2 ** (n / 4)) for n in range(44)})],
    list(range(0, 2001, 50)),
    list(range(8)),
)
NUMBER = r"-?\d[\d,]*(?:\.\d+)?"
VALUE = rf"({NUMBER})(?: ± ({NUMBER}))?"
SENTENCE = re.compile(
    rf"(?P<title>.*): {VALUE}(?: nats)? at step ({NUMBER})"
    rf"(?:, (?P<word>[a-z]+)(?:, \+?(?P<change>{NUMBER}) ± {NUMBER})?"
    rf"(?: since step (?P<since>{NUMBER}))?)?(?P<course>(?:; (?:start|peak|low|rose|fell) [^;]*)*)"
    r"(?:; (?:Gaussian noise|isotropic noise|uniform attention): \S+)?\."
)
TOLD = re.compile(
    rf"(start|peak|low|rose|fell) (?:to )?{VALUE} at step ({NUMBER})"
    rf"(?: \(between steps ({NUMBER}) and ({NUMBER})\))?"
)
COST = re.compile(
    rf"geomon took (\S+) % of the time until step ({NUMBER}): ({NUMBER}) readings?"
    rf"(?:, at most ({NUMBER}) steps? apart)?(?:, not watched by bands yet: [^.]*)?\."
)
NO_BANDS = ", not watched by bands yet: they need 9 looks and step 200"
ALERT = re.compile(r"Alert at step (\S+?): (.*?) \(layer 2\): .*(?:\n(?:first of (\d+) such)?.*)?")
TITLES = {
    "intrinsic dimension, mean over layers": "twonn",
    "intrinsic dimension, distinct tokens, mean over layers": "twonn_distinct",
    "intrinsic dimension by scale, scale 32, mean over layers": "gride k32",
    "attention entropy, mean over layers": "attention_entropy",
}


# The dimension without noise, at a share of the way on a logarithmic axis of steps, by kind of run.
LEVELS = {
    "rise": lambda share: 2.5 + 6 * share,
    "fall": lambda share: 32 * math.exp(-2 * share),
    "both": lambda share: 2.5 + 9.8 * share if share < 0.5 else 7.4 - 4 * (share - 0.5),
    "flat": lambda share: 5.0,
    "erratic": lambda share: random.uniform(1, 9),
    "diverged": lambda share: 1.14 if share < 0.7 else 7.7,
    "few": lambda share: 5.0,
    "missing": lambda share: 2.5 + 6 * share,
    "halved": lambda share: 11.0 if share < 1 else 5.5,  # at the last reading
    "back": lambda share: 3.2 + 4.4 * share if share < 0.9 else 6.0,  # at the last two
}
KINDS = tuple(LEVELS)


def course(kind, steps, has_margins):
    """Points of one quantity: value and margin by step."""
    points = {}
    for step in steps:
        value = LEVELS[kind](math.log1p(step) / math.log1p(max(*steps, 1)))
        error = 0.02 * value
        margin = 2.36 * error * math.sqrt(fmean(random.gauss(0, 1) ** 2 for _ in range(7)))
        if kind != "missing" or random.random() > 0.2:
            points[step] = (abs(value + random.gauss(0, error)), margin if has_margins else 0.0)
    return points


def record(seed):
    """A record, and the points of its curves by name."""
    random.seed(seed)
    kind, steps = KINDS[seed % len(KINDS)], SCHEDULES[seed // len(KINDS) % 4]
    has_margins, uniform = seed // 40 % 3 > 0, random.uniform
    steps = steps[: random.randint(*(1, 4) if kind == "few" else (8, len(steps)))]
    curves = {
        "twonn": course(kind, steps, has_margins),
        "twonn_distinct": course(random.choice(KINDS[:6]), steps, has_margins),
        "gride k32": course(random.choice(KINDS[:3]), steps, has_margins),
        "attention_entropy": course("fall", steps, has_margins=False),
    }
    readings, alerts = [], []
    for step in steps:
        values = {"geomon/overhead": uniform(0.001, 0.2), "training/loss": uniform(1, 4)}
        for name, points in curves.items():
            metric, _, part = name.partition(" ")
            tag, (value, margin) = f"{metric}/mean/{part}".rstrip("/"), points.get(step, (0, 0))
            values |= {tag: value} if step in points else {}
            values |= {f"{tag}/margin": margin} if margin else {}
        for layer in range(5):
            values[f"anisotropy/layer_{layer:02d}"] = uniform(0.1, 0.9)
            values |= {
                f"qk_cosine/layer_{layer:02d}/head_{head}": uniform(-1, 1)
                for head in range(4 * bool(layer))
            }
        raised = ["rank_collapse"] * (step in steps[-2:]) + ["logit_growth"] * (step == steps[-1])
        alerts += [raised_of(name, step) for name in raised * (kind == "diverged")]
        readings.append(reading_of(values, step, "probe", [Note("kind", "a note")]))
    runs = [{"model": "Synthetic", "metrics": TEXTS}]
    return Readings(runs, readings, raised=alerts), curves


def number(text):
    return float(text.replace(",", ""))


def prints(value, text):
    """Whether a value is printed so, with any number of decimals."""
    decimals = len(text.partition(".")[2])
    return abs(value - number(text)) <= 0.5000001 * 10**-decimals


def shows(points, step, value, margin):
    """Whether a value and a margin are printed as they are at a step."""
    own, error = points[int(number(step))]
    return prints(own, value) and bool(margin) == bool(error) and prints(error, margin or "0")


def faults(sentence, readings, curves):
    """Say what is false in a sentence of the summary."""
    if found := COST.fullmatch(sentence):
        steps = [reading.step for reading in readings]
        gap = max((after - before for before, after in itertools.pairwise(steps)), default=0)
        looked = (number(found[2]), number(found[3]), number(found[4] or "0"))
        right = prints(100 * readings[-1].overhead, found[1])
        return [] if right and looked == (steps[-1], len(steps), gap) else ["cost"]
    if found := ALERT.fullmatch(sentence):
        kind = found[2].replace(" ", "_")
        raised = [alert.step for alert in readings.alerts if alert.note.kind == kind]
        right = (number(found[1]), int(found[3] or 1)) == (raised[0], len(raised))
        return [] if right else ["alert"]
    found = SENTENCE.fullmatch(sentence)
    if found is None or found["title"] not in TITLES:
        return [] if found else ["unknown form"]
    points = curves[TITLES[found["title"]]]
    now, margin, step = found.groups()[1:4]
    word, change, since = found["word"], found["change"], found["since"]
    values, (first, last) = [value for value, _ in points.values()], (min(points), max(points))
    told = {}
    for kind, value, own, at, begin, end in TOLD.findall(found["course"]):
        told[kind] = int(number(at)), value, own, begin, end
    at = {kind: points[step][0] for kind, (step, *_) in told.items()}
    extremes = {"peak": max, "low": min}
    holds = {
        "now": number(step) == last and shows(points, step, now, margin),
        "start": "start" not in told or told["start"][0] == first,
        "told as it was": all(
            shows(points, str(step), value, own) for step, value, own, *_ in told.values()
        ),
        "all that is told is understood": len(told) == found["course"].count("; "),
        "peak and low": all(at[kind] == extremes[kind](values) for kind in {*told} & {*extremes}),
        "steps of a turn": all(
            number(begin) <= step <= number(end)
            for step, _, _, begin, end in told.values() if begin
        ),
        "rose or fell": all(
            (at[kind] > values[0]) == (kind == "rose") for kind in {*told} & {"rose", "fell"}
        ),
        "a word where it can be": (word is None) == (not margin or len(points) < 2),
        "a word needs a stretch": bool(since) == (word not in (None, "unclear")),
        "a change where there is one": bool(change) == (
            word in ("expanding", "rising", "falling", "compressing")),
        "direction": not change or (number(change) > 0) == (word in ("expanding", "rising")),
    }  # fmt: skip
    return [name for name, is_true in holds.items() if not is_true]


def summary_of(description, readings):
    """The summary of W&B after readings and alerts."""
    run = Run()
    sink = WandB(run, pictures=False)
    sink.describe(description)
    for each in readings:
        sink.write(each) if isinstance(each, Reading) else sink.alert(each)
    sink.close()
    return run.summary


@pytest.mark.parametrize("part", range(8))
def test_every_sentence_of_four_hundred_records_holds_for_its_numbers(part):
    false, count, words = [], 0, set()
    for seed in range(50 * part, 50 * part + 50):
        readings, curves = record(seed)
        if not all(curves.values()):
            continue
        sentences = summarise(readings)
        count += len(sentences)
        words |= {fact.word for fact in facts_of(readings)}
        for text in sentences:
            false += [f"record {seed}: {each}: {text}" for each in faults(text, readings, curves)]
    assert count > 250
    assert not false, "\n".join(false)
    assert {"expanding", "falling", "unknown"} <= words


def test_values_that_were_not_measured_are_not_mentioned(make_readings):
    without = ["twonn", "twonn_distinct", "gride", "anisotropy", "qk_cosine", "attention_entropy"]
    none = "9 readings without a headline quantity."
    cost = "geomon took 4.0 % of the time until step 1,500: 9 readings, at most 512 steps apart."
    assert summarise(make_readings(without=without)) == [none, cost]
    looked = "Until step 1,500: 9 readings, at most 512 steps apart."
    assert summarise(make_readings(without=[*without, "geomon"])) == [none, looked]
    for given in (make_readings(without=without).readings, iter(make_readings(without=without))):
        assert summarise(given) == [none, cost]
    assert summarise(Readings([], [])) == summarise([]) == ["No readings yet."]


def test_the_run_of_the_definitions_in_words(make_readings):
    assert summarise(make_readings())[:2] == [
        "intrinsic dimension, mean over layers: 5.3 ± 0.1 at step 1,500, compressing, "
        "-2.2 ± 1.5 since step 128; start 2.5 ± 0.1 at step 0; "
        "peak 7.4 ± 0.1 at step 256 (between steps 128 and 256).",
        "intrinsic dimension, distinct tokens, mean over layers: 4.9 ± 0.1 at step 1,500, falling, "
        "-5.3 ± 4.6 since step 64; start 32.1 ± 0.1 at step 0; fell to 11.0 ± 0.1 at step 64.",
    ]


def test_a_run_read_by_two_sources_is_described_from_one(make_readings):
    probe = make_readings()
    inline = make_readings((1500,), curves={"twonn/mean": [99.0]}, source="inline")
    mixed = Readings(probe.runs, [*probe, *inline])
    assert summarise(mixed) == summarise(probe)


def test_a_run_that_goes_back_is_described_by_the_branch_that_is_trained_now(make_readings):
    first, again = make_readings(), make_readings((300, 600), curves={"twonn/mean": [5.0, 4.0]})
    branch = Readings(first.runs, [*(each for each in first if each.step < 300), *again])
    found = summary_of(first.runs[0], (*first, *again))["geomon/facts"]
    assert found.splitlines() == [fact.sentence for fact in facts_of(branch)]
    assert "at step 600" in found


@pytest.mark.parametrize(
    ("looks", "said"),
    [
        ([(1, 0, 0)], f"1 reading{NO_BANDS}"), ([(1, 0, 1)], f"1 reading, 1 check{NO_BANDS}"),
        ([(1, 0, 0), (2, 9, 1_200)], "2 readings, at most 9 steps apart, 1,200 checks"),
        # Pages that keep few readings know of all; older records count what they hold.
        ([(1, 0, 0), (40, 351, 0)], "40 readings, at most 351 steps apart"),
        ([(0, 0, 0)] * 3, f"3 readings, at most 50 steps apart{NO_BANDS}"),
        ([(1, 0, 0), (6, 50, 2)], f"6 readings, at most 50 steps apart, 2 checks{NO_BANDS}"),
        ([(1, 0, 0), (6, 50, 3)], "6 readings, at most 50 steps apart, 3 checks"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("last", [200, 199])
def test_how_often_a_run_was_looked_at_is_said(looks, said, last):
    steps = range(last - 50 * (len(looks) - 1), last + 1, 50)
    readings = [
        reading_of({"geomon/overhead": 0.14}, step, count=count, gap=gap, checks=checks)
        for step, (count, gap, checks) in zip(steps, looks, strict=True)
    ]
    if NO_BANDS not in said:  # bands begin at step 200
        said += NO_BANDS if last < 200 else ", not watched by bands before step 200"
    sentence = f"geomon took 14 % of the time until step {last}: {said}."
    assert summarise(Readings([], readings))[-1] == sentence


def test_a_run_says_from_which_step_on_bands_watched_it():
    readings = [reading_of({}, step, count=n) for n, step in enumerate(range(0, 800, 64), 1)]
    looked = summarise(Readings([], readings))[-1]
    assert looked == "Until step 768: 13 readings, not watched by bands before step 512."


def test_one_reading_has_no_trend(make_readings):
    first = summarise(make_readings((0,)))[0]
    assert first.startswith("intrinsic dimension, mean over layers: 2.5 ± 0.1 at step 0")
    assert "unknown" not in first
    assert "start" not in first


@pytest.mark.parametrize(
    ("value", "margin", "printed"),
    [(123.4, 23.0, "123 ± 23"), (5.347, 0.123, "5.3 ± 0.1"), (0.01234, 1e-4, "0.0123 ± 0.0001"),
     (-1e-9, 0.1, "0.0 ± 0.1"), (2e6, 5e4, "2000000 ± 50000"), (7.96, 1.4, "8.0 ± 1.4"),
     (0.12345678, 3e-8, "0.123457 ± 0.000000")],
)  # fmt: skip
def test_a_value_is_printed_with_the_digits_that_its_margin_allows(value, margin, printed):
    values = {"twonn/mean": value, "twonn/mean/margin": margin}
    assert f": {printed} at step 0" in summarise(Readings([], [reading_of(values)]))[0]


def test_what_pages_share_cannot_be_changed_by_one_of_them(make_readings):
    readings = make_readings()
    fact, *_ = facts_of(readings)
    difference, *_ = compare(readings, make_readings(curves={"twonn/mean": [9.0] * 9}))
    rule = RULES["rank_collapse"]
    alert = Alert("rank_collapse", 3, layers=(1,), numbers={"lowest": 1.0, "limit": 1.1})
    assert "effective rank 1.00, below 1.1" in alert.words()
    shared = (fact, fact.quantity, fact.phase, curve_of(readings, "twonn"), difference, alert)
    for each in shared:
        name = dataclasses.fields(each)[0].name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(each, name, getattr(each, name))
    with pytest.raises(AttributeError):
        rule.false_alarms = 9
