"""A process that is killed at any moment stops none of those that it had something in common with."""

import contextlib
import multiprocessing
import os
import pickle
import queue
import signal
from collections.abc import Callable, Iterator
from multiprocessing.context import BaseContext

import pytest

from agent.data.unlocked import Context, Flag, Mailbox

FORK = multiprocessing.get_context("fork")
LONG = bytes(range(256)) * 1024  # four pieces


@contextlib.contextmanager
def process(body: Callable[[], None], context: BaseContext = FORK) -> Iterator[int]:
    """Run a body in another process, which is killed if it still runs."""
    child = context.Process(target=body, daemon=True)  # type: ignore[attr-defined]
    child.start()
    assert child.pid is not None
    try:
        yield child.pid
    finally:
        if child.is_alive():
            os.kill(child.pid, signal.SIGKILL)
        child.join()


def test_a_process_that_is_killed_while_it_looks_leaves_the_flag():
    flag, looks = Flag(), FORK.Semaphore(0)

    def look() -> None:
        looks.release()
        while not flag.is_set():
            pass

    for _ in range(20):
        with process(look):
            looks.acquire()
    assert not flag.is_set()
    flag.set()
    assert flag.is_set()


def test_a_process_that_is_killed_amid_a_message_takes_that_message_alone():
    """The messages are longer than what the system keeps, so the sender stands in one of them."""
    mailbox = Mailbox()

    def send(number: int, count: int, size: int) -> None:
        for i in range(count):
            mailbox.put((number, i, LONG * size))
        signal.pause()

    with process(lambda: send(0, 9, 20)):
        assert mailbox.get() == (0, 0, LONG * 20)
    with process(lambda: send(1, 3, 1)):
        got: list[tuple[int, int, bytes]] = []
        while len([1 for each in got if each[0] == 1]) < 3:
            got.append(mailbox.get())
    assert [each for each in got if each[0] == 1] == [(1, i, LONG) for i in range(3)]
    assert all(each[2] == LONG * 20 for each in got if each[0] == 0)
    with pytest.raises(queue.Empty):
        mailbox.get(0.01)


def test_a_reader_hears_at_once_that_a_sender_is_gone():
    """What it has sent before comes first."""
    context = Context("fork")
    mailbox = context.Queue()

    def send() -> None:
        mailbox.put(1)
        signal.pause()

    with process(send, context) as pid:
        assert mailbox.get() == 1
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(queue.Empty):
            mailbox.get()  # for as long as it takes


def test_messages_of_two_at_once_come_each_in_its_order():
    mailbox = Mailbox()

    def send(number: int) -> None:
        for i in range(50):
            mailbox.put((number, i, LONG))
        signal.pause()

    with process(lambda: send(1)), process(lambda: send(2)):
        got = [mailbox.get() for _ in range(100)]
    assert all(each[2] == LONG for each in got)
    for number in (1, 2):
        assert [i for sender, i, _ in got if sender == number] == list(range(50))


def test_what_cannot_be_sent_raises_at_once():
    mailbox = Mailbox()
    with pytest.raises((AttributeError, pickle.PicklingError), match="local object"):
        mailbox.put(lambda: 0)
    mailbox.put(1)
    assert mailbox.get() == 1


def test_a_reader_that_waits_is_told_of_the_end():
    mailbox, waits = Mailbox(), FORK.Semaphore(0)

    def wait() -> None:
        waits.release()
        with contextlib.suppress(EOFError):
            mailbox.get()
            os._exit(1)

    child = FORK.Process(target=wait, daemon=True)
    child.start()
    waits.acquire()
    mailbox.close()
    child.join()
    assert child.exitcode == 0
