"""Manager and keeper that hang: real processes and a real Redis."""

import asyncio
import math
import os
import signal
import subprocess
import threading
from collections.abc import Iterator

import pytest
import redis.asyncio
import waiting

from agent.keys import COMPILES, PULSE
from cloud.local.processes import MARKER
from orchestrator.config import load
from orchestrator.live import manager
from orchestrator.supervisor import processes, watchdog
from orchestrator.supervisor import supervisor as house_module
from orchestrator.supervisor.supervisor import House
from orchestrator.supervisor.watchdog import LOOK_S, LOOKS_MAX, Pulse

pytestmark = pytest.mark.processes

OURS = "0123456789ab"
HEAD = f"head-{OURS}"


@pytest.fixture
def actors() -> Iterator[dict[str, "subprocess.Popen[bytes]"]]:
    """Processes by the names that Ray gives to its actors, and a manager of another house."""
    started = {}
    for who, title, house, machine in (
        ("manager", "ray::Manager", OURS, HEAD),
        ("keeper", "ray::KeeperActor.open_job", OURS, HEAD),
        ("nobody", "ray::IDLE", OURS, HEAD),
        ("a machine's", "ray::IDLE", OURS, "i-0123"),
        ("another's", "ray::Manager", "another", HEAD),
    ):
        started[who] = subprocess.Popen(
            [title, "600"],
            executable="/bin/sleep",
            env={processes.MARK: house, MARKER: machine},
        )
    yield started
    for process in started.values():
        process.kill()
        process.wait()


def test_who_hangs_is_ended_and_nobody_else(server, store, actors):
    """A manager that is stopped: its view stays the same for too long. The keeper's pulse goes on, and
    while Redis does not answer nobody counts as silent. In place of a manager there may be a process that never became one."""
    os.kill(actors["manager"].pid, signal.SIGSTOP)
    pulse = Pulse(server.url, OURS)
    patient = Pulse(server.url, OURS, LOOK_S)  # its manager looks around so seldom
    beats = iter(range(1000))

    def looks(times: int, pulse: Pulse = pulse) -> list[str]:
        found = []
        for _ in range(times):
            if server.alive():
                store.set(PULSE, next(beats))
            found += pulse.look()
        return found

    store.set("orch:view", "a view")
    assert looks(LOOKS_MAX) == []
    server.stop()
    assert looks(LOOKS_MAX) == []
    server.start()
    assert looks(LOOKS_MAX) == []
    assert looks(LOOKS_MAX + 1, patient) == []
    assert looks(1) == ["Manager"]
    assert actors["manager"].wait(60) == -signal.SIGKILL
    assert actors["nobody"].poll() is None
    assert looks(LOOKS_MAX - 1) == []
    assert looks(1) == ["Manager"]  # which Ray believes to be the process without a name
    assert actors["nobody"].wait(60) == -signal.SIGKILL
    assert looks(LOOKS_MAX) == []
    assert {actors[who].poll() for who in ("keeper", "a machine's", "another's")} == {None}


def test_a_redis_that_hangs_is_replaced_and_has_all_that_it_acknowledged(tmp_path, monkeypatch):
    """One that is stopped for a while and goes on is left alone; a connection to it stays open."""
    said: list[str] = []
    monkeypatch.setattr(house_module, "_say", said.append)
    monkeypatch.setattr(house_module, "LOOK_S", 0.0)
    monkeypatch.setattr(watchdog, "ANSWER_S_MAX", 0.01)
    house = House(load(None, {}, {"manager.state_dir": str(tmp_path / "state")}), None)
    house.places.make()
    house._start_redis()
    house._pulse = pulse = Pulse(house.redis_url, house.places.identity)
    server = house._redis
    assert server is not None
    store, first = redis.Redis.from_url(house.redis_url), server.pid

    def answered() -> bool:
        house._replace_stuck()
        return pulse.unanswered == 0

    try:
        store.set("acknowledged", "yes")
        for _ in range(2):
            os.kill(first, signal.SIGSTOP)
            for _ in range(LOOKS_MAX - 1):
                house._replace_stuck()
            os.kill(first, signal.SIGCONT)
            with monkeypatch.context() as patient:  # however busy the machine is
                patient.setattr(house_module, "LOOKS_MAX", math.inf)
                waiting.until("an answer", answered)
        assert said == [""]
        os.kill(first, signal.SIGSTOP)
        for _ in range(LOOKS_MAX):
            house._replace_stuck()
        assert said[1:] == ["Redis hung, and was killed: it is started again"]
        waiting.until("its end", lambda: not server.alive())
        house._revive()
        assert store.get("acknowledged") == b"yes"
    finally:
        house.stop()


def test_a_manager_that_compiles_for_long_is_not_taken_for_hung(server, store, actors, monkeypatch):
    """On a small machine the first compilation takes longer than a silence may; it has no view yet."""
    done = threading.Event()
    monkeypatch.setattr(manager, "rehearse", done.wait)
    monkeypatch.setattr(manager, "SIGN_S", 0.001)
    pulse = Pulse(server.url, OURS)

    async def compile_first() -> None:
        async with redis.asyncio.Redis.from_url(server.url) as client:
            await manager.compile_first(client)

    compiling = threading.Thread(target=asyncio.run, args=[compile_first()])
    compiling.start()
    for _ in range(LOOKS_MAX + 1):
        before = store.get(COMPILES)
        waiting.until("a sign of life", lambda before=before: store.get(COMPILES) != before)
        store.set(PULSE, os.urandom(8))
        assert pulse.look() == []
    done.set()
    compiling.join()
    assert actors["manager"].poll() is None
    last = store.get(COMPILES)
    found = []
    for _ in range(LOOKS_MAX + 1):
        store.set(PULSE, os.urandom(8))
        found += pulse.look()
    assert (found, store.get(COMPILES)) == (["Manager"], last)
