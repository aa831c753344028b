"""Telling a web address about events: signed, repeated within bounds, and kept until then.

What is to be told is written in the transaction that writes the event, so a kill loses none, and a
receiver that is away for a while gets it later. It may come twice, if an answer was lost: the
header `X-Spot-Event` is the same then. Messages are what Slack's incoming webhooks take; what a
program needs is in `metadata`.

    X-Spot-Signature: t=SECONDS,v1=HEX     HEX = HMAC-SHA256(secret, "SECONDS." + body)
"""

import hashlib
import hmac
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import closing, suppress
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING

import msgspec

from cloud.clock import CLOCK
from orchestrator.formatting import told
from orchestrator.history import store
from orchestrator.history.records import Happening
from orchestrator.kinds import Kind

if TYPE_CHECKING:
    import httpx

TRIES_MAX = 10
FIRST_S, LONGEST_S = 2.0, 300.0  # between two tries, twice as long each time
OLD_S = 600.0  # who was away does not want to hear of all that was long ago
ANSWER_S_MAX = 10.0
LOOK_S = 0.5
WORDS: dict[Kind, str] = {
    "budget": "Budget",
    "eviction": "Machine taken",
    "failure": "Job failed",
    "finish": "Job ended",
}

Mail = Callable[[Happening], bytes | None]


def mail_of(deployment: str, kinds: Iterable[Kind], now_s: Callable[[], float]) -> Mail:
    """Return what makes the message of an event; None for one that nobody is told about."""
    wanted = frozenset(kinds)

    def mail(event: Happening) -> bytes | None:
        if event.kind not in wanted or event.at_s < now_s() - OLD_S:
            return None
        return message(event, deployment)

    return mail


def message(event: Happening, deployment: str) -> bytes:
    """Return the message; names and sentences are escaped, so that they can call nobody."""
    said = told(event.who, event.what, event.because)
    word = WORDS.get(event.kind, event.kind.capitalize())
    about = f"{event.job}, " if event.job and event.job != event.who else ""
    text = f"*{word}* in {_plain(deployment)}: {_plain(about + event.who)}: {_plain(said)}"
    metadata = {
        "event_type": f"spot_{event.kind}",
        "event_payload": {**msgspec.structs.asdict(event), "deployment": deployment},
    }
    return msgspec.json.encode({"text": text, "metadata": metadata})


def _plain(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def signature(secret: str, at_s: int, body: bytes) -> str:
    """Return the header's value, which a receiver makes again from the body and compares."""
    made = hmac.new(secret.encode(), b"%d." % at_s + body, hashlib.sha256)
    return f"t={at_s},v1={made.hexdigest()}"


class Sender:
    """Sends what waits in the outbox of a file, one after the other."""

    def __init__(self, path: Path, url: str, secret: str) -> None:
        self._path, self._url, self._secret = path, url, secret

    def run(self, over: Event) -> None:
        """Send until it is over; what cannot be sent or read now is tried again."""
        while not over.wait(LOOK_S):
            try:
                self.send_due(CLOCK.now_s())
            except Exception as error:  # without this thread nobody is told any more
                say(f"hooks: nothing was sent ({error or type(error).__name__}); trying again")

    def send_due(self, now_s: float) -> int:
        """Send what is due, each at most once, and return how many were taken."""
        due, taken = self._due(now_s), 0
        if not due:
            return 0
        import httpx

        with (
            closing(store.writing(self._path)) as file,
            httpx.Client(timeout=ANSWER_S_MAX) as client,
        ):
            for key, body, tries in due:
                why = self._send(client, key, bytes(body), int(time.time()))
                if why and tries + 1 < TRIES_MAX:
                    later_s = now_s + min(FIRST_S * 2**tries, LONGEST_S)
                    change = "UPDATE outbox SET tries = tries + 1, next_s = ? WHERE id = ?"
                    file.execute(change, (later_s, key))
                    continue
                if why:
                    say(f"hooks: event {key} was refused {TRIES_MAX} times and is dropped: {why}")
                file.execute("DELETE FROM outbox WHERE id = ?", (key,))
                taken += not why
        return taken

    def _due(self, now_s: float) -> list[tuple[str, bytes, int]]:
        if not self._path.exists():
            return []
        asked = "SELECT id, body, tries FROM outbox WHERE next_s <= ? ORDER BY id LIMIT 100"
        with closing(store.reading(self._path)) as file:
            return file.execute(asked, (now_s,)).fetchall()

    def _send(self, client: "httpx.Client", key: str, body: bytes, at_s: int) -> str:
        """Return why it was not taken; empty if it was."""
        import httpx

        headers = {
            "Content-Type": "application/json",
            "X-Spot-Event": key,
            "X-Spot-Signature": signature(self._secret, at_s, body),
        }
        try:
            answer = client.post(self._url, content=body, headers=headers)
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            return str(error) or type(error).__name__
        return "" if answer.is_success else f"status {answer.status_code}"


def say(text: str) -> None:
    """Write a line into the log; on a full disk it is lost."""
    with suppress(OSError):
        print(f"{time.strftime('%F %T')} {text}", file=sys.stderr)  # noqa: T201
