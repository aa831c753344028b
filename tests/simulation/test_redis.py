"""The journal that production keeps in Redis becomes a file that replays."""

import asyncio
from pathlib import Path

import pytest
import redis.asyncio

from orchestrator import loop
from orchestrator.events import JobSubmitted
from orchestrator.journal import RedisJournal
from orchestrator.redis_server import RedisServer, retry_policy
from orchestrator.replay import export, read_incident, replay
from orchestrator.simulated.scenario import FAULTS, Scenario, cloud_of, jobs_of
from orchestrator.simulated.world import SimulatedWorld
from orchestrator.state import State
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
def test_a_journal_in_redis_is_exported_and_replays_to_the_same_state(
    server: RedisServer, tmp_path: Path
) -> None:
    """Snapshot and entries become a file; replayed, they decide the same and end in the same state."""
    path = tmp_path / "incident.jsonl"
    state, count = asyncio.run(deployment(server, path))
    beginning, entries = read_incident(path)
    assert beginning is not None
    assert len(entries) == count > 0
    assert encode_state(replay(entries, beginning)) == encode_state(state)
