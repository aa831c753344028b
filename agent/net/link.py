"""The connection of a worker or an agent to the keeper, which redials when it breaks.

The keeper may be restarted while training goes on. Then the link dials again, with bounded
patience, and sends who it is and what it holds; its user must send again what else is needed. If
patience runs out, or the keeper refuses this worker, `ended` is called, and nothing is delivered
after that.
"""

import logging
import threading
import time
from collections.abc import Callable

from agent.checksum import Buffer
from agent.errors import Refused, WireError
from agent.net.watchdog import Stuck
from agent.net.wire import Connection, dial
from agent.protocol import AnyMessage, Beat, Dismissal, Message

log = logging.getLogger(__name__)

BEAT_S = 0.15
REDIAL_S = 0.05


class Link:
    def __init__(  # noqa: PLR0913, PLR0917 - the user of the link is notified of what happens
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
        self.connects = 0  # if it grows while a user waits for an answer, the user must ask again
        self.microbatch_s, self.step = 0.0, -1
        # Sends what waits for a heartbeat, and must not raise. It is told whether the connection is
        # another one than at the heartbeat before.
        self.beating: Callable[[bool], None] = lambda _: None
        self.stuck = Stuck()  # of the thread that makes the link, which is the script's thread

    def start(self) -> None:
        """Connect (waiting as long as patience lasts) and listen from then on."""
        self._connection = self._dial()
        self.connects = 1
        self._connected()
        threading.Thread(target=self._receive, name="keeper-link", daemon=True).start()
        threading.Thread(target=self._beat, name="keeper-beat", daemon=True).start()

    @property
    def connection(self) -> Connection | None:
        """The present connection, for a user that may not continue on a different one."""
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
                # A worker that hears nothing any more must not go on sending heartbeats.
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
        connects = self.connects
        while not self._closed.wait(BEAT_S):
            hung_s = self.stuck.beat() * BEAT_S
            before, connects = connects, self.connects
            self.beating(connects != before)
            self.send(Beat(microbatch_s=self.microbatch_s, step=self.step, hung_s=hung_s))
