import io
import json
import subprocess
import sys
import threading

import pytest
from rich.console import Console
from typer.testing import CliRunner

from geomon.record import FILE_NAME
from geomon.show import cli


@pytest.fixture
def run(make_readings, tmp_path):
    """A folder with the record of a run."""
    readings = make_readings()
    lines = [json.dumps({"run": {"model": "Synthetic"}}), *(r.line() for r in readings)]
    (tmp_path / FILE_NAME).write_text("\n".join(lines) + "\n")
    return tmp_path


def invoke(*arguments):
    return CliRunner().invoke(cli.make_app(), list(map(str, arguments)))


def test_watch_once_prints_the_present(run):
    result = invoke("watch", run, "--once")
    assert result.exit_code == 0
    assert "compressing since step 256" in result.stdout


def test_summary_says_the_run_in_words(run):
    result = invoke("summary", run)
    assert result.exit_code == 0
    assert result.stdout.startswith("twonn/mean: 2.5 at step 0, peak 7.4 at step 256")


def test_figure_is_written_beside_the_record_or_where_asked(run, tmp_path):
    assert invoke("figure", run).stdout == f"wrote {run / 'geometry.png'}\n"
    assert (run / "geometry.png").stat().st_size > 10_000
    other = tmp_path / "else" / "picture.svg"
    assert invoke("figure", run / FILE_NAME, "--out", other).exit_code == 0
    assert "<svg" in other.read_text()[:1000]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["summary"], "no record at"),
        (["figure"], "no record at"),
        (["watch", "--once"], "no record at"),
    ],
)
def test_bad_input_ends_in_one_line_and_exit_code_2(tmp_path, command, words):
    result = invoke(*command, tmp_path / "nowhere")
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_a_file_that_is_no_record_and_one_without_readings_are_bad_input(tmp_path, run):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / FILE_NAME).write_text("hello\n")
    result = invoke("summary", tmp_path / "other")
    assert (result.exit_code, "line 1 of" in result.stderr) == (2, True)
    (tmp_path / "other" / FILE_NAME).write_text('{"run": {}}\n')
    result = invoke("figure", tmp_path / "other")
    assert (result.exit_code, "no readings yet" in result.stderr) == (2, True)
    assert invoke("figure", run, "--out", tmp_path / "picture.xyz").exit_code == 2


@pytest.mark.parametrize("terminal", [False, True])
def test_a_run_is_waited_for_and_followed(make_readings, tmp_path, monkeypatch, terminal):
    monkeypatch.setattr(cli, "_POLL", 0.001)
    readings = make_readings()
    looks = iter(range(len(readings) + 2))

    def keep_going():
        look = next(looks, None)
        if look and look <= len(readings):
            with (tmp_path / FILE_NAME).open("a") as file:
                file.write(readings[look - 1].line() + "\n")
        return look is not None

    output = io.StringIO()
    console = Console(file=output, width=80, force_terminal=terminal, color_system=None)
    cli.follow(tmp_path, console=console, keep_going=keep_going)
    text = output.getvalue()
    assert text.startswith(f"waiting for {tmp_path / FILE_NAME}")
    if terminal:
        assert "compressing since step 256: 28 % below the peak 7.4" in text
    else:
        assert [shown.split(":")[0] for shown in text.splitlines()[1:]] == [
            f"step {reading.step}" for reading in readings
        ]


def test_ctrl_c_ends_the_watch_quietly(run):
    output = io.StringIO()

    def keep_going():
        raise KeyboardInterrupt

    before = threading.active_count()
    cli.follow(run, console=Console(file=output, force_terminal=False), keep_going=keep_going)
    assert output.getvalue() == ""
    assert threading.active_count() == before


def test_without_typer_it_says_what_to_install():
    code = (
        "import sys; sys.modules['typer'] = None; sys.argv = ['geomon'];"
        "from geomon.show import cli; cli.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "pip install 'geomon[terminal]'" in done.stderr
    assert done.stderr.count("\n") == 1
