"""The networks that the scenes are played on: each kind of transport, with what drives it."""

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

import pytest

from agent.protocol import Segment
from agent.transport.tcp import Tcp
from agent.transport.transport import Transport
from agent.transport.virtual import Fabric, Virtual

PATIENCE_S = 60.0
CHUNK = 1 << 20


def of_another_host(said: Segment) -> NoReturn:
    raise OSError("of another host")


def as_on_other_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have workers of this host read no files of each other, and NIXL go by loopback."""
    pytest.importorskip("nixl_cu12", reason="needs NIXL: pip install nixl-cu12==1.5.1")
    monkeypatch.setattr("agent.transport.tcp.Theirs", of_another_host)
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")


class Network(Protocol):
    broken: dict[str, list[str]]

    def make(self, name: str) -> Transport: ...

    def until(self, look: Callable[[], Any]) -> None:
        """Go on until `look` finds something."""

    def still(self) -> None:
        """Go on until all has been done that can be done now."""

    def close(self) -> None: ...


class Sockets:
    """Real connections on loopback, between transports in one process."""

    def __init__(self, shares: bool = False, reaches: bool = False, **options: Any) -> None:
        self.broken: dict[str, list[str]] = defaultdict(list)
        self._shares, self._reaches = shares, reaches
        self._changed, self._made, self._options = threading.Condition(), list[Tcp](), options

    def make(self, name: str) -> Transport:
        made = Tcp(
            name,
            "a secret",
            self._changed,
            self.broken[name].append,
            host="127.0.0.1",
            **self._options,
        )
        made.shares = self._shares
        if self._reaches:
            made.reach()
        self._made.append(made)
        return made

    def until(self, look: Callable[[], Any]) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while not look():
            assert time.monotonic() < deadline_s, "waited in vain"
            with self._changed:
                self._changed.wait(0.01)

    def still(self) -> None:
        """Wait until no thread has moved a byte for a while; what is asserted then holds anyway."""
        seen, same = -1, 0
        while same < 5:
            moved = self._moved()
            seen, same = moved, same + 1 if moved == seen else 0
            time.sleep(0.01)

    def _moved(self) -> int:
        peers = [peer for each in self._made for peer in list(each._peers.values())]
        return sum(flow.connection.bytes_in for peer in peers for flow in list(peer.flows))

    def close(self) -> None:
        for each in self._made:
            each.close()


class Clockwork:
    """A virtual network."""

    def __init__(self, **options: Any) -> None:
        self.broken: dict[str, list[str]] = defaultdict(list)
        self.fabric = Fabric(**options)
        self._made: list[Virtual] = []

    def make(self, name: str) -> Transport:
        made = Virtual(self.fabric, name, self.broken[name].append)
        self._made.append(made)
        return made

    def until(self, look: Callable[[], Any]) -> None:
        while not look():
            assert self.fabric.go_on(), "nothing more will happen"

    def still(self) -> None:
        while self.fabric.go_on():
            pass

    def close(self) -> None:
        for each in self._made:
            each.close()


KINDS: dict[str, Callable[[], Network]] = {
    "tcp": Sockets,
    "tcp, one flow": lambda: Sockets(flows=1),
    "shared memory": lambda: Sockets(shares=True),
    "nixl": lambda: Sockets(shares=True, reaches=True),
    "virtual": Clockwork,
}
