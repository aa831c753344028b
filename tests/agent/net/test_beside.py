"""What is done beside a thread is done once and in order, and its failure is heard."""

import threading

import pytest

from agent.net.beside import Beside

PATIENCE_S = 20.0


def test_each_thing_is_done_once_and_in_order() -> None:
    done, beside = list[int](), Beside("test")
    for number in range(200):
        beside.do(lambda number=number: done.append(number))
    beside.settle()
    assert done == list(range(200))


def test_who_waits_does_what_is_left() -> None:
    """The thread is in the middle of one thing; when that is over, the one who waits does the next."""
    beside, begun, goes_on, by = Beside("test"), threading.Event(), threading.Event(), list[str]()

    def first() -> None:
        begun.set()
        assert goes_on.wait(PATIENCE_S)
        by.append(threading.current_thread().name)

    beside.do(first)
    assert begun.wait(PATIENCE_S)
    for _ in range(50):
        beside.do(lambda: by.append(threading.current_thread().name))
    goes_on.set()
    beside.settle()
    assert by[0] == "test"
    assert len(by) == 51


def test_a_failure_is_raised_where_it_is_waited_for() -> None:
    beside, done = Beside("test"), list[int]()
    beside.do(lambda: 1 // 0)
    beside.do(lambda: done.append(1))
    with pytest.raises(ZeroDivisionError):
        beside.settle()
    assert done == [1]
    beside.settle()


def test_a_failure_of_what_is_done_first_is_raised_too_and_things_are_still_done() -> None:
    begun, done = threading.Event(), threading.Event()

    def first() -> None:
        begun.wait(PATIENCE_S)
        raise ZeroDivisionError

    beside = Beside("test", first)
    beside.do(lambda: None)
    beside.settle()
    begun.set()
    beside.do(done.set)
    assert done.wait(PATIENCE_S)
    with pytest.raises(ZeroDivisionError):
        beside.settle()
