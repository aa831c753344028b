"""An entry of the inbox that no manager can take is set aside, said, and gone over; Redis is real."""

import asyncio
from typing import Any

import msgspec
import pytest
import redis.asyncio

from agent.keys import EVENTS, INBOX, INBOX_ASIDE, INBOX_TRIED
from cloud.clock import VirtualClock
from orchestrator import loop
from orchestrator.brain import decide as brain
from orchestrator.events import AnyEvent, JobCancelled, JobSpec, JobSubmitted, ManagerStarted
from orchestrator.journal import RedisJournal
from orchestrator.live.price_files import QuoteStore
from orchestrator.live.world import ASIDE_KEPT, ENDS_MAX, LiveWorld
from orchestrator.redis_client import retry_policy
from orchestrator.replay import replay
from orchestrator.state import State
from orchestrator.view import Sentence
from orchestrator.world import encode_state

pytestmark = pytest.mark.processes

POISON = JobCancelled(at_s=1000.0, job="poison", by="a test")
SPEC = JobSpec(job="job", script="a.py", script_sha="")
SOUND = JobSubmitted(at_s=1000.0, spec=SPEC)
PATIENCE_S = 60.0


class NoMachines:
    async def machines(self) -> set[str]:
        return set()

    async def do(self, _: Any) -> Any:
        raise AssertionError("nothing is bought, so no worker is started")


class Ended(Exception):  # noqa: N818 - it names what happened
    """The manager of this life was killed, or has heard all that the test said."""


class Killed(BaseException):
    """The process of the manager is gone: nothing catches this."""


@pytest.fixture
def inbox(server: Any, store: Any, tmp_path: Any) -> Any:
    """Puts entries into the inbox, and lets a manager live until it has handled the last of them."""

    async def life() -> State:
        client = redis.asyncio.Redis.from_url(server.url, **retry_policy(asynchronous=True))
        journal = RedisJournal(client)
        epoch = await journal.take_over()
        world = LiveWorld(
            store=client,
            journal=journal,
            providers={},
            engine=NoMachines(),
            clock=VirtualClock(1000.0),
            quotes=QuoteStore(tmp_path),
        )
        shown: list[State] = []

        async def show(state: State) -> None:
            shown.append(state)
            if await client.xlen(INBOX) == 0:
                raise Ended

        world.show = show  # type: ignore[method-assign]
        state = await loop.resume(journal)
        await world.open(ManagerStarted(at_s=1000.0, epoch=epoch, salt=journal.salt))
        try:
            await asyncio.wait_for(loop.run(world, journal, state, world.set_aside), PATIENCE_S)
        except Ended:
            beginning, entries = await journal.load()
        finally:
            await world.close()
            await client.aclose()
        assert beginning is not None
        assert encode_state(replay(entries, beginning)) == encode_state(shown[-1])
        return shown[-1]

    def handled(*said: bytes | AnyEvent) -> State:
        for each in said:
            data = each if isinstance(each, bytes) else msgspec.json.encode(each)
            store.xadd(INBOX, {"e": data})
        return asyncio.run(life())

    return handled


def sentences(store: Any) -> list[str]:
    rows = store.xrange(EVENTS)
    return [msgspec.json.decode(row[b"e"], type=Sentence).because for _, row in rows]


def fails(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Let the brain fail at the poison, after it has changed the state in part."""
    really = brain.jobs.on_cancelled

    def on_cancelled(state: State, out: Any, event: JobCancelled) -> None:
        if event.job == POISON.job:
            state.epoch = 77
            raise error
        really(state, out, event)

    monkeypatch.setattr(brain.jobs, "on_cancelled", on_cancelled)


def test_what_cannot_be_decided_about_is_set_aside_in_the_same_life(inbox, store, monkeypatch):
    """The change that it made in part is undone, what comes after it counts, and the journal replays."""
    fails(monkeypatch, ValueError("max() arg\nis an empty sequence"))
    state = inbox(POISON, SOUND)
    assert (state.epoch, list(state.jobs)) == (1, ["job"])
    (said,) = [line for line in sentences(store) if "set aside" in line]
    ((_, kept),) = store.xrange(INBOX_ASIDE)
    assert said.startswith(f"JobCancelled {kept[b'entry'].decode()} is set aside")
    assert "failed twice in test_poison.py:" in said
    assert "ValueError: max() arg is an empty sequence" in said
    assert b"job='poison'" in kept[b"e"]


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (b'{"type":"\xff"}', "it cannot be read ("),
        (b'{"type":"Tock"}', "type is 'Tock': "),
        (b"", "it cannot be read ("),
        (b'{"type":"Tick","at_s":0.0,"x":' + b"[" * 50_000, "it cannot be read ("),
        (b'{"type":"Tick","at_s":"now","x":' + b"[" * 50_000, "at_s: expected `float`, got `str`"),
        (
            msgspec.json.encode(SOUND).replace(
                b'"slots_max":4', b'"slots_max":4611686018427387904'
            ),
            "spec.slots_max is 4611686018427387904: expected `int` <= 100000",
        ),
        (
            msgspec.json.encode(SOUND).replace(b'"slots_min":1', b'"slots_min":9'),
            "slots_min=9 and slots_max=4: slots_min must not be above slots_max",
        ),
    ],
)
def test_what_is_no_event_is_set_aside_where_it_comes_in(inbox, store, said, why):
    """Its bytes are kept, and the sentence names field, value and range."""
    state = inbox(said, SOUND)
    assert list(state.jobs) == ["job"]
    ((_, kept),) = store.xrange(INBOX_ASIDE)
    assert kept[b"e"] == said
    (line,) = [line for line in sentences(store) if "set aside" in line]
    assert why in line


def test_what_ends_manager_after_manager_is_set_aside(inbox, store, monkeypatch):
    """As by a kill, no life has time to say anything; the one that finds two dead goes over it."""
    fails(monkeypatch, Killed())
    for data in (POISON, SOUND):
        store.xadd(INBOX, {"e": msgspec.json.encode(data)})
    for _ in range(ENDS_MAX):
        with pytest.raises(Killed):
            inbox()
    assert store.hget(INBOX_TRIED, "times") == str(ENDS_MAX).encode()
    state = inbox()
    assert list(state.jobs) == ["job"]
    (line,) = [line for line in sentences(store) if "set aside" in line]
    assert "2 managers ended while they decided about it" in line


def test_what_is_set_aside_is_bounded(inbox, store):
    """A sender of nonsense does not fill the disk."""
    inbox(*[b"nonsense"] * (ASIDE_KEPT + 20), SOUND)
    assert store.xlen(INBOX_ASIDE) == ASIDE_KEPT
    assert store.xlen(INBOX) == 0
