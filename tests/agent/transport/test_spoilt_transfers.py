"""A flow is reset in the middle of a block, or a byte of it is flipped: its peer is broken, and all else goes on."""

import os
import socket
from collections.abc import Iterator

import pytest
from injection import Trap
from networks import CHUNK, KINDS, Network

from agent import faults
from agent.transport.transport import Slot

LONG = 96 * CHUNK  # longer than what sockets and segments hold


class Aimed(Trap):
    """It waits for the middle of a block of this kind, whoever else sends meanwhile."""

    before = 10  # of its chunks

    def spring(self, message: object, sock: socket.socket, pieces: list[memoryview]) -> None:
        if getattr(message, "kind", "") == "spoilt":
            self.before -= 1
            if self.before < 0:
                super().spring(message, sock, pieces)


@pytest.fixture(params=["tcp", "tcp, one flow", "shared memory"])
def net(request: pytest.FixtureRequest) -> Iterator[Network]:
    network = KINDS[request.param]()
    yield network
    network.close()


@pytest.mark.parametrize("kind", ["reset", "corrupt"])
def test_what_is_spoilt_on_its_way_is_not_taken_and_harms_nobody_else(
    net: Network, kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    a, b, c = (net.make(name) for name in "abc")
    for one, me in ((a, "a"), (b, "b"), (c, "c")):
        for other, peer in ((a, "a"), (b, "b"), (c, "c")):
            if me != peer:
                one.meet(peer, other.offer())
    data, kept = (memoryview(os.urandom(CHUNK) * (LONG // CHUNK)) for _ in range(2))
    into, beside = (memoryview(bytearray(LONG)) for _ in range(2))
    landed = b.land("a", Slot(0, 0, "spoilt", 0), into)
    other = b.land("c", Slot(0, 0, "kept", 0), beside)
    monkeypatch.setattr(faults, "trap", Aimed(kind))  # type: ignore[arg-type]
    a.push("b", Slot(0, 0, "spoilt", 0), [data])
    c.push("b", Slot(0, 0, "kept", 0), [kept])
    net.until(lambda: net.broken["a"] == ["b"] and net.broken["b"] == ["a"])
    assert faults.trap is None, "nothing was spoilt"
    assert landed.failed and not landed.done
    net.until(lambda: other.done)
    assert beside == kept
    assert net.broken["c"] == []
    said = [each.getMessage() for each in caplog.records if "is not taken" in each.getMessage()]
    assert len(said) == (kind == "corrupt")
    assert all(line.startswith("a block of a is not taken, because") for line in said)
    # Both may meet again, and nothing of what was under way comes after that.
    into[:] = bytes(LONG)
    a.forget("b")
    b.forget("a")  # both, or a late one would end what the other has dialled
    a.meet("b", b.offer())
    b.meet("a", a.offer())
    again = b.land("a", Slot(1, 0, "part", 0), into)
    a.push("b", Slot(1, 0, "part", 0), [data])
    net.until(lambda: again.done)
    assert into == data
