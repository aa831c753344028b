"""A link may be slow, or fall silent: only silence counts as a break."""

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest
from networks import CHUNK, Sockets

from agent.transport.transport import Slot

PIECE, PAUSE_S = CHUNK // 32, 0.05


class SlowLink:
    """It passes on what the dialling side sends in small pieces, and the answers at once."""

    def __init__(self, target: str) -> None:
        host, port = target.rsplit(":", 1)
        self._target = host, int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.silent, self._over = threading.Event(), threading.Event()
        self._ends: list[socket.socket] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, far = self._listener.accept()[0], socket.create_connection(self._target)
                self._ends += [near, far]
                for each in ((near, far, PAUSE_S), (far, near, 0.0)):
                    threading.Thread(target=self._pass_on, args=each, daemon=True).start()

    def _pass_on(self, from_: socket.socket, to: socket.socket, pause_s: float) -> None:
        with contextlib.suppress(OSError):
            while data := from_.recv(PIECE):
                if pause_s and self.silent.is_set():
                    self._over.wait()
                self._over.wait(pause_s)
                to.sendall(data)
        self._shut([from_, to])

    def _shut(self, ends: list[socket.socket]) -> None:
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def close(self) -> None:
        self._over.set()
        self._shut([self._listener, *self._ends])


@pytest.fixture
def net() -> Iterator[Sockets]:
    network = Sockets(flows=1)
    yield network
    network.close()


@pytest.mark.parametrize("silent", [False, True], ids=["slow", "silent"])
def test_a_new_generation_breaks_silent_links_and_no_slow_ones(net: Sockets, silent: bool) -> None:
    """The rest of a chunk comes in 1.6 s here; the receiver goes over in the middle of it."""
    a, b = net.make("a"), net.make("b")
    link = SlowLink(b.offer().decode())
    try:
        a.meet("b", link.address.encode())
        b.meet("a", a.offer())
        into = memoryview(bytearray(CHUNK))
        landed = b.land("a", Slot(0, 0, "part", 0), into)
        a.push("b", Slot(0, 0, "part", 0), [memoryview(b"x" * CHUNK)])
        net.until(lambda: any(into))
        if silent:
            link.silent.set()
        b.enter(1)
        assert landed.failed
        assert net.broken["b"] == (["a"] if silent else [])
        if not silent:
            newer = b.land("a", Slot(1, 0, "part", 0), memoryview(bytearray(10)))
            a.push("b", Slot(1, 0, "part", 0), [memoryview(bytes(10))])
            net.until(lambda: newer.done)
    finally:
        link.close()
