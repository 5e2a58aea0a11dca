"""Claims decide themselves from the interval over repetitions, and their page is made of them."""

import re
import subprocess
import sys

import numpy as np
import pytest
from scipy import stats
from typer.testing import CliRunner

from geomon.record import Record, read
from geomon.record.arrays import ArrayPlace
from recipes.enwik8.text import InputError
from recipes.study.__main__ import app
from recipes.study.claim import Claim, Results, load_results, save_results, verdict_line
from recipes.study.page import render
from recipes.study.seeds import estimate
from recipes.study.training import begin_training, finish_training
from support.readings import reading_of


def claim(name="it_grows", values=(1.0, 1.1, 0.9), **fields):
    words = {
        "asserts": f"{name} asserted.", "quantity": "change", "source": "2311.05928, 4.2",
    }  # fmt: skip
    ends = {} if {"above", "below"} & fields.keys() else {"above": 0.0}
    return Claim(name=name, values=tuple(values), **(words | ends | fields))


def results(*claims):
    return Results("decoder", "characters here.", claims)


def test_the_interval_of_a_mean_is_that_of_scipy():
    values = [0.3, 0.7, 0.4, 1.1]
    low, high = stats.t.interval(0.95, 3, np.mean(values), stats.sem(values))
    assert (estimate(values).low, estimate(values).high) == pytest.approx((low, high))


@pytest.mark.parametrize(
    ("values", "ends", "verdict"),
    [
        ((1.0, 1.1, 0.9), {"above": 0}, "agrees"),
        ((1.0, 1.1, 0.9), {"below": 0}, "disagrees"),
        ((1.0, -1.1, 0.9), {"above": 0}, "undecided"),
        ((1.0, 1.1, 0.9), {"above": 0, "below": 2}, "agrees"),
        ((1.0, 1.1, 0.9), {"above": 3, "below": 4}, "disagrees"),
        ((1.0,), {"above": 0}, "undecided"),
        # Three of three are not certainty: as means they would have no margin at all.
        ((1.0,) * 3, {"above": 0.5, "counted": True}, "undecided"),
        ((1.0,) * 6, {"above": 0.5, "counted": True}, "agrees"),
        ((0.0,) * 6, {"above": 0.5, "counted": True}, "disagrees"),
    ],
)
def test_a_verdict_takes_the_whole_interval(values, ends, verdict):
    assert claim(values=values, **ends).verdict == verdict


@pytest.mark.parametrize("ends", [{"above": None}, {"above": 1, "below": 1}])
def test_a_claim_that_nothing_decides_is_refused(ends):
    with pytest.raises(ValueError, match="claim it_grows"):
        claim(**ends)


def test_results_come_back_from_their_file(tmp_path):
    kept = results(claim(), claim("share", (1.0, 0.0, 1.0), below=0.1, counted=True))
    save_results(kept, tmp_path / "a")
    assert load_results(tmp_path / "a") == kept
    assert [verdict_line(each) for each in kept.claims] == [
        "agrees     it_grows: 1.00 ± 0.25 (3 x seed; >0)",
        "undecided  share: 0.67 (0.09 to 0.99) (3 x seed; <0.1)",
    ]


# -- the page --------------------------------------------------------------------------------------


def rows(text, start):
    lines = [line for line in text.splitlines() if line.startswith(f"| {start}")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def test_a_paper_is_counted_by_what_it_asserts_alone():
    asked = {"asserts": "It is so.", "quantity": "|cos| of\ntwo heads"}
    found = results(
        claim("a", variant="few", repeated="head", **asked), claim("b", variant="many", **asked),
        claim("c", (-1.0, -1.1, -0.9)), claim("d", (1.0, -1.1, 0.9)),
        claim("same_of_ours", ours=True, **asked), claim("more_of_ours", ours=True),
        claim("other", source="2401.12143, 5", chosen="limit"),
    )  # fmt: skip
    text = render([found], ["grokking"])
    for words in (
        "([2311.05928](https://arxiv.org/abs/2311.05928)) | 4 | 2 | 1 | 1 |",
        "| **all** | 5 | 3 | 1 | 1 |", "Not run: `make grokking`.", "change (>0; limit ours)",
        "- `make decoder`: 5 lines; 3 seeds; [page](../recipes/decoder/",
    ):  # fmt: skip
        assert text.count(words) == 1, words
    assert (rows(text, "It is so"), rows(text, "more_of_ours")) == (
        [[r"It is so (4.2)<br>\|cos\| of two heads (>0)",
          "few: 1.00 ± 0.25 (3 heads) **agrees**<br>many: 1.00 ± 0.25 **agrees**"]], [],
    )  # fmt: skip
    assert text.index("The Shape of Learning (2311") < text.index("Inherent to Self-Attention in")


def run(runs, page):
    return CliRunner().invoke(app, ["claims", "--runs", str(runs), "-o", str(page)])


def test_the_command_writes_the_page(tmp_path):
    save_results(results(claim(), claim("b"), claim("ours", ours=True)), tmp_path / "decoder")
    done = run(tmp_path, tmp_path / "page.md")
    assert (done.exit_code, done.output) == (0, f"2 claims: {tmp_path / 'page.md'}\n")
    text = (tmp_path / "page.md").read_text()
    assert ("it_grows asserted" in text, "`make grokking`" in text) == (True, True)


@pytest.mark.parametrize("content", [None, "no json", '[{"name": "x"}]', '{"claims": [1]}'])
def test_a_folder_without_claims_is_an_error_of_one_line(tmp_path, content):
    folder = tmp_path / "decoder"
    folder.mkdir()
    if content is not None:
        (folder / "claims.json").write_text(content)
    done = run(tmp_path, tmp_path / "page.md")
    named = tmp_path if content is None else folder
    assert (done.exit_code, (tmp_path / "page.md").exists()) == (2, False)
    assert re.fullmatch(f"error: {named} holds no claims.*\n", done.stderr)


# -- folders of trainings --------------------------------------------------------------------------


def leave_broken_off(*folders) -> None:
    """Leave the records and arrays of two trainings that did not reach their ends."""
    reading = reading_of({"twonn/mean": 2.0}, 0)
    for folder in folders * 2:  # the second puts the record of the first aside
        record = Record(folder)
        record.begin(0, {})
        record.write(reading)
        record.write_arrays(reading, {ArrayPlace("", "mean_query", 1): np.ones(3)})
        record.close()


def test_a_training_that_was_broken_off_leaves_nothing_to_the_next_one(tmp_path):
    own, other, settings = tmp_path / "a", tmp_path / "b", {"steps": 3, "size": {"layers": 2}}
    leave_broken_off(own, own / "inner", other)
    of_user = [own / "arrays" / "mine.npz", own / "notes.txt"]
    for path in of_user:
        path.write_text("of the user")
    assert begin_training(own, settings)
    assert sorted(path for path in own.rglob("*") if path.is_file()) == of_user
    assert len(read(other)) == 1
    finish_training(own, settings)
    leave_broken_off(own)
    assert not begin_training(own, settings)  # what is complete is kept
    assert len(read(own)) == 1
    with pytest.raises(InputError, match="another size, steps: choose another folder by --out"):
        begin_training(own, {"steps": 4, "size": {"layers": 3}})


def test_the_records_of_a_training_that_goes_on_elsewhere_are_not_deleted(tmp_path):
    leave_broken_off(tmp_path)
    holds = f"from geomon.record import Record; held = Record({str(tmp_path)!r}); print(flush=True)"
    with subprocess.Popen(
        [sys.executable, "-c", f"{holds}; input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        process.stdout.readline()
        with pytest.raises(InputError, match=r"is in use, process .*: choose another folder"):
            begin_training(tmp_path, {})
        process.communicate(b"\n")
    assert len(read(tmp_path)) == 1
