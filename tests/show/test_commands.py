"""Commands on a record: their words on its contents, on files and on bad input."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import matplotlib
import pytest

import geomon
import geomon.show
from geomon import Readings, __version__, read
from geomon.record import FILE_NAME
from geomon.show.tables import fit
from support.pages import alerted, invoke, write
from support.readings import TEXTS, reading_of, with_values

NAN = math.nan
ALL = ("twonn", "twonn_distinct", "gride", "anisotropy", "qk_cosine", "attention_entropy")


@pytest.fixture(autouse=True)
def _pictures_have_few_pixels():
    """No test of this file looks at them, but `test_approved.py` does."""
    with matplotlib.rc_context({"savefig.dpi": 20}):
        yield


@pytest.fixture
def run(make_readings, tmp_path):
    """The folder of a run."""
    return write(tmp_path / "run", make_readings())


# -- any record ------------------------------------------------------------------------------------

# Arguments of each command on the record of a folder.
COMMANDS = {
    "watch": lambda run, out: ["watch", "--once", run],
    "figure": lambda run, out: ["figure", run, "--out", out / "run.png"],
    "report": lambda run, out: ["report", run, "-o", out / "report.html"],
    "compare": lambda run, out: ["compare", run, run],
    "export": lambda run, out: ["export", run, "-o", out / "values.csv"],
    "summary": lambda run, out: ["summary", run],
}
# A reading as this version does not know it.
UNKNOWN = '{"step": 2000, "form": 2, "columns": "AAAA"}'


def make(case, path, readings):
    """Write the record of a case; at least three readings."""
    lines = [reading.line() + "\n" for reading in readings]
    own = [with_values(r, {"mine/layer_01": 1.0}).line() + "\n" for r in readings]
    first, newer, older = (
        json.dumps({"run": {"geomon": version, "model": "Synthetic"}}) + "\n"
        for version in (__version__, "9999.1", "0.0.1")
    )
    texts = {
        "an empty file": "",
        "no reading": first,
        "no record": "hello\n",
        "a list": "[1, 2]\n",
        "a line in the middle": first + lines[0] + lines[1][:80] + "\n" + lines[2],
        "a torn line": first + "".join(lines[:-1]) + lines[-1][:100],
        "two runs at once": first + "".join(lines[:3] + lines[1:]),
        "a newer version": newer + "".join(lines),
        "a newer version, all unknown": newer + UNKNOWN + "\n",
        "this version, an older form": first + UNKNOWN + "\n",
        "an older version": older + UNKNOWN + "\n",
        "other metrics": first + "".join(own),
    }
    if case != "no folder":
        path.mkdir()
    if case in texts:
        (path / FILE_NAME).write_text(texts[case])


# Words of the one line with which every command ends, and its exit code 2.
REFUSED = {
    "no folder": "no record at",
    "no file": "no record at",
    "no record": "line 1 of .* is not a line of a record .*: expected a line from geomon",
    "a list": "line 1 of .* is not a line of a record",
    "a line in the middle": "line 3 of .* is not a line of a record",
    "an empty file": "no readings yet in .*: try again",
    "no reading": "no readings yet in .*: try again",
    "a newer version, all unknown": "line 2 of .*the newer geomon 9999.1 wrote it, so upgrade",
    "this version, an older form": f"line 2 of .*: geomon {__version__} wrote it, perhaps before",
    "an older version": "line 2 of .*: geomon 0.0.1 wrote it, perhaps before lines changed",
}
# Words of a line beside the page, which is made.
REMARKED = {
    "two runs at once": "From line 5 on, two runs wrote into this record at once",
    "a newer version": "written by a newer geomon .9999.1.: .* may miss values; upgrade it",
    "a torn line": "",
    "other metrics": "",
}


# How a command answers in place of what the tables say: that it can wait; what it cannot compare.
OTHERWISE = {
    **{("watch", case): (0, "no readings yet", "")
       for case, words in REFUSED.items() if words.startswith("no readings")},
    ("compare", "other metrics"): (2, "", "geomon: the runs have no values at steps near one anot"),
}  # fmt: skip


@pytest.mark.parametrize("case", [*REFUSED, *REMARKED])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_record_is_shown_with_one_line_on_the_rest_or_refused_in_one(
    command, case, make_readings, tmp_path
):
    make(case, tmp_path / "run", make_readings((0, 16, 32, 64), layers=1, heads=1))
    result = invoke(*COMMANDS[command](tmp_path / "run", tmp_path))
    assert isinstance(result.exception, SystemExit | None)
    shown, said = " ".join(result.stdout.split()), result.stderr
    if (command, case) in OTHERWISE:
        code, on_page, beside = OTHERWISE[command, case]
        assert result.exit_code == code
        assert shown.startswith(on_page)
        assert said.startswith(beside)
    elif case in REFUSED:
        assert (result.exit_code, shown) == (2, "")
        assert re.fullmatch(f"geomon: {REFUSED[case]}.*\n", said)
    else:
        remark, of_each = REMARKED[case], 2 if command == "compare" else 1
        assert (result.exit_code, bool(shown)) == (0, True)
        if command in ("watch", "summary"):  # they say it where they say everything
            assert (bool(re.search(remark, shown)), said) == (True, "")
        else:
            assert re.fullmatch(f"(.*{remark}.*\n){{{of_each}}}" if remark else "", said)


@pytest.mark.parametrize("case", [*REFUSED, *REMARKED])
def test_a_notebook_shows_what_can_be_read(case, make_readings, tmp_path):
    make(case, tmp_path / "run", make_readings((0, 16, 32, 64), layers=1, heads=1))
    words = {**REFUSED, **REMARKED}[case]
    if case in REFUSED and not words.startswith("no readings"):
        with pytest.raises((FileNotFoundError, ValueError), match=words):
            read(tmp_path / "run")
        return
    page = read(tmp_path / "run")._repr_html_()
    assert re.search(words.removeprefix("no readings yet in .*: ").removesuffix("try again"), page)
    assert ("<img" in page) == (case in REMARKED)


# -- what a record holds, and what pages say of it -------------------------------------------------

# Two values of a metric; margin; words of `geomon compare`.
COMPARED = [
    ((3.2051, 3.2047), 1e-4, "3.2051 -> 3.2047, lower by 0.0004 ± 0.00014 (less than 0.1 %)"),
    ((-0.4, -0.7), 0.02, "-0.4 -> -0.7, lower by 0.3 ± 0.028\n"),
    ((4.0123, 45.0), 0.2, "4.01 -> 45, higher by 41 ± 0.28 (11.2 times as high)"),
    ((8.0, 12e3), 1e3, "± 1,414\n"),
    ((1.0, 1.007), 0.0, "error unknown:\n  own/mean: 1 -> 1.007, higher by 0.007 (+0.7 %)"),
    ((2.0, 0.0), 0.1, "lower by 2 ± 0.14 (-100 %)"),
    *(((one, other), 0.1, f"{one:g} -> {other:g}, {word} by {abs(one - other):g} ± 0.14\n")
      for one, other, word in ((0.0, 1.0, "higher"), (-1.0, 1.0, "higher"), (1.0, -1.0, "lower"))),
    ((5.0, 5.2), 0.15, "within the errors:\n"),
    ((5.2, 5.0), 0.15, "within the errors:\n"),
    ((5.0, 5.2), 0.14, "beyond the errors (95 %; of 1 compared 0 would be so by chance):\n"),
    *(((5.0, 5.0 + change), margin, "\n1 equal to 6 digits\n")  # also if sums were of another order
      for change in (0.0, 1e-15, -4e-6) for margin in (0.1, 0.0)),
    *(((5.0, 5.0 + change), 0.0, "error unknown:\n") for change in (1e-5, -1e-5)),
]  # fmt: skip


@pytest.mark.parametrize(("values", "margin", "said"), COMPARED)
def test_differences_beyond_their_margin_have_the_digits_that_tell_values_apart(
    values, margin, said, tmp_path
):
    # A deviation over splits of the same sequences decides nothing.
    of_all = {"own/mean/std": 0.001} | ({"own/mean/margin": margin} if margin else {})
    folders = [
        write(tmp_path / name, [reading_of({"own/mean": x, "own/layer_01": 9 + x, **of_all}, 200)])
        for name, x in zip("ab", values, strict=True)
    ]
    printed = invoke("compare", *folders).stdout
    assert said in printed
    assert not re.search("layer|geomon/|std", printed.partition("\n")[2])


NEAR = "(the last at most 10 % apart)"


@pytest.mark.parametrize(
    ("first", "second", "at"),
    [
        ((0, 16, 32, 64), (0, 16, 32, 64, 128), "step 64 (the last that both have read)"),
        ((0, 100, 200, 400), (0, 60, 190, 330, 700), f"steps 190 and 200 {NEAR}"),
        ((0, 100, 200, 400), (0, 380, 400), "step 400 (the last that both have read)"),
        ((0, 100), (0, 90), f"steps 90 and 100 {NEAR}"),  # a tenth of the larger one, to the step
        ((0, 96, 100), (0, 97, 140), f"steps 97 and 96 {NEAR}"),  # not 100, later and further off
        ((0, 16), (128, 256), None),
        ((0, 100, 200, 400), (0, 140, 300), None),  # step 0 alone says nothing of the training
    ],
)
def test_runs_are_compared_at_their_last_steps_near_one_another(first, second, at, tmp_path):
    folders = [
        write(tmp_path / name, [reading_of({"own/mean": 1.0}, step) for step in steps])
        for name, steps in (("a", first), ("b", second))
    ]
    done = invoke("compare", *folders)
    assert (at is None) == ("no values at steps near one another" in done.stderr)
    assert at is None or done.stdout.startswith(f"{folders[1]} against {folders[0]}, at {at}\n")


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ("400:0", "at steps 0 and 400 (as asked)\n"),
        ("last:first", "at steps 0 and 400 (as asked)\n"),
        ("0:0", "at step 0 (as asked)\n"),
        ("first:30", "at steps 30 and 0 (as asked)\n"),
        ("300:0", "geomon: the first run has no reading at step 300; the nearest is at step 200\n"),
        ("0:8", "geomon: the second run has no reading at step 8; the nearest is at step 0\n"),
        *((words, f"a step of each run, such as 1500:0 or last:first, not '{words}'\n")
          for words in ("400", "400:0:0", "400:", "end:0", "")),
    ],
)  # fmt: skip
def test_any_step_of_one_run_is_compared_with_any_step_of_the_other(steps, said, tmp_path):
    folders = [
        write(tmp_path / name, [reading_of({"own/mean": 1.0 + step}, step) for step in read_at])
        for name, read_at in (("a", (0, 100, 200, 400)), ("b", (0, 30)))
    ]
    done = invoke("compare", *folders, "--steps", steps)
    assert said in done.stdout + done.stderr
    assert done.exit_code == 2 * ("asked" not in said)


# Values of two runs by layer, each with its heads; half of the margin of a mean over layers, and of
# a layer; lines that name a layer or head.
BY_LAYER = [
    # The means agree, and the layers do not.
    ([[1.0], [5.0]], [[5.0], [1.0]], 0.1, ["layer 1: 1 -> 5, higher", "layer 2: 5 -> 1, lower"]),
    ([[1.0], [5.0], [3.0]], [[5.0], [1.0], [3.0]], 0.1, ["layer 1: ", "layer 2: "]),
    # The layer agrees, and its heads do not.
    ([[0.99, 0.9, 0.05, 0.97]], [[0.92, 0.69, 0.67, 0.64]], 0.02,
     ["layer 1, head 1: ", "layer 1, head 2: 0.05 -> 0.67, higher", "layer 1, head 3: "]),
    ([[1.0, 3.0], [2.0, 4.0]], [[3.0, 1.0], [2.0, 4.0]], 0.1, ["layer 1, head 0", "layer 1, head"]),
    # Heads of a layer that differs are not listed, and layers of a mean that differs neither.
    ([[1.0, 1.0], [5.0, 5.0]], [[6.0, 4.0], [1.0, 1.0]], 0.1, ["layer 1: 1 ->", "layer 2: 5 ->"]),
    ([[1.0], [1.0]], [[5.0], [1.0]], 0.1, []),
    # Nothing is beyond the errors, or none is known.
    ([[1.0], [5.0]], [[5.0], [1.0]], 2.5, []),
    ([[1.0], [5.0]], [[5.0], [1.0]], 0.0, []),
    ([[1.0], [5.0]], [[1.0 + 1e-6], [5.0 - 1e-6]], 1e-9, []),
]  # fmt: skip


@pytest.mark.parametrize(("one", "other", "margin", "named"), BY_LAYER)
def test_layers_and_heads_are_named_if_they_differ_and_their_mean_does_not(
    one, other, margin, named, tmp_path
):
    folders = []
    for name, layers in (("a", one), ("b", other)):
        means = [sum(heads) / len(heads) for heads in layers]
        values = {"own/mean": sum(means) / len(means), "own/mean/margin": margin}
        for layer, (mean, heads) in enumerate(zip(means, layers, strict=True), start=1):
            place = f"own/layer_{layer:02d}"
            values |= {place: mean, f"{place}/margin": margin}
            values |= {f"{place}/head_{n}": x for n, x in enumerate(heads) if len(heads) > 1}
        folders.append(write(tmp_path / name, [reading_of(values, 8)]))
    printed = invoke("compare", *folders).stdout
    found = re.findall(r"^  own, (layer .*)$", printed, re.M)
    assert len(found) == len(named)
    assert all(any(line.startswith(words) for line in found) for words in named)
    assert ("though their mean is not:" in printed) == bool(named)


@pytest.mark.parametrize("margins", ["equal", "growing"])
def test_the_farthest_beyond_their_margins_of_many_layers_are_listed(margins, tmp_path):
    folders = []
    for name, sign in (("a", 1), ("b", -1)):
        values = {"own/mean": 0.0, "own/mean/margin": 0.1}
        for layer in range(40):
            place, margin = f"own/layer_{layer:02d}", 0.1
            if margins == "growing":  # faster than the differences
                margin *= (1.0 + layer / 40) ** 2 * (1.0 + layer)
            values |= {place: sign * (-1) ** layer * (1.0 + layer), f"{place}/margin": margin}
        folders.append(write(tmp_path / name, [reading_of(values, 8)]))
    printed = invoke("compare", *folders).stdout
    assert "their mean is not (the 24 farthest of 40):" in printed
    found = [int(layer) for layer in re.findall(r"^  own, layer (\d+):", printed, re.M)]
    assert found == [*(range(39, 15, -1) if margins == "equal" else range(24))]


# Values by layer, and where `geomon figure` says that they peak.
PROFILES = [
    ([1.0, 3.0, 1.0], "peak at depth 0.50, bulge +2.00"),
    ([2.0, 1.0, 1.0, 2.0], "peak at depth 0.00, bulge −0.50"),
    # The published figures of a decoder, by layer: the peak is at a quarter of the depth.
    ([0.083, 0.458, 0.275, 0.146, 0.136], "peak at depth 0.25, bulge +1.51"),
    ([1.0, 1.5, 2.0, 2.5, 3.0], "peak at depth 1.00, bulge +0.00"),
]


@pytest.mark.parametrize(("profile", "said"), PROFILES)
def test_profiles_say_where_they_peak(profile, said, tmp_path):
    values = {f"own/layer_{layer:02d}": value for layer, value in enumerate(profile)}
    folder = write(tmp_path / "run", [reading_of(values, 8)])
    found = words_of(tmp_path, "figure", folder, "--kind", "profiles", "--metric", "own")
    assert f"last step: {said}" in found


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        ({"time": 1.0, "from_step": 1}, {"time": 2.0, "from_step": 2}, None),
        ({"x": "a" * 60}, {"x": "b"}, f"x {'a' * 60} and b"),
        ({"layers": ["a", "b"]}, {"layers": ["a"]}, "layers 2: a, b and 1: a"),
        ({"seed": 0}, {"seed": 10**4}, "seed 0 and 10,000"),
        ({"x": 0.10001}, {"x": 0.10002}, "x 0.10001 and 0.10002"),
        ({"x": 1}, {"x": "1"}, "x (1, with other values)"),
        ({"x": "a" * 61 + "b"}, {"x": "a" * 61 + "c"}, f"x ({'a' * 60} ..., with other values)"),
        ({}, {"x": 3}, "x not recorded and 3"),
    ],
)  # fmt: skip
def test_settings_that_differ_are_named(one, other, said, make_readings, tmp_path):
    folders = [
        write(tmp_path / name, make_readings((0, 16)), **described)
        for name, described in (("a", one), ("b", other))
    ]
    found = re.findall("^the records differ in (.*)$", invoke("compare", *folders).stdout, re.M)
    assert found == ([said] if said else [])


NOW = 1e9
# Readings, and a pattern of what `geomon watch` prints of them.
PRINTED = [
    ([reading_of({})], r"^step 0 · 0 s ago · probe, eval · not training\n$"),
    ([reading_of({"twonn/mean": 5.0, "twonn/mean/margin": 0.1})], "(?s)^(?!.*since)"),  # one value
    (alerted(Readings([], []), [(0, "rank_collapse")]),
     r"^no readings yet\nAlert at step 0: rank collapse \(layer 2\): look there"),
    # Sparks go from the least to the most, keep both ends, and draw noise flat.
    *(([reading_of({"twonn/mean": float(value), "twonn/mean/margin": margin}, step)
        for step, value in enumerate(values)], f"  {spark} ")
      for values, margin, spark in (
          ([5.36, 5.44, 5.41, 5.35], 0.0, "▄▄▄▄"),
          ([-5.36, -5.44, -5.41, -5.35], 0.0, "▄▄▄▄"),
          ([5.0, 5.15], 0.0, "▁█"),
          ([5.0, 6.0], 0.4, "▁█"),
          ([5.0, 5.4, 4.9, 5.2, 5.5, 5.1], 0.35, "▄▄▄▄▄▄"),  # within twice the margin
          ([0.0, 0.0], 0.0, "▄▄"),
          ([*range(80)], 0.0, "▁▁▂▂▃▃▄▄▅▅▆▆▇▇██"),
          ([8, 0], 0.0, "█▁"),
          ([3.0, 1.0, 2.0], 0.0, "█▁▅"),
          ([5.0, *[1.0] * 70, 3.0], 0.0, "█▁▁▁▁▁▁▁▁▁▁▁▁▁▁▅"),
      )),
    # The age of a reading has a unit that fits.
    *(([reading_of({"geomon/overhead": 0.1}, time=NOW - seconds)],
       f"^step 0 · {words} ago · probe, eval · not training · geomon 10 % of the time\n")
      for seconds, words in ((0, "0 s"), (119, "119 s"), (120, "2 min"), (7100, "118 min"),
                             (7200, "2 h"), (172_000, "48 h"), (172_800, "2 d"), (-5, "0 s"))),
    # The axis of steps names its ends and powers of ten.
    *(([reading_of({"twonn/mean": 5.0}, step) for step in steps],
       r"\n +" + " +".join(f"{step:,}" for step in ticks) + r"\s*$")
      for steps, ticks in (
          ((0, 1, 32), [0, 1, 10, 32]),
          ((0, 10, 2000), [0, 10, 100, 2000]),
          ((0, 80, 1500), [0, 80, 1500]),  # the names of 80 and 100, 1,000 and 1,500 would touch
          ((0, 300, 310), [0, 310]),
          ((500, 700, 900), [500, 900]),
          ((50, 700, 2000), [50, 100, 1000, 2000]),
          ((0, 1, 7_000_000), [0, 10, 1000, 100_000, 7_000_000]),
      )),
]  # fmt: skip


@pytest.mark.parametrize(("readings", "pattern"), PRINTED)
def test_an_overview_fits_what_was_read(readings, pattern, tmp_path, monkeypatch):
    monkeypatch.setattr("time.time", lambda: NOW)
    assert re.search(pattern, invoke("watch", "--once", write(tmp_path, readings)).stdout)


@pytest.mark.parametrize(
    ("values", "low", "high"),
    [
        ([5.0 + 0.01 * (n % 3) for n in range(40)], 4.91, 5.11),  # 4 % of the value
        ([0.0] * 9, 0.0, 1.0), ([1e-10] * 9, 0.0, 1.0), ([3.0] * 9, 2.94, 3.06),
        ([-3.0] * 9, -3.06, -2.94), ([-0.5, 0.0] * 9, -0.5, 0.0),
        ([1e38] * 9, 0.98e38, 1.02e38), ([7.0], 6.86, 7.14),
    ],
)  # fmt: skip
def test_noise_looks_flat_on_an_axis_that_is_negative_only_for_negative_values(
    values, low, high, tmp_path
):
    readings = [reading_of({"own/mean": value}, step) for step, value in enumerate(values)]
    printed = invoke("watch", "--once", write(tmp_path, readings)).stdout.splitlines()
    marks = [float(text.split("┤")[0]) for text in printed if "┤" in text]
    assert (min(marks), max(marks)) == pytest.approx((low, high), rel=0.01, abs=0.006)


# Which of several runs have a mean: by folder its description.
SEEDS = [
    ({"a": {"seed": 0}, "b": {"seed": 1, "time": 2.0}, "c": {"seed": 0, "tokens": 64}}, "a, b"),
    ({"a": {"seed": 0}, "b": {"seed": 1, "rate": 1}}, ""),
    ({"a": {"seed": 0}, "b": {"seed": 0}}, ""),  # they differ in what no record holds
    ({name: {"seed": n} for n, name in enumerate("abcde")}, "a, b, c, d, ..."),
]


@pytest.mark.parametrize(("runs", "mean"), SEEDS)
@pytest.mark.usefixtures("short_library")
def test_runs_that_differ_in_their_seed_alone_have_a_mean(runs, mean, make_readings, tmp_path):
    readings = make_readings((0, 16), without=ALL[1:])
    folders = [write(tmp_path / name, readings, **said) for name, said in runs.items()]
    assert invoke("report", *folders, "-o", tmp_path / "page.html").exit_code == 0
    page = (tmp_path / "page.html").read_text()
    assert {*re.findall(r"mean of ([^:\"]*)", page)} == ({mean} if mean else set())


@pytest.fixture
def short_library(monkeypatch):
    """Pages without the library of charts, which is 5 MB long."""
    monkeypatch.setattr("plotly.offline.get_plotlyjs", str)


@pytest.mark.usefixtures("short_library")
def test_long_runs_are_thinned_and_keep_both_ends_and_extremes(make_readings, tmp_path):
    names = ("twonn/mean", "twonn_distinct/mean", "gride/mean/k1", "gride/mean/k32",
             "attention_entropy/mean", "geomon/overhead")  # fmt: skip
    curves = {name: [1.0] * 450 for name in names}
    curves["twonn/mean"][317] = 77.0
    folder = write(tmp_path / "run", make_readings(tuple(range(450)), curves=curves))
    assert invoke("report", folder, "-o", tmp_path / "page.html").exit_code == 0
    page = (tmp_path / "page.html").read_text()
    drawn = [json.loads(text) for text in re.findall(r'"customdata":(\[.*?\])[,}]', page)
             if not text.startswith("[[")]  # fmt: skip
    assert max(map(len, drawn)) == 268  # two halves of 200, which share steps, and the extreme
    assert {0, 317, 449} <= set(drawn[0])
    assert len(re.findall(r'"method":"restyle"', page)) == 14  # of a slider


def words_of(folder, *arguments):
    """The words of a figure."""
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        done = invoke(*arguments, "--out", folder / "words.svg")
    assert done.exit_code == 0, done.stderr
    return re.findall(r"<text[^>]*>([^<]*)", (folder / "words.svg").read_text())


@pytest.mark.parametrize(
    ("described", "title"),
    [
        ({"parameters": 5000}, "5,000 parameters, steps 0 to 16, training loss 4.00 → 3.00"),
        ({"model": "a\x1b[2J\u202e$b^$", "layers": 3, "parameters": 1_234_567},
         "a�[2J�$b^$, 1.23 million parameters, steps 0 to 16, training loss 4.00 → 3.00"),
    ],
)  # fmt: skip
def test_the_title_says_model_size_steps_and_loss(described, title, make_readings, tmp_path):
    readings = make_readings((0, 16), curves={"training/loss": [4.0, 3.0]}, layers=1)
    folder = write(tmp_path / "run", readings, **{"model": "", **described})
    assert title in words_of(tmp_path, "figure", folder)


@pytest.mark.parametrize("kind", ["map", "profiles", "heads", "cosines", "compare"])
def test_names_are_no_formulas(kind, make_readings, tmp_path):
    """Matplotlib reads text between two dollars as a formula, in names of folders and metrics."""
    values = {f"own/layer_0{n}{head}": 0.0 for n in range(3) for head in ("", "/head_0", "/head_1")}
    texts = {**TEXTS, "own": {"title": "own$^$"}, "twonn": {"title": "twonn$^$"}}
    readings = [with_values(each, {**each.values, **values}) for each in make_readings((0, 16))]
    folders = [write(tmp_path / name, readings, metrics=texts) for name in ("a$^$", "b")]
    asked = ["compare", *folders]
    if kind != "compare":
        asked = ["figure", folders[0], "--kind", kind, "--metric", "own"]
    found = " | ".join(words_of(tmp_path, *asked))
    names = ["own$^$"] if kind != "compare" else ["first: a$^$", "twonn$^$"]
    assert [name for name in names if name not in found] == []


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["r/seed_0", "r/seed_1"], ["seed_0", "seed_1"]),
        (["r/s0/few", f"r/s1/few/{FILE_NAME}"], ["s0/few", "s1/few"]),
        (["r/a", "r/a"], ["a (1)", "a (2)"]),
        # One folder twice, and another of its name: the parents tell two of them apart.
        (["r/a", "q/a", "r/a"], ["r/a (1)", "q/a", "r/a (2)"]),
    ],
)
def test_names_are_as_short_as_tells_the_runs_apart(paths, names, make_readings, tmp_path):
    for path in paths:
        write(tmp_path / path.removesuffix(f"/{FILE_NAME}"), make_readings((0,)))
    printed = invoke("watch", "--once", *(tmp_path / path for path in paths)).stdout
    headings = [text for text in printed.splitlines() if text.startswith("━")]
    assert headings == [f"━ {name}" for name in names]
    assert "━" not in invoke("watch", "--once", tmp_path / "r").stdout  # one has no need of it


@pytest.mark.parametrize(
    ("made", "lines"),
    [
        ({"steps": (7,), "layers": 1, "heads": 1}, ["wrote"] * 6),
        ({"layers": 32, "heads": 16}, ["wrote"] * 6),
        ({"steps": (500, 700, 900), "layers": 2, "heads": 3}, ["wrote"] * 6),
        ({"layers": 2, "heads": 1, "curves": {"qk_cosine/layer_01/head_0": (NAN, 0.5)}},
         ["wrote"] * 6),
        ({"layers": 1, "heads": 1, "without": ["qk_cosine"]}, ["wrote"] * 5 + ["no cosines:"]),
    ],
)  # fmt: skip
def test_every_size_of_run_is_drawn_and_what_it_lacks_is_a_line(
    made, lines, make_readings, tmp_path
):
    folder = write(tmp_path / "run", make_readings(**{"steps": (0, 16)} | made))
    done = invoke("figure", folder, "--all")
    assert done.exit_code == 0
    said = done.stdout.splitlines()
    assert [line for line, own in zip(lines, said, strict=True) if not own.startswith(line)] == []


def test_pages_of_a_large_record_make_no_tags_of_all_values(make_readings, tmp_path, monkeypatch):
    """In a record of 5,000 readings of 8,000 values, each microsecond of a value is 40 s."""
    run = write(tmp_path / "run", make_readings(layers=12, heads=16))
    monkeypatch.setattr("geomon.record.reading.tagged", lambda stacks: pytest.fail("all tags"))
    for command in COMMANDS.keys() - {"compare"}:
        done = invoke(*COMMANDS[command](run, tmp_path))
        assert done.exit_code == 0, (command, done.output)


# -- files -----------------------------------------------------------------------------------------


def test_files_stand_beside_the_record_or_where_asked(make_readings, tmp_path):
    run = write(tmp_path / "run", make_readings((0, 16), layers=1, heads=1))
    other, page = tmp_path / "else" / "picture.svg", tmp_path / "new folder" / "page.html"
    kinds = ("--kind", "dimension", "--kind", "map", "--metric", "anisotropy")
    for arguments, files in [
        (("figure", run), [run / "geometry.png"]),
        (("figure", run / FILE_NAME, "--out", other), [other]),
        (("figure", run, *kinds),
         [run / "figures" / "dimension.png", run / "figures" / "map_anisotropy.png"]),
        (("compare", run, run, "--out", tmp_path / "both.svg"), [tmp_path / "both.svg"]),
        (("report", run, "-o", page), [page]),
    ]:  # fmt: skip
        done = invoke(*arguments)
        assert done.exit_code == 0, done.stderr
        assert re.findall(r"^wrote (\S.*?)(?: \(.*)?$", done.stdout, re.M) == [*map(str, files)]
        assert all(file.is_file() for file in files)
    assert "<svg" in other.read_text()[:1000]
    assert page.read_text().lstrip().startswith("<!DOCTYPE html>")


# Arguments of a command on a run that measured five metrics; words of the line that refuses it.
WRONG = [
    (["figure", "run", "--kind", "nothing"], "no figure is called 'nothing': there are run, "),
    (["figure", "run", "--kind", "nothing", "--kind", "map"], "no figure is called 'nothing'"),
    (["figure", "run", "--kind", "dimension", "--metric", "cosine"],
     "'dimension' takes no metric: profiles, map, heads"),
    (["figure", "run", "--kind", "map", "--metric", "anisotropi"],
     "anisotropi: not measured in this run: did you mean anisotropy"),
    (["figure", "run", "--kind", "map", "--metric", "zzz"],
     "zzz: not measured in this run; anisotropy, attention_entropy, qk_cosine were"),
    (["figure", "run", "--kind", "heads", "--metric", "twonn"],
     "twonn of single heads: not measured in this run; attention_entropy, qk_cosine were"),
    (["figure", "run", "--kind", "cosines", "--metric", "qk_cosin"], "did you mean qk_cosine"),
    *((["figure", "bare", "--kind", kind], "not measured in this run")
      for kind in ("dimension", "profiles", "map", "heads", "cosines")),
    (["figure", "run", "--out", "a"], "figures are written to a file that ends in .png, .svg or"),
    (["figure", "run", "--out", "a.xyz"], "xyz"),
    (["figure", "run", "--stack", "x"], "no stack is called 'x'"),
    (["watch", "run", "--once", "--metric", "anisotropi"], "no run has 'anisotropi': there are tw"),
    (["watch", "run", "--once", "--metric", "anisotropy", "--layer", "9"],
     "no layer 9 of anisotropy: there are 0 to 4"),
    (["watch", "run", "--once", "--metric", "twonn", "--layer", "1"], "it is not of layers"),
    (["report", "run", "-o", "a.pdf"], "the file of a report must end in .html"),
    (["alerts", "x"], "no alert is called 'x'"),
    (["compare", "run", "no"], "no record at no"),
    (["watch", "run", "--once", "--stack", "encoder"], "no stack is called 'encoder'"),
    *(([*asked, out], f"geomon: {out} cannot be written (")
      for *asked, out in (["figure", "run", "--out", "file/a.png"],
                          ["compare", "run", "run", "--out", "file/a.png"],
                          ["report", "run", "--out", "file/a.html"],
                          ["export", "run", "--out", "file/a.csv"])),
    (["report", "run", "--out", "file/a.html"], "): pass another path with --out\n"),
    (["figure", "run", "--kind", "run", "--kind", "map", "--out", "file"],
     "is a file: pass a folder with --out for several figures\n"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "words"), WRONG)
def test_bad_input_is_one_clear_line(arguments, words, run, make_readings, tmp_path, monkeypatch):
    write(tmp_path / "bare", make_readings((0, 16), without=ALL))
    (tmp_path / "file").write_text("of the user")
    monkeypatch.chdir(tmp_path)
    before = {path: path.is_dir() or path.read_bytes() for path in tmp_path.rglob("*")}
    result = invoke(*arguments)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert words in result.stderr
    assert {path: path.is_dir() or path.read_bytes() for path in tmp_path.rglob("*")} == before


@pytest.mark.parametrize(
    ("name", "file", "writes"),
    [
        ("export", "a.csv", "pandas.DataFrame.to_csv"),
        ("figure", "a.png", "matplotlib.figure.Figure.savefig"),
    ],
)
def test_the_old_page_stays_if_the_new_one_cannot_be_finished(
    name, file, writes, run, tmp_path, monkeypatch
):
    def fill_up(*given, **more):
        next(each for each in given if isinstance(each, Path)).write_text("half")
        raise OSError(28, "No space left on device")

    (tmp_path / file).write_text("of yesterday")
    monkeypatch.setattr(writes, fill_up)
    result = invoke(name, run, "--out", tmp_path / file)
    assert result.exit_code == 2
    assert "cannot be written (No space left on device)" in result.stderr
    assert (tmp_path / file).read_text() == "of yesterday"
    assert {*tmp_path.iterdir()} == {run, tmp_path / file}  # no part of the new one


@pytest.mark.parametrize("columns", [80, 200])
def test_a_summary_is_as_wide_as_the_terminal_at_most_100(run, columns):
    program = "import sys; sys.stdout.isatty = lambda: True; from geomon.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "summary", str(run)], capture_output=True, text=True,
        env=os.environ | {"COLUMNS": str(columns)}, check=True,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) == min(columns, 100)
    assert "peak 7.4 ± 0.1" in done.stdout


# -- nothing of a record acts ----------------------------------------------------------------------

ACTING = "[bold]x[/nope]\x1b[2J\x1b]0;title\x07\u202eabc\x9b31m\x00\r\nline\u2028end"
SCRIPT = "<script>alert(1)</script><b onclick='x()'>\"&amp;</b></script><!--"
TAG = "<img src=x onerror=alert(1)>"


def acting(readings, text, name):
    """A record whose every text, and a tag, act on a terminal or on a page."""
    tags = (f"{name}/mean", f"{name}/mean/part", f"{name}/layer_01", f"{name}/layer_02")
    odd = [
        with_values(
            each, each.values | dict.fromkeys(tags, 2.0),
            source=text, mode=text, dtype=text, notes=[text],
        )
        for each in readings
    ]  # fmt: skip
    said = dict.fromkeys(("title", "unit", "meaning", "healthy"), text) | {"parts": {"part": text}}
    described = {"model": text, text: text, "layers": [text], "geomon": f"9999.1{text}"}
    return Readings([], odd), {**described, "metrics": {**TEXTS, name: said}}


@pytest.mark.parametrize(
    "command", [["watch", "--once"], ["summary"], ["summary", "--stack", ACTING], ["figure"]]
)
def test_nothing_of_a_record_acts_on_the_terminal(make_readings, tmp_path, command):
    folder = tmp_path / "a\x1b[2Jb\u202ec"
    readings, described = acting(make_readings((0, 16)), ACTING, ACTING)
    write(folder, readings, **described)
    for _ in range(2):
        result = invoke(*command, folder)
        assert isinstance(result.exception, SystemExit | None), result.exception
        output = result.stdout + result.stderr
        assert output
        assert all(line.isprintable() for line in output.split("\n")), output
        (folder / FILE_NAME).write_text(f"{ACTING}\n{{}}\n")  # and then no record at all


@pytest.mark.usefixtures("short_library")
def test_nothing_of_a_record_acts_on_a_page(make_readings, tmp_path):
    pages = []
    for name, text in (("plain", "text"), ("odd", SCRIPT), ("control", "\x07\x1b[2J")):
        readings, described = acting(make_readings((0, 16)), text, TAG if name == "odd" else text)
        described["metrics"]["twonn"] = {**TEXTS["twonn"], "title": text, "meaning": text}
        folder = write(tmp_path / name, alerted(readings, [(16, text)]), **described)
        assert invoke("report", folder, folder, "-o", tmp_path / "page.html").exit_code == 0
        pages.append((tmp_path / "page.html").read_text())
    plain, odd, control = pages
    assert odd.count("<script") == plain.count("<script")
    outside = re.sub(r"(?s)<script.*?</script>", "", odd)
    assert "<img" not in outside
    assert not re.search(r"<[^>]* on\w+=", outside)
    assert outside.count("&lt;script&gt;alert(1)") >= 7  # model, alert, note, configuration, ...
    assert TAG not in odd
    assert not {"\x07", "\x1b"} & {*control}
    assert not re.search(r"\\u00(07|1b)", control)


def test_a_report_asks_the_network_for_nothing_and_holds_the_library_once(run, tmp_path):
    from plotly.offline import get_plotlyjs

    assert invoke("report", run, "-o", tmp_path / "page.html").exit_code == 0
    text = (tmp_path / "page.html").read_text()
    assert text.count(get_plotlyjs()[:2000]) == 1
    own = text.replace(get_plotlyjs(), "").replace('"plotlyServerURL": "https://plot.ly"', "")
    assert len(own) < 5e5
    assert not re.search(r"https?://|@import|url\(|fetch\(|XMLHttp|import\(", own)
    assert re.findall(r"\b(?:src|href|action|srcset)=\S+", own) == ['href="data:,">']


def test_nothing_of_matplotlib_is_changed_and_nothing_is_loaded_before_it_is_needed(run, tmp_path):
    before = dict(matplotlib.rcParams)
    figure = geomon.show.geometry_figure(read(run))
    assert figure._repr_png_().startswith(b"\x89PNG")  # a notebook shows it
    assert dict(matplotlib.rcParams) == before
    with pytest.raises(AttributeError, match=r"'geomon\.show' has no attribute 'nothing'"):
        geomon.show.nothing  # noqa: B018
    code = (
        "import sys; from geomon.show import Pictures; "
        "assert not {'matplotlib', 'rich', 'typer'} & sys.modules.keys(); "
        "from geomon.show import save; assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_sentences_are_wrapped_between_words_in_a_terminal_alone(monkeypatch):
    text = "see attention_entropy_normalised of a decoder-only model"
    assert fit(text) == text
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "19")
    lines = fit(text).splitlines()
    assert lines == [
        "see",
        "  attention_entropy_normalised",
        "  of a decoder-only",
        "  model",
    ]
