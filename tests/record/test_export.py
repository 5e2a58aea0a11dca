import csv
import math
import subprocess
import sys

import pytest

from geomon.record import Readings, export
from support.readings import reading_of

COLUMNS = ("step", "source", "metric", "stack_name", "layer", "head_index", "part", "value")


@pytest.fixture
def run():
    first = {
        "twonn/layer_01": 0.1, "twonn/layer_01/margin": 1e-300, "twonn/mean": math.nan,
        "qk_cosine/encoder_layer_02/head_1": -0.25, "gride/mean/k32": 6.0,
        "anisotropy/null": 0.5, "geomon/seconds": 1.5, "training/val/loss": 3.0,
    }  # fmt: skip
    later = {"twonn/mean": 7.0, "geomon/overhead": 0.25}
    return Readings([], [reading_of(first), reading_of(later, 8, "inline")])


EXPECTED = [
    (0, "probe", "twonn", "", 1, None, "", 0.1),
    (0, "probe", "twonn", "", 1, None, "margin", 1e-300),
    (0, "probe", "twonn", "", None, None, "", None),
    (0, "probe", "gride", "", None, None, "k32", 6.0),
    (0, "probe", "anisotropy", "", None, None, "null", 0.5),
    (0, "probe", "qk_cosine", "encoder", 2, None, "", None),
    (0, "probe", "qk_cosine", "encoder", 2, None, "min", -0.25),
    (0, "probe", "qk_cosine", "encoder", 2, None, "max", -0.25),
    (0, "probe", "qk_cosine", "encoder", 2, 0, "", None),
    (0, "probe", "qk_cosine", "encoder", 2, 1, "", -0.25),
    (0, "probe", "qk_cosine", "encoder", None, None, "", None),
    (0, "probe", "qk_cosine", "encoder", None, None, "min", -0.25),
    (0, "probe", "qk_cosine", "encoder", None, None, "max", -0.25),
    (0, "probe", "training", "", None, None, "val/loss", 3.0),
    (0, "probe", "geomon", "", None, None, "seconds", 1.5),
    (8, "inline", "twonn", "", None, None, "", 7.0),
    (8, "inline", "geomon", "", None, None, "seconds", 2.0),
    (8, "inline", "geomon", "", None, None, "overhead", 0.25),
]


def missing_as_none(frame):
    rows = frame.astype(object).itertuples(index=False, name=None)
    import pandas

    return [tuple(None if pandas.isna(x) else x for x in row) for row in rows]


def test_a_data_frame_has_a_row_for_each_value(run):
    frame = run.to_pandas()
    assert tuple(frame.columns) == COLUMNS
    assert not [name for name in COLUMNS if hasattr(type(frame), name)]  # hides no method
    assert missing_as_none(frame) == EXPECTED
    heads = frame[(frame.metric == "qk_cosine") & (frame.head_index == 1)]
    assert heads.value.item() == -0.25
    assert len(Readings([], []).to_pandas()) == 0


def test_parquet_and_csv_hold_the_same_to_the_last_bit(run, tmp_path):
    import pandas
    from pyarrow import parquet

    path = export(run, tmp_path / "new" / "in it" / "values.parquet")
    assert missing_as_none(pandas.read_parquet(path)) == EXPECTED
    assert tuple(parquet.read_schema(path).names) == COLUMNS
    with export(run, f"{tmp_path}/values.csv").open(newline="") as file:
        rows = list(csv.reader(file))
    assert tuple(rows[0]) == COLUMNS
    assert rows[1:] == [["" if x is None else str(x) for x in row] for row in EXPECTED]
    with pytest.raises(ValueError, match=r"ends in .csv or .parquet"):
        export(run, tmp_path / "a.xlsx")


def test_a_spreadsheet_takes_no_name_for_a_formula(tmp_path):
    names = ["=1+1", "+a", "-a", "@a", "plain"]
    values = {f"{name}/mean/{name}": 1.0 for name in names}
    run = Readings([], [reading_of(values, source="=HYPERLINK()")])
    with export(run, tmp_path / "values.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["metric"] != "geomon"]
    assert {row["source"] for row in rows} == {"'=HYPERLINK()"}
    found = [(row["metric"], row["part"]) for row in rows]
    assert found == [(name, name) for name in ("'=1+1", "'+a", "'-a", "'@a", "plain")]


@pytest.mark.parametrize(
    ("missing", "call"),
    [("pandas", "run.to_pandas()"), ("pyarrow", "export(run, 'values.parquet')")],
)
def test_a_package_that_is_missing_is_named(missing, call, tmp_path):
    code = (
        f"import sys; sys.modules[{missing!r}] = None\n"
        "from geomon.record import Readings\nfrom geomon.record.exporting import export\n"
        f"run = Readings([], [])\ntry: {call}\nexcept ImportError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert "pip install pandas pyarrow" in done.stdout


ATTACK = "<script>alert(1)</script>"
SAME_STEP = [
    reading_of({"a/mean": value, "a/mean/margin": width}, 8, source)
    for source, value, width in (("b", 5.0, 0.1), ("a", 4.0, 0.9), ("c", 6.0, math.nan))
]
NEVER = [reading_of({"a/layer_01": math.nan, "a/mean": math.nan})]
# Forms of a run in Python, and how they begin.
SHOWN = {
    "a curve": (
        lambda run: list(run["twonn/mean"]),
        lambda run: [*run.series("twonn/mean"), [0.1] * len(run)],
    ),
    "steps of a curve": (
        lambda run: run["twonn/mean"].steps,
        lambda run: [reading.step for reading in run],
    ),
    "a curve of no margins": (
        lambda run: [*map(math.isnan, run["gride/mean/k1"].margins)],
        lambda run: [True] * len(run),
    ),
    "a curve of no values": (lambda run: Readings([], NEVER)["a/mean"].steps, lambda run: []),
    "a curve of several sources": (
        lambda run: Readings([], SAME_STEP)["a/mean"].values,
        lambda run: [4.0, 5.0, 6.0],
    ),
    "margins of several sources": (
        lambda run: Readings([], SAME_STEP)["a/mean"].margins,
        lambda run: pytest.approx([0.9, 0.1, math.nan], nan_ok=True),
    ),
    "the last reading": (lambda run: run[-1].step, lambda run: 1500),
    "a run": (
        repr,
        lambda run: f"Readings(Synthetic, 9 readings, steps 0 to 1,500, {len(run.tags())} tags)",
    ),
    "a reading": (
        lambda run: repr(run[1]),
        lambda run: f"Reading(step 16, probe, {len(run[1].values)} values, 1 note)",
    ),
    "nothing": (lambda run: repr(Readings([], [])), lambda run: "Readings(none yet)"),
    "a run of no model": (
        lambda run: repr(Readings([{}], run.readings))[:19],
        lambda run: "Readings(9 readings",
    ),
    "a name that acts on a terminal": (
        lambda run: "\x1b" in repr(Readings([{"model": "\x1b[2J"}], run.readings)),
        lambda run: False,
    ),
    "a name that acts in a notebook": (
        lambda run: ATTACK in Readings([{"model": ATTACK}], run.readings)._repr_html_(),
        lambda run: False,
    ),
}


@pytest.mark.parametrize("name", SHOWN)
def test_a_run_is_shown_in_python(make_readings, name):
    show, expected = SHOWN[name]
    run = make_readings(notes=["<b>few rows</b>"])
    assert show(run) == expected(run)


@pytest.mark.parametrize(
    ("form", "page"),
    [(None, "<p>Readings(none yet)</p>"), (lambda run: f"{len(run)} readings", "0 readings")],
)
def test_a_notebook_shows_the_page_of_a_run_where_there_are_pages(monkeypatch, form, page):
    monkeypatch.setattr(Readings, "notebook_form", form)
    assert Readings([], [])._repr_html_() == page
