"""Blocks that are read from a peer's memory through NIXL, and what is said where they cannot be."""

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from crews import Crew, Nursery, RedisProcess, ends_alike, played_alone
from networks import PATIENCE_S, Sockets, as_on_other_hosts

from agent.errors import WireError
from agent.transport.remote import ROOMS, SPARE_ROOMS, Reach, Remote, Room
from agent.transport.segment import SLOT_BYTES, START
from agent.transport.tcp import Tcp
from agent.transport.transport import Slot, Ticket

SIZE = 1 << 20

# Plays a nursery whose workers read no files of each other, and count what they read through NIXL. They send nothing
# before it can be read, as a job of some steps would be over.
APART = """
import pathlib, runpy, sys, time
from agent.transport import remote, tcp
def of_another_host(said):
    raise OSError("of another host")
def counted(*given):
    remote.reads.append(1)
    take(*given)
def late(self, peer, *given, **more):
    while peer in self._wanted and not self._peer(peer).reads:
        time.sleep(0.01)
    return push(self, peer, *given, **more)
remote.reads, take, push = [], remote.Remote.take, tcp.Tcp.push
tcp.Tcp.push, tcp.Theirs, remote.Remote.take = late, of_another_host, counted
sys.argv = sys.argv[2:]
sys.path.insert(0, str(pathlib.Path(sys.argv[0]).parent))
runpy.run_path(sys.argv[0], run_name="__main__")
"""

TOY = """
import sys
import torch
from agent.transport import remote
from orchestrator import Session

torch.manual_seed(0)
model = torch.nn.Linear(256, 256)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = Session(model, optimizer, microbatches=4)
for step in session.steps(12):
    data = torch.randn(4, 8, 256, generator=torch.Generator().manual_seed(step))
    session.backward(lambda x: model(x).square().mean(), list(data))
    optimizer.step()
    optimizer.zero_grad()
if getattr(remote, "reads", []):
    print("reads:", len(remote.reads))
if session.leader:
    torch.save(model.state_dict(), sys.argv[1])
"""


class Pair(Sockets):
    """Two workers, of which the first sends to the second."""

    a: Tcp
    b: Tcp

    def meet(self) -> None:
        self.a.meet("b", self.b.offer())
        self.b.meet("a", self.a.offer())

    def reads(self) -> bool:
        return "b" in self.a._peers and self.a._peers["b"].reads

    def sent(self, step: int, data: bytes) -> tuple[Ticket, Ticket, memoryview]:
        into = memoryview(bytearray(len(data)))
        landed = self.b.land("a", Slot(0, step, "part", 0), into)
        return landed, self.a.push("b", Slot(0, step, "part", 0), [memoryview(data)]), into

    def over(self, *tickets: Ticket) -> None:
        self.until(lambda: all(each.done for each in tickets))


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bool, bool], Pair]]:
    """Make a pair, of which each or not is for NIXL."""
    as_on_other_hosts(monkeypatch)
    made: list[Pair] = []

    def make(first: bool, second: bool) -> Pair:
        pair = Pair(shares=True)
        made.append(pair)
        pair.a, pair.b = pair.make("a"), pair.make("b")
        for tcp, reaches in ((pair.a, first), (pair.b, second)):
            if reaches:
                tcp.reach()
        pair.meet()
        return pair

    yield make
    for each in made:
        each.close()


def test_blocks_between_hosts_cross_no_socket(pair: Callable[[bool, bool], Pair]) -> None:
    net = pair(True, True)
    net.until(net.reads)
    assert isinstance(net.b._peers["a"].segment, Remote)
    before = net._moved()
    for step in range(40):  # more than there are slots
        data = bytes([step]) * (3 * SLOT_BYTES // 2)
        landed, pushed, into = net.sent(step, data)
        net.over(landed, pushed)
        assert into == data
    assert net._moved() - before < SIZE


def test_who_has_given_up_every_room_goes_on_over_sockets(
    pair: Callable[[bool, bool], Pair], caplog: pytest.LogCaptureFixture
) -> None:
    """The network may still write to a room whose peer was lost amid a read, so it is used no more."""
    net = pair(True, True)
    net.until(net.reads)
    reach = net.b._reach
    assert reach is not None
    for _ in range(ROOMS + SPARE_ROOMS):  # as reads that are given up do
        reach._take_room(lambda: False)
        reach._replace()
    assert "many reads through NIXL were given up" in caplog.text
    with pytest.raises(WireError, match="every room to read into was given up"):
        reach._take_room(lambda: False)
    assert net.a._segment is not None
    with pytest.raises(OSError, match="the rooms that are left"):
        reach.theirs(net.a._segment.said, lambda: False)


def test_the_late_end_of_a_meeting_takes_nothing_from_the_next_one(
    pair: Callable[[bool, bool], Pair],
) -> None:
    """Both are with the same process, which has one name for NIXL."""
    net = pair(True, True)
    net.until(net.reads)
    before = net.b._peers["a"].segment
    assert before is not None
    assert net.a._segment is not None
    assert net.b._reach is not None
    now = net.b._reach.theirs(net.a._segment.said, lambda: False)
    before.close()
    there = net.a._segment.put("b", [memoryview(b"ours")], "a block")
    assert there is not None
    into = memoryview(bytearray(4))
    now.take(there, into, lambda: False)
    assert into == b"ours"


@pytest.mark.parametrize("reaching", [(True, False), (False, True)])
def test_one_of_two_that_has_it_goes_over_sockets(
    pair: Callable[[bool, bool], Pair], reaching: tuple[bool, bool]
) -> None:
    net = pair(*reaching)
    landed, pushed, into = net.sent(0, b"x" * SIZE)
    net.over(landed, pushed)
    assert into == b"x" * SIZE
    assert not net.reads()


def test_a_peer_whose_first_bytes_do_not_come_is_reached_over_sockets(
    pair: Callable[[bool, bool], Pair],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As where a firewall lets our own connections pass, and none of UCX."""

    def never(_: Reach, _name: bytes, _address: int, _room: Room, gone: Callable[[], bool]) -> None:
        while not gone():
            time.sleep(0.01)
        raise WireError("the peer is gone")

    monkeypatch.setattr(Reach, "_transfer", never)
    monkeypatch.setattr("agent.transport.remote.MEET_S", 0.05)
    net = pair(True, True)
    for one, other in ((net.a, "b"), (net.b, "a")):
        net.until(lambda one=one, other=other: other in one._peers and not one._peers[other].tries)
    assert (
        "blocks from a come over sockets: NIXL does not reach it (the peer is gone)" in caplog.text
    )
    landed, pushed, into = net.sent(0, b"x" * SIZE)
    net.over(landed, pushed)
    assert into == b"x" * SIZE
    assert not net.reads()


def test_who_closes_waits_until_its_peers_have_made_their_connections(
    pair: Callable[[bool, bool], Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """UCX ends a process whose peer is gone amid that."""
    begun, comes, closed = threading.Event(), threading.Event(), threading.Event()
    transfer = Reach._transfer

    def late(self: Reach, *given: Any) -> None:
        if threading.current_thread().name == "reach-a":
            begun.set()
            assert comes.wait(PATIENCE_S)
        transfer(self, *given)

    monkeypatch.setattr(Reach, "_transfer", late)
    monkeypatch.setattr("agent.transport.tcp.SETTLE_S", PATIENCE_S)
    net = pair(True, True)
    net.until(lambda: begun.is_set() and "b" in net.a._peers)
    closing = threading.Thread(target=lambda: (net.a.close(), closed.set()))
    closing.start()
    net.still()
    assert not closed.is_set()
    comes.set()
    closing.join()
    assert net.broken["a"] == []


def test_bytes_that_are_not_its_owners_are_not_taken(
    pair: Callable[[bool, bool], Pair], caplog: pytest.LogCaptureFixture
) -> None:
    """Somebody else on the network has written where they lie, once the token was made."""
    net = pair(True, True)
    net.until(net.reads)
    pushed = net.a.push("b", Slot(0, 0, "part", 0), [memoryview(b"x" * SIZE)])
    net.until(lambda: pushed.done)  # the token is sent, and the block has no place yet
    assert net.a._segment is not None
    (loan,) = net.a._segment._lent.values()
    net.a._segment._bytes[START + loan.there.slot * SLOT_BYTES] ^= 1
    into = memoryview(bytearray(SIZE))
    landed = net.b.land("a", Slot(0, 0, "part", 0), into)
    net.until(lambda: landed.failed)
    assert into == bytes(SIZE)
    assert net.broken["b"] == ["a"]
    assert "what was read from its memory has another tag" in caplog.text


def test_without_the_package_one_sentence_says_that_sockets_are_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("agent.transport.remote.PACKAGES", ("nixl_of_nobody",))
    net = Pair(shares=True)
    net.a, net.b = net.make("a"), net.make("b")
    with caplog.at_level(logging.WARNING):
        net.a.reach()
    (said,) = caplog.messages
    assert said == (
        "NIXL does not start (none of the packages nixl_of_nobody is here): blocks go over sockets"
    )
    net.meet()
    landed, pushed, into = net.sent(0, b"x" * SIZE)
    net.over(landed, pushed)
    assert into == b"x" * SIZE
    net.close()


@pytest.mark.processes
def test_a_job_whose_blocks_go_that_way_ends_with_the_same_bits(
    redis_process: RedisProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of its workers is killed, and another one takes its place."""
    as_on_other_hosts(monkeypatch)
    script = tmp_path / "train.py"
    script.write_text(TOY)
    (tmp_path / "disk").mkdir()
    nursery = Nursery(tmp_path / "disk", (sys.executable, "-c", APART))
    crew = Crew(redis_process, nursery, tmp_path)
    try:
        alone = played_alone(script, tmp_path / "alone" / "out.pt")
        crew.settle = 2
        crew.open(TOY, str(tmp_path / "out.pt"), transport="nixl")
        _, second = crew.start(2)
        crew.reach(4)
        crew.kill(second)
        crew.start(1)
        ends_alike(crew, alone, 12, besides=("reads: ",))
        assert any(line.startswith("reads: ") for line in crew.printed())
    finally:
        crew.close()
        nursery.close()
