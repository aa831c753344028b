"""The journal in a real Redis: fenced, durable, and never written twice."""

import asyncio
import os
import signal
import subprocess
import sys

import msgspec
import pytest
import redis.asyncio

from agent.keys import EPOCH, INBOX, INBOX_READ, JOURNAL, READING, SNAPSHOT, VIEW
from agent.messages import AgentLost
from cloud.clock import VirtualClock
from orchestrator import journal as journals
from orchestrator.actions import Note
from orchestrator.brain.decide import decide
from orchestrator.brain.holdings.leases import new_token
from orchestrator.cli.status import seen
from orchestrator.cli.watch import why_silent
from orchestrator.events import JobCancelled, ManagerStarted, Tick
from orchestrator.journal import RedisJournal, Unreadable
from orchestrator.live.order import Order
from orchestrator.live.price_files import QuoteStore
from orchestrator.live.world import LiveWorld
from orchestrator.loop import resume
from orchestrator.paths import Places
from orchestrator.redis_client import retry_policy
from orchestrator.settings import Settings
from orchestrator.state import State
from orchestrator.supervisor.redis_server import RedisServer
from orchestrator.world import Superseded, encode_state

pytestmark = pytest.mark.processes

PATIENCE_S = 30.0


def tick(at_s: float) -> Tick:
    return Tick(at_s=at_s)


async def opened(server: RedisServer) -> tuple["redis.asyncio.Redis", RedisJournal]:
    store = redis.asyncio.Redis.from_url(server.url, **retry_policy(asynchronous=True))
    journal = RedisJournal(store)
    await journal.take_over()
    return store, journal


def test_what_was_appended_is_loaded_after_the_snapshot(server):
    """A restart sees the snapshot and every entry after it, in order, and none from before it."""

    async def go():
        store, journal = await opened(server)
        await journal.append(tick(1.0), [])
        await journal.snapshot(State(now_s=1.0))
        await journal.append(tick(2.0), [Note(who="job", because="because")])
        await journal.append(tick(3.0), [])
        fresh = RedisJournal(store)
        state, entries = await fresh.load()
        await store.aclose()
        return state, entries

    state, entries = asyncio.run(go())
    assert encode_state(state) == encode_state(State(now_s=1.0))
    assert [entry.event.at_s for entry in entries] == [2.0, 3.0]
    assert entries[0].actions == (Note(who="job", because="because"),)


def test_a_journal_of_large_entries_is_bounded_in_bytes(server, monkeypatch):
    """The lists of a thousand machines are of that size each. The oldest go, and nothing behind the snapshot."""
    monkeypatch.setattr(journals, "BYTES_KEPT", 1 << 20)
    large = [Note(who="job", because="x" * 20_000)]

    async def go():
        store, journal = await opened(server)
        for at_s in range(200):
            await journal.append(tick(at_s), large)
        await journal.snapshot(State(now_s=199.0))
        left, used = await store.xlen(JOURNAL), await store.memory_usage(JOURNAL)
        for at_s in range(200, 300):
            await journal.append(tick(at_s), large)
        state, entries = await RedisJournal(store).load()
        await store.aclose()
        return left, used, state, entries

    left, used, state, entries = asyncio.run(go())
    assert left > 10
    assert used < 1.5 * (1 << 20)
    assert state.now_s == 199.0
    assert [entry.event.at_s for entry in entries] == [*range(200, 300)]


def test_an_older_manager_cannot_write(server):
    """Once another manager has taken over, no entry, snapshot or view of the first one is taken."""

    async def go():
        store, first = await opened(server)
        await first.append(tick(1.0), [])
        second = RedisJournal(store)
        await second.take_over()
        with pytest.raises(Superseded, match="epoch 1 may not write"):
            await first.append(tick(2.0), [])
        with pytest.raises(Superseded):
            await first.snapshot(State())
        await second.publish({VIEW: b"its own", READING: b"its sums"})
        with pytest.raises(Superseded):
            await first.publish({VIEW: b"older", READING: b"older sums"})
        assert await store.mget(VIEW, READING) == [b"its own", b"its sums"]
        await second.append(tick(3.0), [])
        entries = (await second.load())[1]
        await store.aclose()
        return entries

    assert [entry.event.at_s for entry in asyncio.run(go())] == [1.0, 3.0]


def test_wiped_journal_never_repeats_a_token(server):
    """The epoch and the serial begin again at 1, under the same name of the deployment."""
    settings = Settings(deployment="d" * 32)

    async def life() -> tuple[int, list[str]]:
        store, journal = await opened(server)
        started = ManagerStarted(
            at_s=1.0, epoch=journal.epoch, salt=journal.salt, settings=settings
        )
        state, _ = decide(await resume(journal), started)
        await journal.append(started, [])
        await journal.snapshot(state)
        await store.flushall()
        await store.aclose()
        return state.epoch, [new_token(state) for _ in range(10)]

    lives = [asyncio.run(life()) for _ in range(3)]
    tokens = [token for _, made in lives for token in made]
    assert [epoch for epoch, _ in lives] == [1, 1, 1]
    assert len(set(tokens)) == 30
    assert max(map(len, tokens)) < 64  # the most that a cloud takes


def test_an_inbox_entry_leaves_with_the_journal_entry_that_handles_it(server):
    """Append marks the inbox entry as read and removes it in the same step, so it is handled once."""

    async def go():
        store, journal = await opened(server)
        event = JobCancelled(at_s=1.0, job="job", by="a test")
        key = (await store.xadd(INBOX, {"e": msgspec.json.encode(event)})).decode()
        before = await store.xlen(INBOX)
        journal.inbox_id = key
        await journal.append(event, [])
        after = await store.xlen(INBOX), (await store.get(INBOX_READ)).decode()
        await store.aclose()
        return key, before, after

    key, before, after = asyncio.run(go())
    assert before == 1
    assert after == (0, key)


class NoMachines:
    async def machines(self) -> set[str]:
        return set()


def test_nothing_has_happened_later_than_now(server, tmp_path):
    """Who says so has a clock that is ahead: for its hour nobody is paid, and nobody's patience
    ends. And who hears it can be told to end right then."""

    async def go():
        store, journal = await opened(server)
        ahead = AgentLost(at_s=4600.0, machine_id="m1", why="it is gone")
        await store.xadd(INBOX, {"e": msgspec.json.encode(ahead)})
        clock, quotes = VirtualClock(1000.0), QuoteStore(tmp_path)
        world = LiveWorld(
            store=store,
            journal=journal,
            providers={},
            engine=NoMachines(),
            clock=clock,
            quotes=quotes,
        )
        await world.open(tick(1000.0))
        heard = [await world.next_event(2000.0) for _ in range(2)]
        await asyncio.wait_for(world.close(), PATIENCE_S)  # also while it asks for what comes next
        await store.aclose()
        return heard

    assert [event.at_s for event in asyncio.run(go())] == [1000.0, 1000.0]


def test_an_append_asked_for_again_is_one_entry(server):
    """When the answer to an append was lost with the server, asking again adds nothing."""

    async def go():
        store, journal = await opened(server)
        await journal.append(tick(1.0), [])
        journal._turn -= 1  # as a client does that never got its answer and sends the same again
        await journal.append(tick(1.0), [])
        length = await store.xlen(JOURNAL)
        await store.aclose()
        return length

    assert asyncio.run(go()) == 1


def test_a_manager_that_cannot_read_its_journal_says_so_where_people_look(server, store, tmp_path):
    """Ray starts the next manager, and the next: the words are kept beside the house, for `orchestrator status`."""
    store.hset(SNAPSHOT, mapping={"id": "0-0", "state": b"\x6b}"})
    places = Places(tmp_path / "redis-house")
    order = Order(
        state_dir=str(places.state_dir),
        redis_url=server.url,
        ray_address="",
        settings="",
        house="one",
    )
    program = f"from orchestrator.live.manager import Manager; Manager({msgspec.json.encode(order)!r})._thread.join()"
    ran = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, timeout=120, check=False)
    assert ran.returncode == 1
    assert "the journal in Redis cannot be read" in why_silent(None, places)
    (said,) = seen(None, places, None)
    assert "submit --from" in str(said)


def test_an_entry_that_cannot_be_read_is_said_with_its_place(server, store):
    """It is damaged or of a later version; what came before it is named."""
    sound = store.xadd(JOURNAL, {"e": msgspec.json.encode(tick(1.0)), "a": b"[]"}).decode()
    store.xadd(JOURNAL, {"e": b'{"type":"Tock"}', "a": b"[]"})

    async def go():
        client, journal = await opened(server)
        with pytest.raises(Unreadable, match=f"after {sound}"):
            await journal.load()
        await client.aclose()

    asyncio.run(go())


@pytest.mark.parametrize("where", [JOURNAL, SNAPSHOT])
def test_a_changed_digit_is_noticed(server, store, where):
    """It would be read without a word, and money or an hour would be another."""

    async def go():
        client, journal = await opened(server)
        await journal.append(tick(1.0), [])
        await journal.snapshot(State(now_s=1.5))
        await journal.append(tick(2.5), [])
        if where == SNAPSHOT:
            state = store.hget(SNAPSHOT, "state")
            store.hset(SNAPSHOT, "state", state.replace(b"1.5", b"1.7"))
        else:
            ((_, fields),) = store.xrevrange(JOURNAL, count=1)
            store.xadd(JOURNAL, {**fields, b"e": fields[b"e"].replace(b"2.5", b"2.7")})
        with pytest.raises(Unreadable, match=f"{where} does not match its seal"):
            await journal.load()
        await client.aclose()

    asyncio.run(go())


def test_every_acknowledged_write_survives_kill_9(server, store):
    """SIGKILL of the server in the middle of a stream of appends: it comes back with all of them."""

    async def go():
        client, journal = await opened(server)
        acknowledged = 0
        for number in range(400):
            if number == 200:
                os.kill(server.pid, signal.SIGKILL)
                server.stop()
                server.start()
            await journal.append(tick(float(number)), [])
            acknowledged += 1
        await client.aclose()
        return acknowledged

    acknowledged = asyncio.run(go())
    rows = store.xrange(JOURNAL)
    times = [msgspec.json.decode(fields[b"e"], type=Tick).at_s for _, fields in rows]
    assert times == [float(number) for number in range(acknowledged)]
    assert int(store.get(EPOCH)) == 1
