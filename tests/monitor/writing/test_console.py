"""What a program that has set up no log sees of geomon's."""

import subprocess
import sys

import pytest

_PROGRAM = """
import logging, sys
from geomon.monitor.writing.console import print_log
{before}
print_log(), print_log()
bar = None
if "{bar}":
    from tqdm.auto import tqdm
    bar = tqdm(total=9, file=sys.stderr, ncols=40)
    bar.update(3)
logging.getLogger("geomon").warning("two of\\n %d rows", 3)
if bar: bar.close()
"""


def said(**parts):
    program = _PROGRAM.format(**{"before": "", "bar": "", **parts})
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=300
    )
    return done.stderr


@pytest.mark.parametrize("before", ["", "sys.modules['tqdm'] = None  # not installed"])
def test_a_message_is_one_line_that_says_whose_it_is(before):
    assert said(before=before) == "geomon: two of 3 rows\n"


def test_a_message_is_not_glued_to_a_progress_bar():
    pytest.importorskip("tqdm")
    written = said(bar="yes").replace("\r", "\n").splitlines()
    assert "geomon: two of 3 rows" in written


def test_a_message_that_cannot_be_printed_ends_nothing_and_is_said_as_logging_does():
    written = said(before="sys.modules['tqdm'] = logging  # which prints no line")
    assert "Logging error" in written
    assert "two of" in written


@pytest.mark.parametrize("where", ["", "geomon"])
def test_a_log_of_the_program_alone_shows_it(where):
    own = f"logging.getLogger({where!r}).addHandler(logging.StreamHandler(sys.stdout))"
    assert said(before=own) == ""
