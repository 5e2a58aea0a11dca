import signal
import threading
import time

import pytest

from geomon.monitor.sinks import SinkThread, SinkTimeoutError


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "geomon sinks"]


@pytest.fixture
def calls():
    """Calls with a generous limit; no thread is left afterwards."""
    calls = SinkThread(30)
    yield calls
    calls.close()
    for thread in threads():
        thread.join(5)
    assert not threads()


def test_calls_are_made_in_order_by_one_thread_that_closing_ends(calls):
    called = []
    for number in range(3):
        calls.call(lambda number=number: called.append((number, threading.current_thread())))
    assert [number for number, _ in called] == [0, 1, 2]
    assert len({thread for _, thread in called}) == 1
    assert threading.current_thread() not in {thread for _, thread in called}
    calls.close()
    assert not threads()
    calls.call(lambda: called.append("again"))
    assert called[-1] == "again"


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), MemoryError()])
def test_where_no_thread_can_be_started_calls_are_made_here(calls, monkeypatch, error):
    def start(self):
        raise error

    monkeypatch.setattr(threading.Thread, "start", start)
    called = []
    calls.call(lambda: called.append(threading.current_thread()))
    assert called == [threading.current_thread()]


@pytest.mark.parametrize("error", [OSError("gone"), TimeoutError("of its own")])
def test_what_a_call_raises_is_raised_here(calls, error):
    def fails():
        raise error

    with pytest.raises(type(error), match=str(error)) as raised:
        calls.call(fails)
    assert raised.type is type(error)


def test_a_call_that_hangs_is_left_to_itself_and_the_next_is_made_by_another_thread():
    calls, over, called = SinkThread(0.1), threading.Event(), []
    with pytest.raises(SinkTimeoutError, match=r"more than 0\.1 s"):
        calls.call(lambda: over.wait(20))
    (hanging,) = threads()
    assert hanging.daemon  # a program may end meanwhile
    calls.call(lambda: called.append(threading.current_thread()))
    assert called[0] not in (hanging, threading.current_thread())
    over.set()
    hanging.join(5)
    calls.close()
    assert not threads()


def test_ctrl_c_is_not_held_up_by_a_call(calls):
    go_on, number = threading.Event(), threading.main_thread().ident
    threading.Timer(0.3, lambda: signal.pthread_kill(number, signal.SIGINT)).start()
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    began = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            calls.call(lambda: go_on.wait(60))
    finally:
        signal.signal(signal.SIGINT, handler)
    assert time.monotonic() - began < 25
    go_on.set()
