"""What geomon says of a run is held to the numbers under it, by a checker that knows only these.

Records of many shapes are made in memory. A sentence is taken apart by one pattern, and each value,
margin, step and difference in it is compared with the record's.
"""

import math
import random
import re
from statistics import fmean

import pytest
from rich.console import Console
from tagged import TEXTS, raised_of, reading_of
from wandb_file import Run

from geomon import Reading, Readings, WandB
from geomon.analysis import facts_of, summarise
from geomon.note import Note
from geomon.show import format_line, view

KINDS = ("rise", "fall", "both", "flat", "erratic", "diverged", "few", "missing", "halved", "back")
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
    rf"(?:, (?P<word>[a-z]+)(?:, \+?{VALUE} since step ({NUMBER}))?)?"
    rf"(?:; peak {VALUE} at step ({NUMBER})(?: \(between steps ({NUMBER}) and ({NUMBER})\))?"
    rf"(?:, \+?{VALUE} since)?)?"
    rf"(?:; start {VALUE} at step ({NUMBER})(?:, \+?{VALUE} since)?)?"
    r"(?:; (?:Gaussian noise|isotropic noise|uniform attention): \S+)?\."
)
ALERT = re.compile(r"Alert at step (\S+?)(?: \(first of (\d+)\))?: (.*?) \(layer 2\): .*")
TITLES = {
    "intrinsic dimension, mean over layers": "twonn",
    "intrinsic dimension, distinct tokens, mean over layers": "twonn_distinct",
    "intrinsic dimension by scale, scale 32, mean over layers": "gride k32",
    "attention entropy, mean over layers": "attention_entropy",
}


def level(kind, share, rng):
    """The dimension without noise, at a share of the way on a logarithmic axis of steps."""
    if kind in ("rise", "missing"):
        return 2.5 + 6 * share
    if kind == "fall":
        return 32 * math.exp(-2 * share)
    if kind == "both":
        return 2.5 + 9.8 * share if share < 0.5 else 7.4 - 4 * (share - 0.5)
    if kind == "erratic":
        return rng.uniform(1, 9)
    if kind == "diverged":
        return 1.14 if share < 0.7 else 7.7
    if kind == "halved":  # level, and half at the last reading
        return 11.0 if share < 1 else 5.5
    if kind == "back":  # expanding, and back at the last two
        return 3.2 + 4.4 * share if share < 0.9 else 6.0
    return 5.0


def course(kind, steps, has_margins, rng):
    """Points of one quantity: value and margin by step."""
    points = {}
    for step in steps:
        value = level(kind, math.log1p(step) / math.log1p(max(*steps, 1)), rng)
        error = 0.02 * value
        margin = 2.36 * error * math.sqrt(fmean(rng.gauss(0, 1) ** 2 for _ in range(7)))
        if kind == "missing" and rng.random() < 0.2:
            continue
        points[step] = (abs(value + rng.gauss(0, error)), margin if has_margins else 0.0)
    return points


def record(seed):
    """A record, and the points of what it holds, by name."""
    rng = random.Random(seed)
    kind, steps = KINDS[seed % len(KINDS)], SCHEDULES[seed // len(KINDS) % 4]
    has_margins = seed // 40 % 3 > 0
    steps = steps[: rng.randint(1, 4)] if kind == "few" else steps[: rng.randint(8, len(steps))]
    curves = {"twonn": course(kind, steps, has_margins, rng)}
    for name, kinds in (("twonn_distinct", KINDS[:6]), ("gride k32", KINDS[:3])):
        curves[name] = course(rng.choice(kinds), steps, has_margins, rng)
    curves["attention_entropy"] = course("fall", steps, has_margins=False, rng=rng)
    readings, alerts = [], []
    for step in steps:
        values = {"geomon/overhead": rng.uniform(0.001, 0.2), "training/loss": rng.uniform(1, 4)}
        for name, points in curves.items():
            metric, _, part = name.partition(" ")
            tag = f"{metric}/mean/{part}".rstrip("/")
            if step in points:
                values[tag] = points[step][0]
                values |= {f"{tag}/margin": points[step][1]} if points[step][1] else {}
        for layer in range(5):
            values[f"anisotropy/layer_{layer:02d}"] = rng.uniform(0.1, 0.9)
            for head in range(4 * bool(layer)):
                values[f"qk_cosine/layer_{layer:02d}/head_{head}"] = rng.uniform(-1, 1)
        raised = ["rank_collapse"] * (step in steps[-2:]) + ["logit_growth"] * (step == steps[-1])
        for name in raised * (kind == "diverged"):
            alerts.append(raised_of(name, step))
        readings.append(reading_of(values, step, "probe", [Note("kind", "a note")]))
    runs = [{"model": "Synthetic", "metrics": TEXTS}]
    return Readings(runs, readings, raised=alerts), curves


def number(text):
    return float(text.replace(",", ""))


def prints(value, text):
    """Whether a value is printed so, with any number of decimals."""
    decimals = len(text.partition(".")[2])
    return abs(value - number(text)) <= 0.5000001 * 10**-decimals


def faults(sentence, readings, curves):
    """What is false in a sentence of the summary."""
    steps = [reading.step for reading in readings]
    if found := re.fullmatch(rf"geomon took (\S+) % of the time until step ({NUMBER})\.", sentence):
        share, step = found.groups()
        last = readings[-1]
        right = prints(100 * last.overhead, share) and number(step) == last.step
        return [] if right else ["cost"]
    if found := ALERT.fullmatch(sentence):
        kind = found[3].replace(" ", "_")
        raised = [alert.step for alert in readings.alerts if alert.note.kind == kind]
        right = (number(found[1]), int(found[2] or 1)) == (raised[0], len(raised))
        return [] if right else ["alert"]
    found = SENTENCE.fullmatch(sentence)
    if found is None:
        return ["unknown form"]
    if found["title"] not in TITLES:
        return []
    points = curves[TITLES[found["title"]]]
    (now, margin, step, word, change, change_margin, since, peak, peak_margin, peak_step,
     first, last, from_peak, _, start, start_margin, start_step, from_start, _) = (
        found.groups()[1:]
    )  # fmt: skip
    wrong = []

    def same(value, known, at, printed=None):
        own, its_margin = points[int(number(at))]
        fits = prints(own, value) and (bool(known) == bool(its_margin))
        if not fits or (known and not prints(its_margin, known)):
            wrong.append(f"{printed}: {own} ± {its_margin} at {at}")

    same(now, margin, step, "now")
    if number(step) != max(points):
        wrong.append("not the last")
    if (start is None) != (len(points) == 1):
        wrong.append("start")
    if start is not None:
        same(start, start_margin, start_step, "start")
    if peak is not None:
        same(peak, peak_margin, peak_step, "peak")
        if points[int(number(peak_step))][0] < max(value for value, _ in points.values()):
            wrong.append("not the peak")
        if first and not number(first) <= number(peak_step) <= number(last):
            wrong.append("peak outside its steps")
    elif max(points.values())[0] > max(points[min(points)][0], points[max(points)][0]):
        wrong.append("no peak")
    for at, said in ((peak_step, from_peak), (start_step, from_start)):
        if said is not None and not prints(
            points[max(points)][0] - points[int(number(at))][0], said
        ):
            wrong.append(f"change since {at}")
        if at is not None and (said is None) != (at == since or not margin):
            wrong.append(f"no change since {at}, or twice")
    if since is not None:
        gap = points[max(points)][0] - points[int(number(since))][0]
        if not prints(gap, change):
            wrong.append(f"change {gap}")
        moved = abs(gap) > number(change_margin)
        if abs(abs(gap) - number(change_margin)) > 0.06 and moved != (word != "level"):
            wrong.append("the word does not follow from the change")
        if word != "level" and (gap > 0) != (word in ("expanding", "rising")):
            wrong.append("direction")
        later = [s for s in steps if s in points and s > number(since)]
        errors = [math.hypot(points[s][1], points[max(points)][1]) for s in later]
        gaps = [abs(points[s][0] - points[max(points)][0]) for s in later]
        if any(g > 2.6 * e for g, e in zip(gaps, errors, strict=True)):
            wrong.append("a later reading differs more")
    elif word not in ("unclear", None):
        wrong.append("a word without a change")
    if (word is None) != (not margin or len(points) < 2):
        wrong.append("a word where none can be, or none")
    return wrong


def pages_agree(readings, sentences):
    """Hold what other pages say of a run to its sentences."""
    first = next(text for text in sentences if not text.startswith("Alert"))
    console = Console(width=500, color_system=None)
    with console.capture() as capture:
        console.print(view(readings))
    lines = [line.rstrip() for line in capture.get().splitlines()]
    assert lines[1].endswith(first)
    facts = {fact.quantity.label: fact for fact in facts_of(readings)}
    rows = [re.split(r"  +", line) for line in lines if re.split(r"  +", line)[0] in facts]
    assert len(rows) >= 3
    for label, value, _, *after in rows:
        fact = facts[label]
        assert value == fact.phase.last.words()
        assert after[0].startswith(fact.trend or "from")
    twonn = facts["intrinsic dimension"]
    written = f"{twonn.phase.last.words()} ({twonn.word})".replace(" (unknown)", "")
    if twonn.phase.last.step == readings[-1].step:
        assert written in format_line(readings[-1], readings)
    run = Run()
    sink = WandB(run, pictures=False)
    sink.describe(readings.runs[0])
    for each in (*readings, *readings.raised):
        sink.write(each) if isinstance(each, Reading) else sink.alert(each)
    sink.close()
    phase, kept = twonn.phase, run.summary
    assert (kept["geomon/phase"], kept["geomon/final"]) == (phase.name, phase.last.value)
    assert kept["geomon/peak_step"] == (phase.peak.step if phase.has_fallen else None)
    assert kept["geomon/alerts"] == len(readings.raised)
    assert kept["geomon/facts"] == "\n".join(fact.sentence for fact in facts_of(readings))


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
        if seed % 5 == 0:
            pages_agree(readings, sentences)
    assert count > 250
    assert not false, "\n".join(false)
    assert {"expanding", "falling", "unknown"} <= words


def test_what_was_not_measured_is_not_mentioned(make_readings):
    without = ["twonn", "twonn_distinct", "gride", "anisotropy", "qk_cosine", "attention_entropy"]
    cost = "geomon took 4.0 % of the time until step 1,500."
    none = "9 readings without a headline quantity."
    assert summarise(make_readings(without=without)) == [none, cost]
    assert summarise(make_readings(without=[*without, "geomon"])) == [none]
    assert summarise(Readings([], [])) == ["No readings yet."]


def test_the_run_of_the_definitions_in_words(make_readings):
    assert summarise(make_readings())[:2] == [
        "intrinsic dimension, mean over layers: 5.3 ± 0.1 at step 1,500, compressing, "
        "-0.4 ± 0.3 since step 1,024; peak 7.4 ± 0.1 at step 256 (between steps 128 and 256), "
        "-2.1 ± 0.3 since; start 2.5 ± 0.1 at step 0, +2.8 ± 0.3 since.",
        "intrinsic dimension, distinct tokens, mean over layers: 4.9 ± 0.1 at step 1,500, falling, "
        "-0.4 ± 0.3 since step 1,024; start 32.1 ± 0.1 at step 0, -27.2 ± 0.3 since.",
    ]


def test_a_run_read_by_two_sources_is_described_from_one(make_readings):
    probe = make_readings()
    inline = make_readings((1500,), curves={"twonn/mean": [99.0]}, source="inline")
    mixed = Readings(probe.runs, [*probe, *inline])
    assert summarise(mixed) == summarise(probe)


def test_a_run_that_goes_back_is_described_by_the_branch_that_is_trained_now(make_readings):
    first, again = make_readings(), make_readings((300, 600), curves={"twonn/mean": [5.0, 4.0]})
    run = Run()
    sink = WandB(run, pictures=False)
    sink.describe(first.runs[0])
    for reading in (*first, *again):
        sink.write(reading)
    branch = Readings(first.runs, [*(each for each in first if each.step < 300), *again])
    assert run.summary["geomon/facts"].splitlines() == [x.sentence for x in facts_of(branch)]
    assert "at step 600" in run.summary["geomon/facts"]


def test_one_reading_has_no_trend(make_readings):
    first = summarise(make_readings((0,)))[0]
    assert first.startswith("intrinsic dimension, mean over layers: 2.5 ± 0.1 at step 0")
    assert "unknown" not in first
    assert "start" not in first


@pytest.mark.parametrize(
    ("value", "margin", "printed"),
    [(123.4, 23.0, "123 ± 23"), (5.347, 0.123, "5.3 ± 0.1"), (0.01234, 1e-4, "0.0123 ± 0.0001"),
     (-1e-9, 0.1, "0.0 ± 0.1"), (2e6, 5e4, "2000000 ± 50000"), (7.96, 1.4, "8.0 ± 1.4")],
)  # fmt: skip
def test_a_value_is_printed_with_the_digits_that_its_margin_allows(value, margin, printed):
    values = {"twonn/mean": value, "twonn/mean/margin": margin}
    assert f": {printed} at step 0" in summarise(Readings([], [reading_of(values)]))[0]
