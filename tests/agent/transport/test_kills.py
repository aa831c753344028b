"""A peer is killed or stopped in the middle of a transfer: what it takes part in fails, and all else goes on."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from crews import until
from networks import as_on_other_hosts

from agent.errors import WireError
from agent.net.wire import dial
from agent.protocol import Chunk, FlowHello, Freed, Lying
from agent.transport.segment import SLOT_BYTES, Own, Theirs
from agent.transport.tcp import Tcp
from agent.transport.transport import Slot, Ticket

PUSHING = Path(__file__).with_name("pushing_peer.py")
SIZE = 3 << 20
SEED = 20261127


class Receiver:
    """It takes block after block from each of its peers."""

    def __init__(self, kind: str = "sockets") -> None:
        self.changed, self.broken = threading.Condition(), list[str]()
        self.tcp = Tcp("z", "a secret", self.changed, self.broken.append, host="127.0.0.1")
        self.tcp.shares, self.kind = kind != "sockets", kind
        if kind == "nixl":
            self.tcp.reach()
        self.rooms: dict[str, memoryview] = {}
        self.tickets: dict[str, Ticket] = {}
        self.steps: dict[str, int] = {}

    def start(self, name: str) -> subprocess.Popen[bytes]:
        words = [sys.executable, str(PUSHING), name, "z", self.tcp.address, self.kind]
        process = subprocess.Popen(words)
        self.tcp.meet(name, b"")
        self.rooms[name], self.steps[name] = memoryview(bytearray(SIZE)), -1
        self.expect(name)
        return process

    def expect(self, name: str) -> None:
        self.steps[name] += 1
        slot = Slot(0, self.steps[name], "block", 0)
        self.tickets[name] = self.tcp.land(name, slot, self.rooms[name])

    def go_on(self, name: str, steps: int) -> None:
        """Take so many more blocks, whole ones."""
        until = self.steps[name] + steps
        while self.steps[name] < until:
            with self.changed:
                assert self.changed.wait_for(lambda: self.tickets[name].done, 60), "it hangs"
            assert bytes(self.rooms[name]) == b"x" * SIZE
            self.rooms[name][:] = bytes(SIZE)
            self.expect(name)

    def take_what_came(self, name: str, *, then_more: bool) -> None:
        """Wait for the block in flight; of one that is dead, take all until it is lost."""
        while True:
            ticket = self.tickets[name]
            until("a block", lambda t=ticket: t.failed or t.done or name in self.broken)
            if not ticket.done or not then_more:
                return
            self.expect(name)


@pytest.fixture(params=["sockets", "shared memory", "nixl"])
def receiver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    if request.param == "nixl":
        as_on_other_hosts(monkeypatch)
    made = Receiver(request.param)
    yield made
    made.tcp.close()


@pytest.mark.processes
def test_who_is_killed_or_stopped_harms_nobody_else(receiver: Receiver) -> None:
    """Each dies at a random moment of its transfers; one that is stopped fails when it is forgotten."""
    chance = random.Random(SEED)
    kept = receiver.start("kept")
    victims = {f"v{number}": receiver.start(f"v{number}") for number in range(6)}
    try:
        receiver.go_on("kept", 3)
        for number, (name, process) in enumerate(victims.items()):
            receiver.go_on(name, 1 + chance.randrange(3))
            time.sleep(chance.random() / 200)  # anywhere in a block
            stopped = number % 3 == 2
            process.send_signal(signal.SIGSTOP if stopped else signal.SIGKILL)
            if stopped:
                receiver.go_on("kept", 2)
                receiver.tcp.forget(name)
            receiver.take_what_came(name, then_more=not stopped)
            receiver.go_on("kept", 2)
        dead = [f"v{number}" for number in range(6) if number % 3 != 2]
        until("the complaints", lambda: sorted(receiver.broken) == dead)
    finally:
        for process in (kept, *victims.values()):
            process.kill()
            process.wait()


def test_nobody_but_its_owner_can_write_a_segment() -> None:
    """A token says where bytes lie, and they have no tag: so nobody else may be able to change them."""
    own = Own(slots=2, slot_bytes=1 << 16)
    there = own.put("b", [memoryview(b"ours")], "a block")
    assert there is not None
    path = Path(f"/proc/{os.getpid()}/fd/{own.said.file}")
    with path.open("r+b", buffering=0) as file:
        with pytest.raises(PermissionError):
            file.write(b"theirs")
        with pytest.raises(PermissionError):
            os.truncate(path, 0)
    into = memoryview(bytearray(4))
    Theirs(own.said).take(there, into)
    assert into == b"ours"
    own.close()


def test_who_was_given_up_may_still_read() -> None:
    """It is late with its copy, so its slot holds no other block by then; a spare one does."""
    own = Own(slots=1, slot_bytes=1 << 16, spares=1)
    theirs = Theirs(own.said)
    for data in (b"ours", b"more"):
        there = own.put("b", [memoryview(data)], data)
        assert there is not None
        assert own.put("c", [memoryview(b"none")], "another") is None  # no slot is free
        own.give_up("c")  # it reads nothing
        own.give_up("b")
        after = own.put("c", [memoryview(b"late")], "another")
        assert (after is not None) == (data == b"ours")  # there was one spare slot
        into = memoryview(bytearray(4))
        theirs.take(there, into)
        assert into == data
        if after is not None:
            own.free("c", after)
    own.close()


def test_what_goes_to_several_peers_lies_there_once() -> None:
    own = Own(slots=1, slot_bytes=1 << 16)
    first, second = (own.put(peer, [memoryview(b"sum")], "a block") for peer in "bc")
    assert first is not None
    assert first == second
    own.free("b", first)
    assert own.put("b", [memoryview(b"new")], "another") is None
    own.free("c", first)
    own.free("c", first)  # once too often
    assert own.put("b", [memoryview(b"new")], "another") is not None
    own.close()


def test_a_segment_out_of_reach_is_not_read() -> None:
    """Of another host's process, there is none of that number here, or it has another file."""
    own = Own(slots=1, slot_bytes=1 << 16)
    reads = [
        type(own.said)(
            **{name: getattr(own.said, name) for name in own.said.__struct_fields__} | changed
        )
        for changed in ({"nonce": b"x" * 32}, {"process": 1 << 30}, {"file": 0}, {"slots": 2})
    ]
    for said in reads:
        with pytest.raises(OSError):
            Theirs(said)
    Theirs(own.said)
    own.close()


def test_a_pipe_that_has_the_number_of_a_segment_is_not_opened(tmp_path: Path) -> None:
    """A peer of a different host has numbers that mean anything here; nobody writes to this pipe."""
    own, pipe = Own(slots=1, slot_bytes=1 << 16), tmp_path / "pipe"
    os.mkfifo(pipe)
    file, failed = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK), threading.Event()

    def read() -> None:
        try:
            Theirs(msgspec.structs.replace(own.said, file=file))
        except OSError:
            failed.set()

    reading = threading.Thread(target=read, daemon=True)
    reading.start()
    assert failed.wait(20)
    os.close(file)
    own.close()


def test_a_token_of_more_than_a_slot_ends_its_connection() -> None:
    """Its size is what the receiver makes room for, even if the block is not wanted any more."""
    receiver = Receiver()
    receiver.tcp.enter(1)
    hello = FlowHello(worker="a", serial=1, flow=0)
    connection = dial(receiver.tcp.address, "a secret", hello, to="z")
    try:
        for count in (SLOT_BYTES, SLOT_BYTES + 1):
            there = Lying(0, 1, count)
            connection.send(
                Chunk(generation=0, step=0, kind="part", block=0, offset=0, size=count, there=there)
            )
        connection.patience(20)
        assert connection.receive()[0] == Freed(there=Lying(0, 1, SLOT_BYTES))
        with pytest.raises(WireError):
            connection.receive()
    finally:
        connection.close()
        receiver.tcp.close()
