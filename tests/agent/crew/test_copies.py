"""What a worker has in host memory, on its way to a keeper that has asked for it."""

import socket
import threading

import pytest

from agent.crew import copies as copies_module
from agent.crew.copies import Copies
from agent.layout import Layout, Replica
from agent.net.wire import Connection
from agent.protocol import CopiedSum, CopiesSent, Part
from agent.store.shares import Share

STEPS = 3


class Neighbour:
    """Has the same as we."""

    def __init__(self) -> None:
        self.sent: list[tuple[bytes, memoryview]] = []

    def send(self, peer: str, part: Part, pieces: list[memoryview]) -> None:
        self.sent.append((part.extra, pieces[0]))

    def take(self, peer: str, step: int, tag: str, generation: int) -> tuple[bytes, memoryview]:
        return self.sent[-1]


class Line:
    """A link, as far as it is asked which connection is its own just now."""

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            near = socket.create_connection(server.getsockname())
            far, _ = server.accept()
        self.connection, self.keeper = Connection(near), Connection(far)


def test_copies_go_to_the_keeper_that_has_asked_and_to_no_other() -> None:
    """It dies in the middle of them. The next one would take their end for all that there is, and go back to an older state."""
    replica = Replica(workers=("w1", "w2"), first=0, count=1)
    layout = Layout(generation=1, microbatches=1, replicas=(replica,))
    copies = Copies(Neighbour(), "w1", threading.Condition())
    body = memoryview(bytes(1 << 24))  # more than the system takes at once
    for step in range(STEPS):
        copies.exchange(layout, step, b"", body.nbytes, [(0, [body])])
    line = Line()
    before = set(threading.enumerate())
    copies.send_all(line)
    (sending,) = set(threading.enumerate()) - before
    assert isinstance(line.keeper.receive()[0], CopiedSum)
    dying = line.connection, line.keeper
    line.renew()
    for each in dying:
        each.close()
    sending.join(60)
    copies.send_all(line)
    came = [line.keeper.receive()[0] for _ in range(2 * STEPS + 1)]
    assert [type(each) for each in came] == [CopiedSum] * (2 * STEPS) + [CopiesSent]
    line.keeper.close()
    line.connection.close()


def test_sums_are_not_copied_without_end_while_no_state_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What comes behind the gap leads on from nothing; with the next state there is room again."""
    monkeypatch.setattr(copies_module, "SUMS_BYTES_FREE", 1000)
    replica = Replica(workers=("w1", "w2"), first=0, count=1)
    layout = Layout(generation=1, microbatches=1, replicas=(replica,))
    copies = Copies(Neighbour(), "w1", threading.Condition())
    body = memoryview(bytes(200))  # of ours, and as many of our neighbour's

    def kept() -> list[int]:
        return sorted({step for step, _, _ in copies._sums})

    for step in range(5):
        copies.exchange(layout, step, b"", body.nbytes, [(0, [body])])
    assert kept() == [0, 1, 2]  # and of the last one only ours
    for _ in range(2):
        copies.heard(5)
    assert kept() == []
    copies.share(layout, 5, 1, Share(forms=(), extents=()), memoryview(bytes(1000)))
    for step in range(5, 16):
        copies.exchange(layout, step, b"", body.nbytes, [(0, [body])])
    assert kept() == [*range(5, 15)]
