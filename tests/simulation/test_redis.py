"""The journal that production keeps in Redis becomes a file that replays."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis.asyncio

from agent.keys import INBOX, OPEN_JOBS, VIEW
from orchestrator import loop
from orchestrator.brain.decide import decide
from orchestrator.client import Client, House, Unread
from orchestrator.events import (
    AnyEvent,
    JobCancelled,
    JobResumed,
    JobSpec,
    JobSubmitted,
    ShutdownAsked,
)
from orchestrator.journal import RedisJournal
from orchestrator.live.manager import put_away
from orchestrator.redis_client import retry_policy
from orchestrator.replay import export, read_incident, replay
from orchestrator.simulated.scenario import FAULTS, Scenario, cloud_of, jobs_of
from orchestrator.simulated.world import SimulatedWorld
from orchestrator.state import State
from orchestrator.supervisor.redis_server import RedisServer
from orchestrator.view_builder import view_of
from orchestrator.world import encode_state

SCENARIO = Scenario(seed=5, days=0.002, instances=6, job_slots=4, faults=FAULTS["none"])


async def deployment(server: RedisServer, path: Path) -> tuple[State, int]:
    """Two lives of a manager whose journal is in a real Redis; then the export by a bystander."""
    world = SimulatedWorld(cloud_of(SCENARIO), SCENARIO)
    state = State()
    for life in (1, 2):
        store = redis.asyncio.Redis.from_url(server.url, **retry_policy(asynchronous=True))
        journal = RedisJournal(store)
        epoch = await journal.take_over()
        assert epoch == life
        state = await loop.resume(journal)
        world.start(epoch, SCENARIO.settings)
        for spec in jobs_of(SCENARIO) if life == 1 else ():
            world.say(JobSubmitted(at_s=world.timeline.now_s, spec=spec))
        state = await loop.run(world, journal, state)
        world.restart()
        world.end_s += 100.0
        await store.aclose()
    store = redis.asyncio.Redis.from_url(server.url, **retry_policy(asynchronous=True))
    entries = await export(RedisJournal(store), path)
    await store.aclose()
    return state, entries


@pytest.mark.processes
def test_a_journal_in_redis_is_exported_and_replays_to_the_same_state(server, tmp_path):
    """Snapshot and entries become a file; replayed, they decide the same and end in the same state."""
    path = tmp_path / "incident.jsonl"
    state, count = asyncio.run(deployment(server, path))
    beginning, entries = read_incident(path)
    assert beginning is not None
    assert len(entries) == count > 0
    assert encode_state(replay(entries, beginning)) == encode_state(state)


@pytest.mark.processes
def test_the_manager_ends_when_the_states_of_its_jobs_are_on_the_disk(server):
    """A job that the keeper still closes is waited for; one that the manager knows nothing of is not."""

    async def ends() -> None:
        store: Any = redis.asyncio.Redis.from_url(server.url, **retry_policy(asynchronous=True))
        await store.hset(OPEN_JOBS, mapping={"ours": "", "another's": ""})
        waiting = asyncio.create_task(put_away(store, {"ours", "old"}))
        done, _ = await asyncio.wait([waiting], timeout=0.3)
        assert not done
        await store.hdel(OPEN_JOBS, "ours")
        await asyncio.wait_for(waiting, 10)
        await store.aclose()

    asyncio.run(ends())


def client_of(server: RedisServer, folder: Path) -> Client:
    """A client of a house of which there is nothing but its Redis."""
    house = {"dashboard_url": "", "ray_address": "", "local_cloud": "", "deployment": ""}
    return Client(House(pid=0, redis_url=server.url, started_at_s=0.0, **house), folder)


@pytest.mark.processes
def test_a_script_of_a_request_that_waits_for_a_manager_is_kept(server, tmp_path, monkeypatch):
    """Many are handed in while the manager is away: its last view has no such job, or has it as ended."""
    client = client_of(server, tmp_path)
    monkeypatch.setattr("orchestrator.client.SCRIPTS_BYTES_MAX", 1)
    state = State()

    def handed_in(name: str) -> JobSubmitted:
        sha = client.put_script(f"# of {name}".encode())
        return JobSubmitted(at_s=0.0, spec=JobSpec(job=name, script="a.py", script_sha=sha))

    old, waits, nobodys = (handed_in(name) for name in ("old", "waits", "nobody's"))
    for event in (old, JobCancelled(at_s=0.0, job="old", by="somebody")):
        decide(state, event)
    client._redis.set(VIEW, msgspec.json.encode(view_of(state, 0.0)))
    client.post(waits)
    client.post(JobResumed(at_s=0.0, job="old", by="somebody"))
    client.put_script(b"# the newest")
    assert client.has_script(waits.spec.script_sha)
    assert client.has_script(old.spec.script_sha)
    assert not client.has_script(nobodys.spec.script_sha)


@pytest.mark.processes
def test_a_full_inbox_refuses_and_loses_nothing(server, tmp_path, monkeypatch):
    """But for the request to end, which is always taken."""
    client = client_of(server, tmp_path)
    monkeypatch.setattr("orchestrator.client.INBOX_MAX", 2)
    asked = [JobCancelled(at_s=0.0, job=name, by="somebody") for name in ("a", "b", "c")]
    for event in asked[:2]:
        client.post(event)
    with pytest.raises(Unread, match=r"^2 messages wait for the manager, which reads none: "):
        client.post(asked[2])
    last = ShutdownAsked(at_s=0.0, by="somebody")
    client.post(last)
    rows = client._redis.xrange(INBOX)
    assert [msgspec.json.decode(row[b"e"], type=AnyEvent) for _, row in rows] == [*asked[:2], last]
