"""Connections from worker to worker over TCP, kept open over generations.

Every frame says to which generation and step it belongs. Frames of older generations are dropped,
those of newer ones are held until their time comes. The mesh itself never waits: what has arrived
is in `mailbox`, and `changed` is notified of every change. So one waiting place (in
`agent.worker.group`) sees frames, broken peers and messages from the keeper alike.
"""

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from itertools import count

from agent.errors import Refused, WireError
from agent.net.front import BACKLOG, Front
from agent.net.handshake import Door
from agent.net.wire import Connection, dial
from agent.protocol import AnyMessage, Part, PeerHello

log = logging.getLogger(__name__)

HELD_PARTS_MAX = 4096
DIAL_S = 8.0  # the time in which a dialled peer must answer
DIAL_WAIT_S = 0.05
LOOK_S = 0.5
ASK = "ask"  # tags of requests that are answered at once begin so
STATE = "state"  # the tag of a share of a whole state
HELP = "help"  # what workers say of help within a step begins so

Key = tuple[str, int, int, str]  # peer, generation, step, tag


class Mesh:
    """`changed` guards all of this object's state."""

    def __init__(
        self,
        worker: str,
        secret: str,
        host: str,
        changed: threading.Condition,
        broken: Callable[[str], None],
        asked: Callable[[str, Part], None] | None = None,
    ) -> None:
        """`asked` answers a peer's request, on a separate thread."""
        self._worker, self._secret = worker, secret
        self._changed, self._broken, self._asked = changed, broken, asked
        self.place: Callable[[Part, int], memoryview | None] = lambda *_: None
        # Takes over who comes for a purpose other than ours.
        self.others: Callable[[Connection, AnyMessage], None] = lambda caller, _: caller.close()
        # Takes note of what a peer says of help, of which only the newest is of use.
        self.helped: Callable[[str, Part, memoryview], None] = lambda *_: None
        self._connections: dict[str, Connection] = {}
        self._serials, self._newest = count(1), dict[str, int]()  # of dials: ours, and each peer's
        self._dialing: set[str] = set()
        self._wanted: set[str] = set()
        self._generation = -1
        self._closed = threading.Event()
        self.mailbox: dict[Key, tuple[bytes, memoryview]] = {}
        self.dropped = 0
        listener = socket.create_server((host, 0), backlog=BACKLOG)
        self.address = f"{host}:{listener.getsockname()[1]}"
        self._front = Front(listener, Door(worker, lambda _: secret), self._welcome)
        threading.Thread(target=self._watch, name="mesh-watch", daemon=True).start()

    def want(self, addresses: Mapping[str, str]) -> None:
        """Connect to these peers ahead of need. Of two workers, the smaller name dials."""
        with self._changed:
            self._wanted |= set(addresses)
            for peer, address in addresses.items():
                if peer > self._worker and peer not in self._dialing | set(self._connections):
                    self._dialing.add(peer)
                    threading.Thread(
                        target=self._dial, args=(peer, address), name=f"dial-{peer}", daemon=True
                    ).start()

    def forget(self, peers: Iterable[str]) -> None:
        """Close the connections to peers that are gone, which wakes threads that send to them."""
        with self._changed:
            self._wanted -= set(peers)
            gone = [self._connections.pop(peer) for peer in peers if peer in self._connections]
        for connection in gone:
            connection.close()

    def enter(self, generation: int) -> None:
        with self._changed:
            self._generation = generation
            for key in [key for key in self.mailbox if key[1] < generation]:
                del self.mailbox[key]
                self.dropped += 1

    def drop(self, peer: str, connection: Connection) -> None:
        """Close a connection that does not work any more, and report its peer as broken."""
        with self._changed:
            known = self._connections.get(peer) is connection
            if known:
                del self._connections[peer]
        connection.close()
        if known:
            self._broken(peer)

    def connection(self, peer: str) -> Connection | None:
        return self._connections.get(peer)

    def close(self) -> None:
        with self._changed:
            self._closed.set()
            peers = list(self._connections)
        self._front.close()
        self.forget(peers)

    def _watch(self) -> None:
        while not self._closed.wait(LOOK_S):
            with self._changed:
                lost = [(peer, one) for peer, one in self._connections.items() if one.unheard]
            for peer, connection in lost:
                log.warning("nothing that is sent to %s arrives", peer)
                self.drop(peer, connection)

    def _welcome(self, connection: Connection, hello: AnyMessage) -> None:
        if isinstance(hello, PeerHello):
            self._receive(hello.worker, connection, hello.serial)
        else:
            self.others(connection, hello)

    def _dial(self, peer: str, address: str) -> None:
        until_s, attempt = time.monotonic() + DIAL_S, 0
        while time.monotonic() < until_s:
            attempt, serial = attempt + 1, next(self._serials)
            with self._changed:
                if self._closed.is_set() or peer not in self._wanted:
                    break
            try:
                hello = PeerHello(worker=self._worker, serial=serial)
                connection = dial(address, self._secret, hello, to=peer)
            except Refused:
                break
            except WireError:
                self._closed.wait(min(DIAL_WAIT_S * attempt, 1.0))
                continue
            self._receive(peer, connection, 0)
            return
        with self._changed:
            self._dialing.discard(peer)
            report = peer in self._wanted and not self._closed.is_set()
        if report:
            self._broken(peer)

    def _receive(self, peer: str, connection: Connection, serial: int) -> None:
        """Receive everything that comes from `peer`, until the connection ends.

        A dial that `peer` gave up long ago, and that is accepted late, does not replace a newer
        one.
        """
        with self._changed:
            if serial < self._newest.get(peer, 0):
                connection.close()
                return
            self._newest[peer] = serial
            connection.probe()
            earlier = self._connections.get(peer)
            self._connections[peer] = connection
            self._dialing.discard(peer)  # not sooner: two that replace each other may both be lost
            self._changed.notify_all()
        if earlier is not None:
            earlier.close()
        try:
            while True:
                message, payload = connection.receive(self._place)
                self._put(peer, message, payload)
        except WireError:
            pass  # the usual end
        finally:
            self._end(peer, connection)

    def _place(self, message: AnyMessage, count: int) -> memoryview | None:
        return self.place(message, count) if isinstance(message, Part) else None

    def _end(self, peer: str, connection: Connection) -> None:
        connection.close()
        with self._changed:
            known = self._connections.get(peer) is connection
            if known:
                del self._connections[peer]
            report = known and not self._closed.is_set()
            self._changed.notify_all()
        if report:
            self._broken(peer)

    def _put(self, peer: str, message: AnyMessage, payload: memoryview) -> None:
        if not isinstance(message, Part):
            raise WireError(f"{peer} sent {type(message).__name__}")
        with self._changed:
            if message.generation < self._generation:
                self.dropped += 1
                return
            if message.tag.startswith(ASK) and self._asked is not None:
                threading.Thread(
                    target=self._asked, args=(peer, message), name=f"answer-{peer}", daemon=True
                ).start()
                return
            if message.tag.startswith(HELP):
                self.helped(peer, message, payload)
                self._changed.notify_all()
                return
            if len(self.mailbox) >= HELD_PARTS_MAX:
                raise WireError(f"{peer} sends more than anyone can hold")
            key = (peer, message.generation, message.step, message.tag)
            self.mailbox[key] = (message.extra, payload)
            self._changed.notify_all()
