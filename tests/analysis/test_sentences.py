"""What geomon says of a run is held to the numbers under it, by a checker that knows only these.

Records of many shapes are made in memory. `Checker` takes a sentence apart, reads what it claims
(a value at a step, a rise, a fall, a share, a peak, no change) and compares that with the values
and margins of the record; a sentence of which it knows no form is an error too.
"""

import math
import random
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median

import pytest
from rich.console import Console
from tagged import TEXTS, reading_of

from geomon.analysis import summarise
from geomon.analysis.alerts import RULES, Alert
from geomon.note import Note
from geomon.record import RaisedAlert, Readings
from geomon.show.collect import dimension_panel
from geomon.show.loggers.board import BoardText
from geomon.show.loggers.history import RunHistory
from geomon.show.loggers.wandb_run import WandBSummary
from geomon.show.report.content import Run, build_content
from geomon.show.terminal.overview import view

KINDS = ("rise", "fall", "both", "flat", "erratic", "diverged", "few", "missing")
SCHEDULES = (
    [0, *(2**n for n in range(13))],
    [0, *sorted({round(2 ** (n / 4)) for n in range(44)})],
    list(range(0, 2001, 50)),
    list(range(8)),
)
DISAGREE = "twonn and twonn_distinct disagree"
FOUND = {"lowest": 1.5, "largest": 130.0, "limit": 2.0}
WHY = (
    "The two estimates differ because of near-duplicates: the first counts every copy of a token "
    "at the same position, the second counts one of them."
)
NUMBER = r"-?\d[\d,]*(?:\.\d+)?"
ALERT = r"Alert at step (\S+?)(?: \(first of (\d+)\))?: (.*?) \(layer 2\): .*"
Points = dict[int, tuple[float, float]]  # value and margin, 0 where unknown, by step


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
    return 5.0


def course(kind, steps, has_margins, rng):
    """Points of one estimate."""
    points = {}
    for step in steps:
        value = level(kind, math.log1p(step) / math.log1p(max(*steps, 1)), rng)
        error = 0.02 * value
        margin = 2.36 * error * math.sqrt(fmean(rng.gauss(0, 1) ** 2 for _ in range(7)))
        if kind == "missing" and rng.random() < 0.2:
            continue
        points[step] = (abs(value + rng.gauss(0, error)), margin if has_margins else 0.0)
    return points


def profile(rng):
    """Anisotropy at five layers, of any shape."""
    return rng.choice(
        [
            [rng.uniform(0.1, 0.9) for _ in range(5)],
            [rng.uniform(0.5, 0.54) for _ in range(5)],
            sorted(rng.uniform(0.1, 0.9) for _ in range(5)),
            sorted((rng.uniform(0.1, 0.9) for _ in range(5)), reverse=True),
            [0.1, rng.uniform(0.2, 0.8), 0.9, rng.uniform(0.2, 0.8), 0.1],
        ]
    )


def record(seed):
    """A record, and the points of both estimates."""
    rng = random.Random(seed)
    kind, steps = KINDS[seed % 8], SCHEDULES[seed // 8 % 4]
    has_margins = seed // 32 % 3 > 0
    steps = steps[: rng.randint(1, 4)] if kind == "few" else steps[: rng.randint(8, len(steps))]
    curves = {"twonn": course(kind, steps, has_margins, rng)}
    curves["twonn_distinct"] = course(rng.choice(KINDS[:6]), steps, has_margins, rng)
    curves["gride k1"] = course(rng.choice(KINDS[:3]), steps, has_margins, rng)
    curves["gride k32"] = course(rng.choice(KINDS[:3]), steps, has_margins, rng)
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
        for layer, value in enumerate(profile(rng)):
            values[f"anisotropy/layer_{layer:02d}"] = value
            for head in range(4 * bool(layer)):
                place = f"layer_{layer:02d}/head_{head}"
                values[f"qk_cosine/{place}"] = rng.uniform(-1, 1)
                values[f"qk_dot/{place}"] = rng.uniform(-9, 9)
        values["qk_cosine/null_magnitude"] = 0.0798  # isotropic directions of width 100
        raised = ["rank_collapse"] * (step in steps[-2:]) + ["logit_growth"] * (step == steps[-1])
        for name in raised * (kind == "diverged"):
            alert = Alert(name, step, layers=(2,), numbers=FOUND, advice="look there")
            alerts.append(RaisedAlert(step, 0.0, "check", alert.note()))
        notes = [Note(DISAGREE, "they do")] * (rng.random() < 0.5)
        readings.append(reading_of(values, step, "probe", notes))
    runs = [{"model": "Synthetic", "metrics": TEXTS}]
    return Readings(runs, readings, raised=alerts), curves


def value_of(text):
    return float(text.replace(",", ""))


class Checker:
    """Takes sentences about a record apart and holds each claim to the record's numbers.

    Args:
        readings: The record.
        curves: Points of what it holds, by name.
    """

    def __init__(self, readings, curves):
        self.readings = list(readings)
        self.last = self.readings[-1]
        self.raised = [(alert.step, alert.note.kind) for alert in readings.alerts]
        self.curves = curves
        self.said = {}  # words of the phase of each estimate
        self.made = []  # kinds of the sentences
        self.false = []

    def hold(self, is_true, sentence, why):
        if not is_true:
            self.false.append(f"{why}: {sentence}")

    def prints(self, value, text):
        """Whether a value is printed so, with any number of decimals."""
        decimals = len(text.partition(".")[2])
        return abs(value - value_of(text)) <= 0.5000001 * 10**-decimals

    # -- phases ------------------------------------------------------------------------------------

    def phase(self, points: Points, words):
        """Check the words of a phase, of which the first is its name."""
        steps = sorted(points)
        values = [points[step][0] for step in steps]
        known = [points[step][1] for step in steps if points[step][1]]
        typical = median(known) if known else 0.0
        last, say = values[-1], self.hold

        def margin(step):
            return max(points[step][1], typical)

        def beyond(one, other):
            gap = points[other][0] - points[one][0]
            return gap if abs(gap) > math.hypot(margin(one), margin(other)) else 0.0

        if found := re.fullmatch(rf"expanding since step ({NUMBER}), from (\S+) to (\S+)", words):
            since = int(value_of(found[1]))
            say(self.prints(points[since][0], found[2]), words, "start")
            say(self.prints(last, found[3]), words, "end")
            say(beyond(since, steps[-1]) > 0, words, "no rise beyond the margins")
            recent = [step for step in steps if 4 * step >= steps[-1] and step >= since][:-1]
            fell = [beyond(steps[-1], step) > 0 for step in recent]
            say(not fell or not all(fell), words, "it fell of late")
            return
        pattern = (
            rf"(compressing|falling|level) since step ({NUMBER}), (?:after a rise to (\S+)|"
            rf"(\d+) % below (its peak )?(\S+?)(?: at step ({NUMBER}))?)"
            rf"(?: \(between steps ({NUMBER}) and ({NUMBER})\))?"
        )
        if found := re.fullmatch(pattern, words):
            name, since = found[1], int(value_of(found[2]))
            say(since in points, words, "no such step")
            if found[3]:
                say(self.prints(last, found[3]), words, "the last is not the highest")
                say(last >= max(values[steps.index(since) :]), words, "not the highest")
            else:
                at = int(value_of(found[7])) if found[7] else since
                peak = points[at][0]
                say(self.prints(peak, found[6]), words, "peak")
                say(round(100 * (1 - last / peak)) == int(found[4]), words, "percent")
                if found[5] or name != "level":
                    say(beyond(at, steps[-1]) < 0 or name == "level", words, "no fall")
                    earlier = [step for step in steps if step < at and beyond(step, at) > 0]
                    say(bool(earlier) == (name != "falling") or len(steps) > 20, words, "rise")
                if found[8]:
                    first, latest = (int(value_of(found[n])) for n in (8, 9))
                    say(first <= at <= latest, words, "peak outside its steps")
            if name == "level":
                say(4 * since <= steps[-1], words, "level for less than two octaves")
                tail = values[steps.index(since) :]
                half = len(tail) // 2
                gap = abs(fmean(tail[:half]) - fmean(tail[half:]))
                scale = median(margin(step) for step in steps if step >= since)
                scale = scale or 0.2 * median(tail)
                say(gap < 2 * scale, words, "it moves")
            return
        if words == "steady: no change beyond its errors":
            if known:
                centre = median(values)
                worst = max(abs(points[step][0] - centre) / margin(step) for step in steps)
                say(worst < 3.2, words, f"{worst:.1f} margins off")
            third = max(len(values) // 3, 1)
            gap = abs(fmean(values[:third]) - fmean(values[-third:]))
            say(gap < max(2 * typical, 0.5 * median(values)), words, "ends differ")
            return
        if words == "erratic: it jumps from reading to reading, without a trend":
            jumps = [abs(a - b) for a, b in pairwise(values)]
            limit = 1.5 * typical or 0.1 * median(values)
            say(sum(jump > limit for jump in jumps) > len(jumps) / 4, words, "no jumps")
            return
        say(words == "too few readings to tell", words, "unknown form")
        say(len(values) < 2 or (not known and len(values) < 20), words, "enough readings")

    def is_noted(self):
        """Whether the last reading notes near-duplicates."""
        return any(note.kind == DISAGREE for note in self.last.notes)

    def why(self, text):
        self.hold(self.is_noted(), text, "why the two differ")

    def estimates(self, text):
        """Check a line that gives the two estimates of the dimension, and their phases."""
        names = {"intrinsic dimension": "twonn", "distinct tokens": "twonn_distinct",
                 "intrinsic dimension, distinct tokens": "twonn_distinct"}  # fmt: skip
        for part in text.split("; "):
            found = re.fullmatch(
                r"(.*?) (\d\S*?)(?: ± (\S+?))?(?:, (.*?))?(?: \(known to step (\S+)\))?", part
            )
            self.hold(found is not None and found[1] in names, part, "unknown form")
            if found is None or found[1] not in names:
                continue
            points = self.curves[names[found[1]]]
            end = max(points)
            self.hold(self.prints(points[end][0], found[2]), part, "value")
            self.hold(bool(found[3]) == bool(points[end][1]), part, "a margin")
            if found[3]:
                self.hold(self.prints(points[end][1], found[3]), part, "margin")
            self.hold((end < self.last.step) == bool(found[5]), part, "end")
            self.said[names[found[1]]] = found[4]
            self.phase(points, found[4])

    # -- sentences ---------------------------------------------------------------------------------

    def sentence(self, text):
        """Check a sentence of the summary."""
        for pattern, check in (
            (ALERT, self.alert),
            (rf"At step ({NUMBER}): (.*)\.", self.start),
            (re.escape(WHY), self.why),
            (rf"intrinsic dimension rose from (\S+) to (\S+) between steps ({NUMBER}) and "
             rf"({NUMBER}), distinct tokens (rose|fell) from (\S+) to (\S+): the rise is "
             r"(not only )?near-duplicates.*\.", self.rise),
            (rf"intrinsic dimension by scale differs by scale since step ({NUMBER}): at scale 1 it "
             r"(rose|fell) \((\S+) %, to (\S+)\), at scale 32 it (rose|fell) \((\S+) %, to "
             r"(\S+)\)\.", self.scales),
            (r"attention entropy: (.*?)(?: \((\d+) % of its start\))?\.", self.entropy),
            (r"cosine of mean query and mean key, mean size over heads: (.*?)\. At the end it is "
             r"above 0\.5 in (\d+) of (\d+) heads, and below -0\.5 in (\d+)\.", self.cosine),
            (r"Mean query and mean key are similar beyond chance in (\d+) of (\d+) heads(.*?), and "
             r"opposite in (\d+)(.*?)\. By chance \(random directions in (\d+) dimensions\) any of "
             r"the \2 heads would be beyond the limit in 5 % of the readings\.", self.chance),
            (r"The cosine of mean query and mean key (falls|rises) with depth \(Kendall's tau "
             r"(\S+), p (.*)\)\.", self.depth),
            (r"Mean query · mean key, mean size over heads: (\S+) at the start, (\S+) at the end\.",
             self.dots),
            (r"anisotropy over depth at step (\S+): flat, (\S+) to (\S+); no layer stands out\.",
             self.flat),
            (r"anisotropy over depth at step (\S+): highest, (\S+), at layer (\d+), (.*) \((\S+) "
             r"at layer 0, (\S+) at layer 4\); (.*)\.", self.profile),
            (r"geomon took (\S+) % of the time until step (\S+)\.", self.cost),
        ):  # fmt: skip
            if found := re.fullmatch(pattern, text):
                self.made.append(check.__name__)
                return check(text, *found.groups())
        return self.estimates(text.removesuffix("."))

    def complete(self, sentences):
        """Check that no sentence is missing that every record has, or that its numbers ask for."""
        count = Counter(self.made)
        kinds = ("entropy", "cosine", "chance", "dots", "cost", ("profile", "flat"))
        for kind in kinds:
            made = sum(count[each] for each in ([kind] if isinstance(kind, str) else kind))
            self.hold(made == 1, sentences, f"{kind}: {made} sentences")
        self.hold(count["alert"] == len(self.alerts()), sentences, "alerts")
        self.hold(count["why"] == self.is_noted(), sentences, "why the two differ")
        self.hold(count["depth"] == (self.kendall().pvalue < 0.05), sentences, "depth")

    def alerts(self):
        """Steps of the alerts by kind in words, the gravest first."""
        found = {name: [at for at, kind in self.raised if kind == name] for name in RULES}
        return {name.replace("_", " "): steps for name, steps in found.items() if steps}

    def alert(self, text, step, total, kind):
        steps = self.alerts().get(kind, [])
        self.hold(int(value_of(step)) == min(steps, default=-1), text, "the first alert")
        self.hold(int(total or 1) == len(steps), text, "number of alerts")

    def start(self, text, step, starts):
        found = re.findall(
            r"(intrinsic dimension|distinct tokens) (\S+?)(?: ± (\S+?))?(?:,|$)", starts
        )
        self.hold(len(found) == starts.count(",") + 1, text, "unknown form")
        for name, value, margin in found:
            points = self.curves["twonn" if name == "intrinsic dimension" else "twonn_distinct"]
            first = min(points)
            self.hold(int(value_of(step)) == first, text, "not the first")
            self.hold(self.prints(points[first][0], value), text, "first value")
            self.hold(not margin or self.prints(points[first][1], margin), text, "first margin")

    def moved(self, text, name, one, other):
        """Return the change of a curve between two steps, which must be beyond its margins."""
        (first, a), (last, b) = (self.curves[name][step] for step in (one, other))
        self.hold(abs(last - first) > math.hypot(a, b), text, "within the margins")
        return last - first

    def rise(self, text, low, high, one, other, verb, first, last, only):
        ends = [int(value_of(step)) for step in (one, other)]
        for name, texts in (("twonn", (low, high)), ("twonn_distinct", (first, last))):
            for step, printed in zip(ends, texts, strict=True):
                self.hold(self.prints(self.curves[name][step][0], printed), text, name)
        self.hold(self.moved(text, "twonn", *ends) > 0, text, "no rise")
        change = self.moved(text, "twonn_distinct", *ends)
        self.hold((change > 0) == (verb == "rose") == bool(only), text, "direction")

    def scales(self, text, since, *claims):
        since = int(value_of(since))
        self.hold(4 * since <= self.last.step, text, "since")
        for name, (verb, share, end) in (("k1", claims[:3]), ("k32", claims[3:])):
            change = self.moved(text, f"gride {name}", since, self.last.step)
            points = self.curves[f"gride {name}"]
            self.hold((change > 0) == (verb == "rose"), text, "direction")
            percent = 100 * change / points[since][0]
            self.hold(abs(percent - float(share)) <= 0.5000001, text, "percent")
            self.hold(self.prints(points[self.last.step][0], end), text, "end")

    def ends(self, text, points, words):
        """Check a first and a last value with their steps, and return them."""
        named = re.findall(rf"(\S+?)(?: nats)? at step ({NUMBER})", words)
        ends = dict.fromkeys((min(points), max(points)))
        self.hold([int(value_of(step)) for _, step in named] == list(ends), text, "steps")
        for value, step in named:
            self.hold(self.prints(points[int(value_of(step))], value), text, "value")
        return [points[step] for step in ends]

    def entropy(self, text, words, share):
        points = {step: value for step, (value, _) in self.curves["attention_entropy"].items()}
        first, *last = self.ends(text, points, words)
        self.hold(bool(share) == bool(last), text, "share")
        if share:
            self.hold(abs(100 * last[0] / first - int(share)) <= 0.5000001, text, "share")

    def heads(self, reading):
        """Cosines of heads by layer and head."""
        return reading.column("qk_cosine").by_head()

    def cosine(self, text, words, above, total, below):
        sizes = {r.step: fmean(map(abs, self.heads(r).values())) for r in self.readings}
        self.ends(text, sizes, words)
        cosines = self.heads(self.last).values()
        counts = sum(c > 0.5 for c in cosines), len(cosines), sum(c < -0.5 for c in cosines)
        self.hold(counts == (int(above), int(total), int(below)), text, "counts")

    def chance(self, text, similar, total, since, opposite, other_since, width):
        from scipy import stats

        cosines = self.heads(self.last)
        p_values = {h: stats.beta.sf(c * c, 0.5, (int(width) - 1) / 2) for h, c in cosines.items()}
        rejected = set()
        for rank, head in enumerate(sorted(p_values, key=p_values.__getitem__)):
            level = 0.05 / (len(p_values) - rank)
            if p_values[head] > level:
                break
            rejected.add(head)
        self.hold(int(total) == len(cosines), text, "heads")
        limit = math.sqrt(stats.beta.isf(level, 0.5, (int(width) - 1) / 2))
        for sign, count, words in ((1, similar, since), (-1, opposite, other_since)):
            members = [head for head in rejected if sign * cosines[head] > 0]
            self.hold(int(count) == len(members), text, "beyond chance")
            onsets = set()
            for head in members:
                kept = list(self.readings)
                while len(kept) > 1 and sign * self.heads(kept[-2])[head] > limit:
                    kept.pop()
                onsets.add(kept[-1].step)
            named = [int(value_of(step)) for step in re.findall(NUMBER, words)]
            self.hold(named == sorted({min(onsets), max(onsets)} if onsets else ()), text, "since")

    def kendall(self):
        from scipy import stats

        cosines = self.heads(self.last)
        return stats.kendalltau([layer for layer, _ in cosines], list(cosines.values()))

    def depth(self, text, verb, tau, p):
        found = self.kendall()
        self.hold(self.prints(found.statistic, tau) and found.pvalue < 0.05, text, "tau")
        self.hold((found.statistic > 0) == (verb == "rises"), text, "direction")
        small, printed = found.pvalue < 0.001, p.removeprefix("below ")
        self.hold(printed.startswith("."), text, "p")
        self.hold(small == (printed != p) and (small or self.prints(found.pvalue, p)), text, "p")

    def dots(self, text, first, last):
        known = [reading for reading in self.readings if self.heads(reading)]
        for reading, printed in ((known[0], first), (known[-1], last)):
            size = fmean(map(abs, reading.column("qk_dot").by_head().values()))
            self.hold(math.isclose(size, float(printed), rel_tol=5.01e-3), text, "size")

    def layers(self, step, text):
        self.hold(int(value_of(step)) == self.last.step, text, "step")
        return [self.last.values[f"anisotropy/layer_{n:02d}"] for n in range(5)]

    def flat(self, text, step, low, high):
        values = self.layers(step, text)
        for value, printed in ((min(values), low), (max(values), high)):
            self.hold(self.prints(value, printed), text, "value")
        self.hold(max(values) - min(values) < 0.1 * max(values), text, "a layer stands out")

    def profile(self, text, step, highest, layer, where, first, last, shape):
        values = self.layers(step, text)
        top, slack = values.index(max(values)), 0.05 * (max(values) - min(values))
        self.hold(int(layer) == top and 20 * slack >= 0.1 * max(values), text, "highest")
        for value, printed in ((values[top], highest), (values[0], first), (values[4], last)):
            self.hold(self.prints(value, printed), text, "value")
        places = "the first", "in the first third", "in the middle", "in the last third", "the last"
        self.hold(where == places[top], text, "place")
        # Against the trend a twentieth of the range is nothing.
        rises, falls = (
            all(a - b <= slack for n, b in enumerate(part) for a in part[:n])
            for part in (values[: top + 1], values[top:][::-1])
        )
        above = values[top] - max(values[0], values[4]) > slack
        words = {
            (True, True): "bell-shaped",
            (True, False): "higher inside than at both ends, but not one bell",
            (False, False): "not bell-shaped",
            (False, True): "not bell-shaped: it falls with depth" if top == 0 else
                           "not bell-shaped: it rises with depth" + " and levels off" * (top < 4),
        }  # fmt: skip
        self.hold(shape == words[above, rises and falls], text, "shape")

    def cost(self, text, share, step):
        self.hold(step == f"{self.last.step:,}", text, "step")
        self.hold(self.prints(100 * self.last.overhead, share), text, "share")

    # -- pages -------------------------------------------------------------------------------------

    def headline(self, text):
        """Check the first line of a report: the alerts, then the dimension."""
        named = [f"{kind} at step {steps[0]:,}" for kind, steps in self.alerts().items()]
        alerts = f"Alert{'s' * (len(named) > 1)}: {', '.join(named)}. " if named else ""
        self.hold(text.startswith(alerts) and ("Alert" in text) == bool(named), text, "alerts")
        course, why, _ = text.removeprefix(alerts).partition(f" {WHY}")
        self.estimates(course.removesuffix("."))
        self.hold(bool(why) == self.is_noted(), text, "why the two differ")

    def watch(self, lines):
        """Check the lines of the overview that is printed, on which none is too long to be one."""
        self.headline(lines[1])
        values = self.last.values
        series = {
            "training loss": [r.training["loss"] for r in self.readings],
            "attention entropy": [r.values["attention_entropy/mean"] for r in self.readings],
            "|cosine of mean query and mean key|": [
                fmean(map(abs, self.heads(r).values())) for r in self.readings
            ],
        }
        names = {"intrinsic dimension": "twonn", "distinct tokens": "twonn_distinct"}
        series |= {
            name: [value for value, _ in self.curves[metric].values()]
            for name, metric in names.items()
        }
        for line in lines[2:]:
            if found := re.fullmatch(ALERT, line):
                self.alert(line, *found.groups())
                continue
            if line.startswith("note: "):
                continue  # in the words of the reading
            name, value, _, *after = re.split(r"  +", line)
            if name == "anisotropy by layer":
                profile = [values[f"anisotropy/layer_{n:02d}"] for n in range(5)]
                printed = re.findall(NUMBER, f"{value} {after[0]}")
                expected = profile[0], profile[4], max(profile)
                for pair in zip(expected, printed, strict=False):
                    self.hold(self.prints(*pair), line, "profile")
                self.hold(profile.index(max(profile)) == int(printed[3]), line, "layer")
                continue
            curve = series[name.removesuffix(" (nats)")]
            last, _, margin = value.partition(" ± ")
            self.hold(self.prints(curve[-1], last), line, "last")
            if name in names and margin:
                own = [*self.curves[names[name]].values()][-1][1]
                self.hold(self.prints(own, margin), line, "margin")
            first = re.match(r"from (\S+?)(?:,|$)", after[0]) if after else None
            self.hold(bool(first) == (len(curve) > 1), line, "a first value")
            self.hold(not first or self.prints(curve[0], first[1]), line, "first")

    def wandb(self, summary):
        """Check the key numbers of W&B."""
        values = [value for value, _ in self.curves["twonn"].values()]
        self.hold(summary["geomon/final"] == values[-1], summary, "final")
        self.hold(
            summary["geomon/alerts"] == sum(map(len, self.alerts().values())), summary, "alerts"
        )
        name = summary["geomon/phase"].replace("unknown", "too few readings")
        self.hold(self.said["twonn"].startswith(name), summary, "another phase than in words")
        self.peak(summary["geomon/peak_step"], summary["geomon/peak"], summary["geomon/phase"])

    def peak(self, step, value, phase):
        """Check the peak that a page names, None for none."""
        points = self.curves["twonn"]
        if step is not None:
            self.hold(points[step][0] == value, (step, value), "peak")
            end = points[max(points)][0]
            self.hold(value > end or phase == "expanding", (step, value), "no fall")
        self.hold(step is not None or phase != "compressing", phase, "no peak")

    def legends(self, lines):
        """Check the peak that the legend of a chart names."""
        for line in lines:
            if found := re.fullmatch(rf"(.*): peak (\S+) at step ({NUMBER})", line.name):
                value = self.curves["twonn"][int(value_of(found[3]))][0]
                self.hold(self.prints(value, found[2]), line.name, "peak")


class Texts:
    """Stands for a writer of TensorBoard and for a run of W&B: keeps what is said."""

    def __init__(self):
        self.said, self.summary, self.run = {}, {}, None

    def add_text(self, name, text, step):
        self.said[name] = re.sub(r"\\(.)", r"\1", text)

    def flush(self):
        pass


def check_board(readings, curves):
    """The false sentences of TensorBoard, which are of the readings that are kept for it."""
    board, history, texts = BoardText(lambda: [texts], name="TensorBoard"), RunHistory(), Texts()
    board.describe(readings.runs[0])
    alerts = [*readings.raised]
    for reading in readings:
        board.write(reading)
        history.add(reading)
        while alerts and alerts[0].step <= reading.step:
            board.alert(alerts[0])
            history.raised.append(alerts.pop(0))
    board.close()
    kept = history.readings()
    steps = {reading.step for reading in kept}
    checker = Checker(kept, {name: {step: point for step, point in points.items() if step in steps}
                             for name, points in curves.items()})  # fmt: skip
    for text in texts.said["~geomon/1 the run in words"].partition("\n\n")[0].splitlines():
        checker.sentence(text.removeprefix("- "))
    return checker.false


def check_all(seed):
    """All that the pages say of one record, checked; the sentences, and those that are false."""
    readings, curves = record(seed)
    checker = Checker(readings, curves)
    if not all(curves.values()):
        return [], []
    sentences = summarise(readings)
    for text in sentences:
        checker.sentence(text)
    checker.complete(sentences)
    content = build_content([Run("a", Path("a"), readings)])["runs"][0]
    alerts = [text for text in sentences if text.startswith("Alert")]
    checker.hold(content["alerts"] == alerts, content, "alerts of the report")
    checker.estimates(content["headline"].removesuffix("."))
    said = [content["headline"], *content["alerts"], *content["sentences"]]
    checker.hold(sorted(said) == sorted(sentences), "report", "other sentences")
    console = Console(width=500, color_system=None)
    with console.capture() as capture:
        console.print(view(readings))
    lines = [line.rstrip() for line in capture.get().splitlines()]
    checker.watch(lines)
    checker.legends(dimension_panel(readings).lines)
    texts = Texts()
    summary = WandBSummary(texts)
    for alert in readings.raised:
        summary.alert(alert)
    for reading in readings:
        texts.run = texts if reading is readings[-1] else None  # at each reading it takes long
        summary.write(reading)
    checker.wandb(texts.summary)
    # TensorBoard has the same sentences: so that each kind of record is among them.
    of_board = check_board(readings, curves) if seed % 5 == 0 else []
    return [*sentences, content["headline"], *lines], checker.false + of_board


@pytest.mark.parametrize("part", range(8))
def test_every_sentence_of_four_hundred_records_holds_for_its_numbers(part):
    false, count = [], 0
    for seed in range(50 * part, 50 * part + 50):
        said, wrong = check_all(seed)
        count += len(said)
        false += [f"record {seed} ({KINDS[seed % 8]}): {each}" for each in wrong]
    assert count > 500
    assert not false, "\n".join(false)
