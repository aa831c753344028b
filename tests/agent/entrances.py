"""A front on a real socket, those who come through it, and strangers who do not."""

import contextlib
import queue
import socket
from collections.abc import Iterator
from types import TracebackType

from agent.net.front import Front
from agent.net.handshake import KEEPER, Door
from agent.net.wire import Connection, parse_address
from agent.protocol import AnyMessage


class Entrance:
    """A front that lets in who knows the secret, unless it refuses all."""

    def __init__(self, secret: str = "ours", refusal: str = "", name: str = KEEPER) -> None:
        self.came = queue.Queue[tuple[Connection, AnyMessage]]()
        listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.address = f"127.0.0.1:{listener.getsockname()[1]}"
        door = Door(name, lambda _: secret, lambda _: refusal)
        self.front = Front(listener, door, lambda *caller: self.came.put(caller))

    def let_in(self, patience_s: float = 30.0) -> tuple[Connection, AnyMessage]:
        return self.came.get(timeout=patience_s)

    @property
    def waiting(self) -> int:
        return len(self.front._waiting)

    def __enter__(self) -> "Entrance":
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.front.close()
        while not self.came.empty():
            self.came.get()[0].close()


def stranger(address: str) -> socket.socket:
    return socket.create_connection(parse_address(address), timeout=30.0)


def is_open(sock: socket.socket) -> bool:
    """Whether the other side has hung up, once what it sent before is read."""
    sock.setblocking(False)
    try:
        while data := sock.recv(1 << 16):
            assert data
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


@contextlib.contextmanager
def crowd(address: str, count: int, source: str = "127.0.0.1") -> Iterator[list[socket.socket]]:
    """So many connections on which nothing is said."""
    host, port = parse_address(address)
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(socket.create_connection((host, port), 30.0, (source, 0)))
            for _ in range(count)
        ]
