"""A worker's link to the keeper: what it does when something arrives that cannot be taken in."""

import threading

import pytest
from entrances import Entrance

from agent.errors import WireError
from agent.net.link import Link
from agent.net.wire import Connection
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

    with Entrance() as entrance:
        hello = PeerHello(worker="w1", serial=1)
        link = Link(entrance.address, "ours", lambda: hello, stumble, end)
        link.start()
        keeper, _ = entrance.let_in()
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
