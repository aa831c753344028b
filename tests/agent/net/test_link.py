"""A worker's link to the keeper: what it does when something arrives that cannot be taken in."""

import socket
import threading

import pytest

from agent.errors import WireError
from agent.net.link import Link
from agent.net.wire import Connection, accept
from agent.protocol import Commit, PeerHello


def test_who_cannot_take_in_what_it_hears_does_not_go_on_saying_that_it_is_well() -> None:
    """A fault in the receiving thread ends the link: a worker that beats and hears nothing would hang its job."""
    ended: list[str] = []
    over = threading.Event()

    def end(why: str) -> None:
        ended.append(why)
        over.set()

    def stumble(*_: object) -> None:
        raise KeyError("nobody thought of this")

    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        link = Link(address, "secret", lambda: PeerHello(worker="w1", serial=1), stumble, end)
        starting = threading.Thread(target=link.start)
        starting.start()
        keeper, _ = accept(server.accept()[0], lambda _: "secret")
        starting.join()
        keeper.send(Commit(generation=1, version=1))
        assert over.wait(30.0)
        assert ended == ["KeyError: 'nobody thought of this'"]
        with pytest.raises(WireError):
            _read_to_the_end(keeper)
    keeper.close()


def _read_to_the_end(keeper: Connection) -> None:
    """Heartbeats that were sent before may still arrive."""
    for _ in range(1000):
        keeper.receive()
