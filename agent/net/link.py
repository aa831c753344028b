"""A worker's or an agent's connection to the keeper: one that comes back.

The keeper may be restarted while training goes on. The link then dials again with bounded patience and
says who it is and what it holds; what must be said again is for its user to know. If patience
runs out, or the keeper does not want this worker, `ended` is called and nothing comes after it.
"""

import logging
import threading
import time
from collections.abc import Callable

from agent.checksum import Buffer
from agent.errors import Refused, WireError
from agent.net.stuck import Stuck
from agent.net.wire import Connection, dial
from agent.protocol import AnyMessage, Beat, Dismissal, Message

log = logging.getLogger(__name__)

BEAT_S = 0.15
REDIAL_S = 0.05


class Link:
    def __init__(  # noqa: PLR0913, PLR0917 - what happens is told to whoever made the link
        self,
        address: str,
        secret: str,
        hello: Callable[[], Message],
        deliver: Callable[[AnyMessage, memoryview], None],
        ended: Callable[[str], None],
        connected: Callable[[], None] = lambda: None,
        patience_s: float = 30.0,
    ) -> None:
        self._address, self._secret = address, secret
        self._hello, self._deliver, self._ended = hello, deliver, ended
        self._connected = connected
        self._patience_s = patience_s
        self._connection: Connection | None = None
        self._closed = threading.Event()
        self.connects = 0  # whoever waits for an answer sees by this that it must ask again
        self.microbatch_s, self.step = 0.0, -1
        self.stuck = Stuck()  # of the thread that makes the link, which is the script's

    def start(self) -> None:
        """Connect (waiting as long as patience lasts) and listen from then on."""
        self._connection = self._dial()
        self.connects = 1
        self._connected()
        threading.Thread(target=self._receive, name="keeper-link", daemon=True).start()
        threading.Thread(target=self._beat, name="keeper-beat", daemon=True).start()

    @property
    def connection(self) -> Connection | None:
        """The one of now, for what may not go on with another."""
        return self._connection

    def send(self, message: Message, *payload: Buffer) -> None:
        """Send, or do nothing while there is no connection."""
        connection = self._connection
        if connection is not None:
            try:
                with self.stuck.aided():
                    connection.send(message, *payload)
            except WireError:
                return  # the receiving thread sees the same, and dials again

    def close(self) -> None:
        self._closed.set()
        if self._connection is not None:
            self._connection.close()

    def _dial(self) -> Connection:
        deadline_s = time.monotonic() + self._patience_s
        while True:
            try:
                return dial(self._address, self._secret, self._hello())
            except Refused:
                raise
            except WireError:
                if time.monotonic() > deadline_s or self._closed.wait(REDIAL_S):
                    raise

    def _receive(self) -> None:
        while not self._closed.is_set():
            try:
                assert self._connection is not None
                message, payload = self._connection.receive()
                if isinstance(message, Dismissal):
                    self._closed.set()
                    self._ended(message.why)
                    return
                self._deliver(message, payload)
            except WireError:
                if self._closed.is_set() or not self._redial():
                    return
            except Exception as error:
                # Whoever hears nothing any more must not go on saying that it is well.
                log.exception("what the keeper said could not be taken in")
                self.close()
                self._ended(f"{type(error).__name__}: {error}")
                return

    def _redial(self) -> bool:
        try:
            self._connection = self._dial()
        except WireError as error:
            if not self._closed.is_set():
                self._closed.set()
                self._ended(str(error))
            return False
        self.connects += 1
        self._connected()
        return True

    def _beat(self) -> None:
        while not self._closed.wait(BEAT_S):
            hung_s = self.stuck.beat() * BEAT_S
            self.send(Beat(microbatch_s=self.microbatch_s, step=self.step, hung_s=hung_s))
