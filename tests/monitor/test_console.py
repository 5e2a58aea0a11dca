"""A program that has set up no logging sees the messages of geomon."""

import contextlib
import logging
import sys

import pytest
from tqdm.auto import tqdm

from geomon import Monitor
from support.models import PlainDecoder


@contextlib.contextmanager
def program(where=None, **modules):
    """The log of geomon in a program that has no handlers, or one that prints."""
    log = logging.getLogger("geomon")
    with pytest.MonkeyPatch.context() as patch:  # pytest has handlers while a test runs
        for each in (logging.getLogger(), log):
            patch.setattr(each, "handlers", [])
        for name, module in modules.items():
            patch.setitem(sys.modules, name, module)
        if where is not None:
            logging.getLogger(where).addHandler(logging.StreamHandler(sys.stdout))
        for _ in range(2):  # every monitor has some
            Monitor(PlainDecoder(), directory=None)
        yield log


@pytest.mark.parametrize("modules", [{}, {"tqdm": None}], ids=["tqdm", "without"])
def test_a_message_is_one_line_that_says_whose_it_is(capsys, modules):
    with program(**modules) as log:
        log.warning("two of\n %d rows", 3)
        log.getChild("sweep").warning("done")
    assert capsys.readouterr() == ("", "geomon: two of 3 rows\ngeomon.sweep: done\n")


def test_a_message_is_not_glued_to_a_progress_bar(capsys):
    with program() as log, tqdm(total=9, file=sys.stderr, ncols=40) as bar:
        bar.update(3)
        log.warning("two rows")
    assert "geomon: two rows" in capsys.readouterr().err.replace("\r", "\n").splitlines()


def test_a_message_that_cannot_be_printed_ends_nothing_and_is_said_as_logging_does(capsys):
    with program(tqdm=logging) as log:  # which prints no line
        log.warning("two of %d rows", 3)
    said = capsys.readouterr().err
    assert "Logging error" in said
    assert "two of" in said


@pytest.mark.parametrize("where", ["", "geomon"])
def test_a_log_of_the_program_alone_shows_it(capsys, where):
    with program(where) as log:
        log.warning("two rows")
        log.getChild("sweep").warning("done")
    assert capsys.readouterr() == ("two rows\ndone\n", "")
