"""The page of claims is made of the files that the experiments leave, and of nothing else."""

import os
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from recipes.claims.__main__ import app
from recipes.claims.collect import (
    CollectError,
    Collection,
    collect,
    experiments_in,
    newest_folders,
)
from recipes.claims.page import render
from recipes.study import Claim, save_claims


def claim(name="it_grows", values=(1.0, 1.1, 0.9), command="make decoder", **fields):
    words = {
        "asserts": f"{name} asserted.", "published": "a rise", "quantity": "change",
        "source": "2311.05928, section 4.2",
    }  # fmt: skip
    return Claim(name=name, values=values, command=command, **(words | {"above": 0.0} | fields))


def page(*claims, missing=(), top=Path("nowhere"), path=Path("nowhere/docs/claims.md")):
    return render(Collection(claims, missing), page=path, top=top)


def row(text, name):
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {name} asserted.")]
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def test_a_line_shows_all_that_decides_its_claim():
    cells = row(page(claim(differs="characters here")), "it_grows")
    assert cells == [
        "it_grows asserted.", "a rise (section 4.2)", "change [> 0]", "1.00 ± 0.25<br>3 seeds",
        "**agrees**", "a",
    ]  # fmt: skip
    assert "- **a**: characters here." in page(claim(differs="characters here"))


def test_a_share_has_the_interval_of_a_count():
    cells = row(page(claim(values=(1.0, 0.0, 1.0), counted=True, repeated="control")), "it_grows")
    assert cells[3:5] == ["0.67 (0.09 to 0.99)<br>3 controls", "**agrees**"]


def test_every_verdict_is_counted_by_paper_and_in_all():
    text = page(
        claim("a"),
        claim("b", values=(-1.0, -1.1, -0.9)),
        claim("c", values=(1.0, -1.1, 0.9)),
        claim("d", source="2401.12143, section 5"),
        claim("e", source="2401.12143, section 5"),
    )
    assert "([2311.05928](https://arxiv.org/abs/2311.05928)) | 3 | 1 | 1 | 1 |" in text
    assert "([2401.12143](https://arxiv.org/abs/2401.12143)) | 2 | 2 | 0 | 0 |" in text
    assert "| **all** | 5 | 3 | 1 | 1 |" in text


def test_papers_have_their_own_tables_in_a_fixed_order():
    sources = ["a conjecture of ours", "9912.00001, section 1", "2401.12143", "2311.05928"]
    text = page(*(claim(f"c{n}", source=source) for n, source in enumerate(sources)))
    titles = [line for line in text.splitlines() if line.startswith("## ")]
    assert [bool(re.search(word, title)) for word, title in zip(
        ["2311.05928", "2401.12143", "9912.00001", "Without a paper"], titles, strict=True
    )] == [True] * 4  # fmt: skip


def test_an_experiment_without_claims_is_not_run_and_has_no_line(tmp_path):
    save_claims([claim()], tmp_path / "decoder")
    found = collect([tmp_path / "decoder"], ["grokking", "decoder"])
    assert found.missing == ["grokking"]
    text = page(*found.claims, missing=found.missing)
    assert "Not run: `make grokking`." in text
    assert text.count("| it_grows asserted.") == 1
    assert "Not run" not in page(*found.claims)


def test_the_order_of_the_folders_changes_nothing(tmp_path):
    for name in ("decoder", "grokking", "digits"):
        save_claims([claim(f"of_{name}", command=f"make {name}")], tmp_path / name)
    folders = sorted(tmp_path.iterdir())
    one, other = (collect(order, []).claims for order in (folders, folders[::-1]))
    assert page(*one) == page(*other)


def test_two_runs_of_one_experiment_are_refused_by_name(tmp_path):
    for name in ("decoder", "again"):
        save_claims([claim()], tmp_path / name)
    with pytest.raises(CollectError, match=r"again and .*decoder both hold the claim it_grows"):
        collect(tmp_path.iterdir(), [])
    save_claims([claim(command="make grokking")], tmp_path / "again")
    assert len(collect(tmp_path.iterdir(), []).claims) == 2


def test_of_several_runs_the_newest_is_taken(tmp_path):
    for name in ("decoder", "decoder-2", "decoder-10", "grokking"):
        save_claims([claim()], tmp_path / name)
    (tmp_path / "decoder-11").mkdir()  # a run that has made no claims yet
    assert [folder.name for folder in newest_folders(tmp_path)] == ["decoder-10", "grokking"]


def test_recipes_that_make_claims_are_known_without_a_list():
    found = experiments_in(Path(__file__).parent.parent.parent / "recipes")
    assert "decoder" in found
    assert not {"claims", "enwik8", "study"} & set(found)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ((0.5,), "0.5, one value<br>1 seed"),
        ((2.0, 2.0, 2.0), "2 ± 0<br>3 seeds"),
        ((1e-12, 2e-12), "1.5e-12 ± 6.4e-12<br>2 seeds"),
        ((1000.0, 3000.0), "2e+03 ± 1.3e+04<br>2 seeds"),
    ],
)
def test_numbers_have_the_digits_that_their_margins_leave(values, words):
    assert row(page(claim(values=values)), "it_grows")[3] == words


def test_text_of_a_claim_cannot_break_its_row():
    cells = row(page(claim(quantity="|cos| of\ntwo heads", repeated="head")), "it_grows")
    assert cells[2] == r"\|cos\| of two heads [> 0]"
    assert cells[3].endswith("3 heads")


def test_pictures_are_linked_from_the_page_where_they_are_there(tmp_path):
    (tmp_path / "docs" / "pictures").mkdir(parents=True)
    (tmp_path / "docs" / "pictures" / "a.png").touch()
    claims = [claim("a", picture="docs/pictures/a.png"), claim("b", picture="docs/pictures/b.png")]
    text = page(*claims, top=tmp_path, path=tmp_path / "docs" / "claims.md")
    assert "[a.png](pictures/a.png)" in text
    assert "b.png" not in text


def test_the_time_stands_beside_the_command():
    text = page(claim("a", seconds=440.0), claim("b", command="make digits"))
    assert "- `make decoder`: 1 line; 7 minutes on two cores." in text
    assert "- `make digits`: 1 line; time not taken." in text


def test_the_command_writes_the_page(tmp_path):
    save_claims([claim()], tmp_path / "decoder")
    out = tmp_path / "page.md"
    result = CliRunner().invoke(app, [str(tmp_path / "decoder"), "-o", str(out)])
    assert result.exit_code == 0, result.output
    assert "it_grows asserted." in out.read_text()
    assert os.fspath(out) in result.output


@pytest.mark.parametrize(
    "content", [None, "no json", '[{"name": "x"}]', '{"a": 1}', '[{"values": 1}]']
)
def test_a_folder_without_claims_is_an_error_of_one_line(tmp_path, content):
    folder = tmp_path / "a"
    folder.mkdir()
    if content is not None:
        (folder / "claims.json").write_text(content)
    result = CliRunner().invoke(app, [str(folder), "-o", str(tmp_path / "page.md")])
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {folder} holds no claims that can be read")
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "page.md").exists()
