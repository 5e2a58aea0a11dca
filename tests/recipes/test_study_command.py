"""What the commands of the experiments share: errors in a line, and results as they are printed."""

import importlib
from pathlib import Path

import pytest
import typer

import recipes
from recipes.enwik8.data import DataError
from recipes.study import Claim, RunError, load_claims
from recipes.study.command import check_heads, leave_results, one_line_errors, print_progress

RECIPES = sorted(path.parent.name for path in Path(recipes.__file__).parent.glob("*/__main__.py"))


@pytest.mark.parametrize("name", RECIPES)
def test_every_option_of_a_command_says_what_it_is(name):
    """Eight options of one command were "Size of the model or the run."."""
    command = typer.main.get_command(importlib.import_module(f"recipes.{name}.__main__").app)
    helps = [option.help for option in command.params]
    assert helps
    assert all(words and words.endswith((".", "...")) for words in helps)
    assert len(set(helps)) == len(helps)


@pytest.mark.parametrize("kind", [DataError, RunError, OSError])
def test_bad_input_is_one_line_and_exit_code_2(kind, capsys):
    with pytest.raises(typer.Exit) as ended, one_line_errors():
        raise kind("first\n   second")
    assert ended.value.exit_code == 2
    assert capsys.readouterr() == ("", "error: first second\n")


def test_an_error_of_the_program_is_not_hidden_but_where_it_is_named():
    with pytest.raises(KeyError), one_line_errors():
        raise KeyError("a mistake")
    with pytest.raises(typer.Exit), one_line_errors(KeyError):
        raise KeyError("bad input")


def test_heads_share_a_width_evenly():
    check_heads(48, 4)
    with pytest.raises(RunError, match="--width 50 cannot be shared among --heads 4"):
        check_heads(50, 4)


def test_progress_is_counted(capsys):
    report = print_progress()
    report(1, 3)
    assert capsys.readouterr().out == "1 of 3 trainings are complete, 0 s\n"


@pytest.mark.parametrize("table", [(), ("a | b",)])
def test_results_are_written_and_printed_after_their_table(tmp_path, capsys, table):
    words = dict.fromkeys(("asserts", "published", "source", "command", "quantity"), "x")
    claim = Claim("it_grows", **words, values=(1.0, 1.1, 0.9), above=0, seconds=9.0)
    leave_results([claim], tmp_path, figures=[tmp_path / "a.png"], table=table)
    assert load_claims(tmp_path) == [claim]
    assert capsys.readouterr().out.splitlines() == [
        "", *table, *[""] * len(table),
        "agrees     it_grows: 1 ± 0.25 (3 x seed; above 0)", "",
        f"figure: {tmp_path / 'a.png'}", f"claims: {tmp_path / 'claims.json'}",
        f"records: in {tmp_path}; geomon watch shows one",
    ]  # fmt: skip
