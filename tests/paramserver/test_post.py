"""Messages between processes: one that reads nothing holds up nobody else."""

import socket
import threading

import numpy as np
import pytest

from agent.net.front import Front
from agent.net.handshake import Door
from agent.paramserver.live.post import SLOTS, Letters, Post, Reading
from agent.paramserver.messages import Beat, Committed, Push, Section, Staged
from agent.transport.segment import SLOT_BYTES

SECRET = "secret"
WAIT_S = 10.0


def test_a_process_that_reads_nothing_does_not_hold_up_messages_to_others():
    mine, theirs, over = Post("mine", SECRET), Post("theirs", SECRET), threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))
    still = f"127.0.0.1:{listener.getsockname()[1]}"

    def hold(connection, hello):
        over.wait()
        connection.close()

    front = Front(listener, Door("still", lambda _: SECRET), hold)
    mine.book |= {"theirs": theirs.address, "still": still}
    rows = Section("rows", np.zeros(1, np.int64), np.zeros((1, 1 << 23)))

    def say():
        mine.send("still", Push(partition=0, clock=0, sections=[rows]))
        mine.send("theirs", Beat())
        mine.flush()

    sender = threading.Thread(target=say, daemon=True)
    sender.start()
    try:
        assert theirs.take(WAIT_S) == ("mine", Beat())
        mine.drop("still")
        assert "still" not in mine.book
    finally:
        over.set()
        mine.close()
        theirs.close()
        front.close()


@pytest.mark.parametrize("count", [1 << 10, 1 << 18])
def test_rows_arrive_as_they_were_said_in_the_order_of_what_was_said(count):
    """Few rows travel with what is said, many as a block; what comes after them stays after them."""
    mine, theirs = Post("mine", SECRET), Post("theirs", SECRET)
    mine.book["theirs"] = theirs.address
    try:
        for clock in range(3):
            rows = Section("rows", np.arange(count), np.full((count, 1), float(clock)))
            mine.send("theirs", Push(partition=0, clock=clock, sections=[rows]))
            mine.send("theirs", Committed(clock=clock))
            mine.flush()
        for clock in range(3):
            _, push = theirs.take(WAIT_S)
            assert push.clock == clock
            assert np.array_equal(push.sections[0].keys, np.arange(count))
            assert (push.sections[0].values == clock).all()
            assert theirs.take(WAIT_S) == ("mine", Committed(clock=clock))
    finally:
        mine.close()
        theirs.close()


def test_a_connection_that_is_cut_between_two_that_live_is_told_once_on_both_sides():
    """Nothing is sent between them any more, as what was on its way is lost."""
    mine, theirs = Post("mine", SECRET), Post("theirs", SECRET)
    mine.book["theirs"], theirs.book["mine"] = theirs.address, mine.address
    try:
        for one, other in ((mine, theirs), (theirs, mine)):
            one.send(other.name, Beat())
            one.flush()
            assert other.take(WAIT_S) == (one.name, Beat())
        mine._out["theirs"]._connection._sock.shutdown(socket.SHUT_RDWR)
        assert theirs.take(WAIT_S) == ("mine", None)
        assert mine.take(WAIT_S) == ("theirs", None)
        mine.send("theirs", Beat())
        mine.flush()
        assert not mine._out
        assert theirs.inbox.empty()
        assert mine.inbox.empty()
    finally:
        mine.close()
        theirs.close()


def test_rows_for_a_process_of_this_host_are_read_where_they_lie_until_nobody_uses_them():
    """Many more than there is room for pass by, as memory is used again once it was freed."""
    mine, theirs = Post("mine", SECRET), Post("theirs", SECRET)
    mine.book["theirs"], theirs.book["mine"] = theirs.address, mine.address
    count, rounds = (SLOTS * SLOT_BYTES) // 8 // 16, 40
    try:
        for clock in range(rounds):
            rows = Section("rows", np.arange(1), np.full((1, count), float(clock)))
            mine.send("theirs", Push(partition=0, clock=clock, sections=[rows]))
            mine.flush()
            _, push = theirs.take(WAIT_S)
            assert (push.sections[0].values == clock).all()
            held = not push.sections[0].values.flags.writeable
            del push
            theirs.send("mine", Beat())
            theirs.flush()
            assert mine.take(WAIT_S) == ("theirs", Beat())
            assert held == (clock > 0)  # with the first, it is not known yet that it can be read
            assert mine._own._lent == {}  # all of it is free again, before anything else comes
    finally:
        mine.close()
        theirs.close()


def test_commits_that_nothing_goes_with_are_said_now_and_then_by_the_newest():
    """A worker without a partition hears nothing else from the controller while all are busy."""
    mine, theirs = Post("mine", SECRET), Post("theirs", SECRET)
    mine.book["theirs"] = theirs.address
    try:
        for clock in range(1000):
            mine.send("theirs", Committed(clock=clock))
            mine.flush()
        mine.send("theirs", Beat())
        mine.flush()
        heard = []
        while (came := theirs.take(WAIT_S)) != ("mine", Beat()):
            assert came is not None
            heard.append(came[1].clock)
        assert heard[-1] == 999
        assert heard == sorted(heard)
        assert 10 < len(heard) < 20
    finally:
        mine.close()
        theirs.close()


def test_a_receipt_in_no_hurry_goes_with_what_is_said_next():
    letters, frames = Letters("mine"), []
    letters.routes["theirs"] = lambda part, pieces: frames.append((part, pieces))
    letters.send("theirs", Staged(partition=0, batch="a", waits=True))
    letters.send("theirs", Committed(clock=0))
    letters.flush()
    assert frames == []
    letters.send("theirs", Staged(partition=0, batch="b", waits=True))
    letters.send("theirs", Committed(clock=1))
    letters.send("theirs", Beat())
    letters.flush()
    ((part, _),) = frames
    theirs = Letters("theirs")
    theirs.open("mine", Reading(), part, memoryview(b""))
    said = [theirs.inbox.get_nowait()[1] for _ in range(theirs.inbox.qsize())]
    assert [getattr(one, "batch", None) for one in said] == ["a", None, "b", None]
    assert said[1:] == [Committed(clock=1), said[2], Beat()]
