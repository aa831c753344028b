"""Messages to a web address: signed, repeated, bounded, and none is lost by a kill."""

import hashlib
import hmac
import json
from contextlib import closing

import pytest

from orchestrator.config import ConfigError, load
from orchestrator.history import store
from orchestrator.history.outside import hooks
from orchestrator.history.outside.hooks import Sender, mail_of, message
from orchestrator.history.records import Happening
from orchestrator.history.writer import Writer
from orchestrator.paths import Places

T0 = 1_800_000_000.0
SECRET = "0123456789abcdef" * 4


def eviction(number: int, at_s: float = T0, kind: str = "eviction") -> Happening:
    return Happening(
        id=f"{1_800_000_000_000 + number}-0",
        at_s=at_s,
        kind=kind,
        job="gpt-1",
        who="i-1",
        what="note",
        because="i-1 was taken by the provider; held 0.20 h for $0.0123",
    )


def written(places: Places, *events: Happening) -> None:
    """The events are in the file, and what is to be told of them; then the writer is gone."""
    writer = Writer(places.history, mail_of("home", ("eviction", "failure"), lambda: T0))
    for event in events:
        writer.tell(event)
    writer.flush()
    writer.close()


def test_a_message_is_signed_and_comes_once_though_it_was_refused(places, receiver):
    receiver.statuses = [503, 503]
    written(places, eviction(1), eviction(2, kind="note"))
    written(places, eviction(1))  # read again after a kill
    now_s, taken = T0, 0
    for _ in range(5):
        taken += Sender(places.history, receiver.url, SECRET).send_due(now_s)
        now_s += hooks.LONGEST_S
    assert (taken, receiver.tries, len(receiver.taken)) == (1, 3, 1)
    _, headers, body = receiver.taken[0]
    assert headers["X-Spot-Event"] == eviction(1).id
    at_s, _, given = headers["X-Spot-Signature"].removeprefix("t=").partition(",v1=")
    made = hmac.new(SECRET.encode(), f"{at_s}.".encode() + body, hashlib.sha256).hexdigest()
    assert hmac.compare_digest(given, made)
    said = json.loads(body)
    assert said["text"].startswith("*Machine taken* in home: gpt-1, i-1: was taken by")
    assert said["metadata"]["event_type"] == "spot_eviction"
    assert said["metadata"]["event_payload"]["job"] == "gpt-1"


def test_a_receiver_that_never_answers_is_given_up_and_holds_nothing_back(places, capsys):
    written(places, eviction(1))
    sender = Sender(places.history, "http://127.0.0.1:9/nobody", SECRET)
    now_s = T0
    for _ in range(hooks.TRIES_MAX + 3):
        assert sender.send_due(now_s) == 0
        now_s += hooks.LONGEST_S
    assert "dropped" in capsys.readouterr().err
    with closing(store.reading(places.history)) as file:
        assert file.execute("SELECT count(*) FROM outbox").fetchone() == (0,)


def test_old_events_are_told_to_nobody_and_the_outbox_is_bounded(places, monkeypatch):
    monkeypatch.setattr(store, "OUTBOX_MAX", 5)
    written(places, eviction(0, T0 - 2 * hooks.OLD_S), *(eviction(n) for n in range(1, 20)))
    with closing(store.reading(places.history)) as file:
        kept = [key for (key,) in file.execute("SELECT id FROM outbox ORDER BY id")]
    assert kept == [eviction(n).id for n in range(15, 20)]


def test_names_in_a_message_call_nobody():
    evil = Happening(
        id="1-0",
        at_s=T0,
        kind="failure",
        job="<!channel>",
        who="<!channel>",
        what="note",
        because="FAILED: <@everyone> & more",
    )
    text = json.loads(message(evil, "home"))["text"]
    assert "<" not in text and "&lt;!channel&gt;" in text


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("hooks.url", "http://example.com/x", "an address that begins with https://"),
        ("hooks.on", "eviction,nonsense", "kinds with commas between them"),
    ],
)
def test_settings_that_make_no_sense_are_refused(key, value, said):
    with pytest.raises(ConfigError, match=said):
        load(None, {}, {key: value})
    good = load(None, {}, {"hooks.url": "https://example.com/x", "hooks.on": "eviction, finish"})
    assert good.hooks.kinds == ("eviction", "finish")
