import signal
import threading
import time

import pytest

from geomon.monitor.writing.time_limit import TimeLimitError, time_limit


def hang():
    time.sleep(60)


def wait_for_a_lock():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def spin():
    until = time.monotonic() + 60
    while time.monotonic() < until:
        pass


@pytest.mark.parametrize("blocked", [hang, wait_for_a_lock, spin])
def test_a_call_that_hangs_is_interrupted(blocked):
    began = time.monotonic()
    with pytest.raises(TimeLimitError, match="it took more than"), time_limit(0.2):
        blocked()
    assert time.monotonic() - began < 20


def test_a_call_in_time_is_left_alone():
    with time_limit(30):
        value = 3
    assert value == 3
    with pytest.raises(ZeroDivisionError), time_limit(30):
        1 / 0  # noqa: B018


def test_handler_and_timer_of_the_program_are_put_back():
    rung = []
    before = signal.signal(signal.SIGALRM, lambda *_: rung.append(True))
    own = signal.getsignal(signal.SIGALRM)
    previous = signal.setitimer(signal.ITIMER_REAL, 50, 7)
    try:
        with time_limit(5):
            assert signal.getsignal(signal.SIGALRM) is not own
        assert signal.getsignal(signal.SIGALRM) is own
        delay, interval = signal.getitimer(signal.ITIMER_REAL)
        assert 30 < delay <= 50
        assert interval == 7
        with time_limit(60):  # the program's own timer is due earlier
            assert signal.getsignal(signal.SIGALRM) is own
        assert not rung
    finally:
        signal.setitimer(signal.ITIMER_REAL, *previous)
        signal.signal(signal.SIGALRM, before)


def test_in_another_thread_a_call_ends_and_is_then_found_too_long():
    found = []

    def run():
        try:
            with time_limit(0.05):
                time.sleep(0.2)
        except TimeLimitError as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert len(found) == 1
