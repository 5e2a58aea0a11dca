"""Bad input to every page and command: one clear line, an exit code, and never a traceback."""

import json
import re

import pytest
from tagged import with_values
from typer.testing import CliRunner

from geomon import __version__, read
from geomon.cli import make_app
from geomon.record import FILE_NAME

# Arguments of each command on the record of a folder.
COMMANDS = {
    "watch": lambda run, out: ["watch", "--once", run],
    "figure": lambda run, out: ["figure", run, "--out", out / "run.png"],
    "report": lambda run, out: ["report", run, "-o", out / "report.html"],
    "compare": lambda run, out: ["compare", run, run],
    "export": lambda run, out: ["export", run, "-o", out / "values.csv"],
    "summary": lambda run, out: ["summary", run],
}
NEWER = {"run": {"geomon": "9999.1", "model": "Synthetic"}}
# A reading as this version does not know it.
UNKNOWN = '{"step": 2000, "form": 2, "columns": "AAAA"}'


def line(content):
    return json.dumps(content) + "\n"


def make(case, path, readings):
    """Write the record of a case; at least three readings."""
    lines = [reading.line() + "\n" for reading in readings]
    first = line({"run": {"geomon": __version__, "model": "Synthetic"}})
    texts = {
        "an empty file": "",
        "no reading": first,
        "no record": "hello\n",
        "a list": "[1, 2]\n",
        "a line in the middle": first + lines[0] + lines[1][:80] + "\n" + lines[2],
        "a torn line": first + "".join(lines[:-1]) + lines[-1][:100],
        "two runs at once": first + "".join(lines[:3] + lines[1:]),
        "a newer version": line(NEWER) + "".join(lines),
        "a newer version, all unknown": line(NEWER) + UNKNOWN + "\n",
        "other metrics": first
        + "".join(with_values(r, {"mine/layer_01": 1.0}).line() + "\n" for r in readings),
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
    "a newer version, all unknown": "line 2 of .*; move the file away, or upgrade geomon",
}
# Words of a line beside the page, which is made.
REMARKED = {
    "two runs at once": "From line 5 on, two runs wrote into this record at once",
    "a newer version": "written by a newer geomon .9999.1.: .* may miss values; pip install",
    "a torn line": "",
    "other metrics": "",
}


def run_command(command, case, make_readings, tmp_path):
    make(case, tmp_path / "run", make_readings())
    arguments = COMMANDS[command](tmp_path / "run", tmp_path)
    return CliRunner().invoke(make_app(), list(map(str, arguments)))


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_record_of_which_no_page_can_be_made_is_refused_in_one_line(
    command, case, make_readings, tmp_path
):
    result = run_command(command, case, make_readings, tmp_path)
    assert isinstance(result.exception, SystemExit | None)
    if command == "watch" and REFUSED[case].startswith("no readings"):  # it can wait for some
        assert result.exit_code == 0
        words = " ".join(result.stdout.split())
        assert words.startswith("no readings yet")
        return
    assert (result.exit_code, result.stdout) == (2, "")
    assert re.fullmatch(f"geomon: {REFUSED[case]}.*\n", result.stderr)


@pytest.mark.parametrize("case", REMARKED)
@pytest.mark.parametrize("command", COMMANDS)
def test_what_can_be_read_is_shown_with_one_line_on_the_rest(
    command, case, make_readings, tmp_path
):
    result = run_command(command, case, make_readings, tmp_path)
    if command == "compare" and case == "other metrics":
        assert result.exit_code == 2
        assert re.fullmatch(
            "geomon: the runs have no values at steps near one another.*\n", result.stderr
        )
        return
    assert result.exit_code == 0, result.output
    assert result.stdout
    said = result.stderr.splitlines()
    if command in ("watch", "summary"):  # they say it where they say everything
        said = [" ".join(result.stdout.split())] if REMARKED[case] else []
    assert len(said) == bool(REMARKED[case]) * (2 if command == "compare" else 1)
    assert all(re.search(REMARKED[case], words) for words in said)


@pytest.mark.parametrize("case", [*REFUSED, "two runs at once", "a newer version", "other metrics"])
def test_a_notebook_shows_what_can_be_read(case, make_readings, tmp_path):
    make(case, tmp_path / "run", make_readings())
    words = {**REFUSED, **REMARKED}[case]
    if not words.startswith("no readings") and case in REFUSED:
        with pytest.raises((FileNotFoundError, ValueError), match=words):
            read(tmp_path / "run")
        return
    page = read(tmp_path / "run")._repr_html_()
    assert re.search(words.removeprefix("no readings yet in .*: ").removesuffix("try again"), page)
