import threading
import time

import pytest

from geomon.monitor.worker import Worker


def names():
    return [thread.name for thread in threading.enumerate()]


def test_tasks_are_done_in_order_in_one_thread_that_ends():
    worker, done = Worker(name="under test"), []
    assert "under test" not in names()
    for number in range(20):
        worker.give(lambda number=number: done.append((number, threading.get_ident())))
    worker.close()
    worker.close()
    assert [number for number, _ in done] == list(range(20))
    assert len({ident for _, ident in done}) == 1
    assert done[0][1] != threading.get_ident()
    assert "under test" not in names()


def test_who_gives_waits_while_the_queue_is_full():
    worker, go, given = Worker(waiting=1), threading.Event(), []

    def give():
        for number in range(3):
            worker.give(go.wait)
            given.append(number)

    giver = threading.Thread(target=give)
    giver.start()
    giver.join(0.3)
    assert len(given) == 2  # one is being done, one waits, the third has no room
    go.set()
    giver.join(5)
    worker.close()
    assert given == [0, 1, 2]


@pytest.mark.parametrize("failure", [ValueError("broken"), KeyboardInterrupt()])
def test_what_a_task_raises_is_raised_where_tasks_are_given(failure):
    worker, done = Worker(), []

    def fail():
        raise failure

    def give_until_it_raises():
        for _ in range(100):
            time.sleep(0.01)
            worker.give(lambda: done.append(1))

    worker.give(fail)
    with pytest.raises(type(failure)):
        give_until_it_raises()
    worker.give(lambda: done.append(2))  # said once, then it goes on
    worker.close()
    assert done[-1] == 2


def test_closing_raises_what_the_last_task_raised():
    worker = Worker()
    worker.give(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        worker.close()
    worker.close()
