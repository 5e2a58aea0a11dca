"""An error that a signal handler raises inside geomon belongs to the training."""

import signal

import pytest

from geomon.failures import failures, ignored


class OfTheLoopError(Exception):
    """The exception that a training makes of a signal."""


def by_two(number, frame):
    raise OfTheLoopError


def by_any(*given):
    raise OfTheLoopError


def by_more(number, frame, reason="none"):
    raise OfTheLoopError


@pytest.fixture(params=[by_two, by_any, by_more], ids=lambda handler: handler.__name__)
def interrupted(request):
    """A function that a signal interrupts, whose handler raises."""
    before = signal.signal(signal.SIGUSR1, request.param)
    yield lambda: signal.raise_signal(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, before)


def plain(number=signal.SIGUSR1, frame=None):
    """No handler: it is called with a number of a signal, but interrupts nothing."""
    raise OfTheLoopError


def handled(act, *kinds):
    """Whether geomon handles the error of an action."""
    try:
        act()
    except failures(*kinds):
        return True
    return False


def test_errors_are_handled_unless_a_handler_of_a_signal_raised_them(interrupted):
    assert handled(plain)
    assert handled(plain, KeyError, OfTheLoopError)
    with pytest.raises(OfTheLoopError):
        handled(plain, KeyError)
    for kinds in ((), (OfTheLoopError,), (BaseException,)):
        with pytest.raises(OfTheLoopError):
            handled(interrupted, *kinds)
    with pytest.raises(SystemExit):
        handled(lambda: exec("raise SystemExit"))  # no Exception


def test_an_error_that_was_raised_from_one_of_a_handler_is_that_one(interrupted):
    def wrapped(act, times):
        try:
            act() if times == 1 else wrapped(act, times - 1)
        except Exception as error:
            raise KeyError("own") from error

    for times in (1, 2):
        with pytest.raises(OfTheLoopError):
            handled(lambda times=times: wrapped(interrupted, times))
        assert handled(lambda times=times: wrapped(plain, times))


def test_errors_are_passed_over_unless_a_handler_of_a_signal_raised_them(interrupted):
    with ignored(), ignored(KeyError):
        plain()
    with pytest.raises(OfTheLoopError), ignored():
        interrupted()
    with pytest.raises(OfTheLoopError), ignored(KeyError):
        plain()
