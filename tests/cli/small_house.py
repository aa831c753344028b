"""A house without Ray, for tests of the command line: the real Redis, the real local cloud, the real
brain in its real world; only what would run on the machines is played here.

    python small_house.py STATE_DIR [HOLD]

As long as there is a file HOLD its manager does not begin.

A played machine joins as soon as it runs. A played worker does what the script's bytes say: those
with `raise` fail with a traceback, the others commit all their steps at once, unless they say `wait`. Those
with `deep` can be cut into four stages.
"""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import msgspec
import redis.asyncio

from agent.keys import INBOX
from agent.messages import AgentJoined, JobCompleted, Progress, WorkerFailed, WorkerReady
from cloud import private
from cloud.clock import SystemClock
from cloud.errors import CloudError
from cloud.local.provider import LocalProvider
from cloud.provider import all_machines
from orchestrator.actions import OpenJob, Regroup, StartWorker
from orchestrator.client import House
from orchestrator.config import in_force, load
from orchestrator.events import ManagerStarted
from orchestrator.journal import RedisJournal
from orchestrator.live.price_files import QuoteStore
from orchestrator.live.world import LiveWorld
from orchestrator.loop import run
from orchestrator.paths import Places
from orchestrator.redis_client import retry_policy
from orchestrator.settings import Settings
from orchestrator.state import State
from orchestrator.supervisor import processes
from orchestrator.supervisor.redis_server import RedisServer
from orchestrator.supervisor.supervisor import only_one

STEPS = 8
TRACEBACK = (
    'Traceback (most recent call last):\n  File "s.py", line 1, in <module>\nValueError: on purpose'
)
START_S_MAX = 60.0


class PlayedMachines:
    """In place of Ray: machines join, workers start, and tell the manager what a script would."""

    def __init__(self, store: "redis.asyncio.Redis", cloud: LocalProvider) -> None:
        self._store, self._cloud = store, cloud
        self._joined: set[str] = set()
        self._scripts: dict[str, bytes] = {}

    async def machines(self) -> set[str]:
        try:
            running = {m.id for m in await all_machines(self._cloud) if m.state == "running"}
        except CloudError:
            return self._joined
        for machine in sorted(running - self._joined):
            await self._tell(AgentJoined(at_s=time.time(), machine_id=machine, address="", slots=2))
        self._joined = running
        return running

    async def do(self, action: Any) -> Awaitable[None]:
        now_s = time.time()
        match action:
            case OpenJob():
                data = await self._store.get(f"orch:script:{action.order.script_sha}")
                self._scripts[action.order.job] = data or b""
            case StartWorker():
                await self._start(action, now_s)
            case Regroup():
                await self._train(action, now_s)
        return asyncio.sleep(0)

    async def _start(self, action: StartWorker, now_s: float) -> None:
        job, worker = action.job, action.worker
        if b"raise" in self._scripts[job]:
            failed = WorkerFailed(
                at_s=now_s, job=job, worker=worker, kind="exception", detail=TRACEBACK
            )
            await self._tell(failed)
            return
        await self._store.xadd(
            f"orch:log:{job}", {"worker": worker, "line": "hello from the script"}
        )
        cut = {"uncuttable": "", "stages_max": 4} if b"deep" in self._scripts[job] else {}
        await self._tell(
            WorkerReady(
                at_s=now_s,
                job=job,
                worker=worker,
                machine_id=action.machine_id,
                microbatches=4,
                steps_total=STEPS,
                state_bytes=1000,
                **cut,
            )
        )

    async def _train(self, action: Regroup, now_s: float) -> None:
        job, generation = action.job, action.layout.generation
        if b"wait" in self._scripts[job]:
            return
        await self._tell(
            Progress(
                at_s=now_s,
                job=job,
                generation=generation,
                step=STEPS,
                steps_total=STEPS,
                loss=0.5,
                step_s=0.1,
            )
        )
        await self._tell(
            JobCompleted(
                at_s=now_s,
                job=job,
                step=STEPS,
                loss=0.5,
                weights_sha="",
                export_uri="/m.safetensors",
            )
        )

    async def _tell(self, event: Any) -> None:
        await self._store.xadd(INBOX, {"e": msgspec.json.encode(event)})


async def live(places: Places, url: str) -> None:
    store = redis.asyncio.Redis.from_url(url, **retry_policy(asynchronous=True))
    ready = msgspec.json.decode((places.cloud_dir / "cloud.json").read_bytes())
    token = (places.cloud_dir / "token").read_text().strip()
    cloud = LocalProvider(ready["url"], token, "default")
    journal = RedisJournal(store)
    epoch = await journal.take_over()
    world = LiveWorld(
        store=store,
        journal=journal,
        providers={"local": cloud},
        engine=PlayedMachines(store, cloud),
        clock=SystemClock(),
        quotes=QuoteStore(places.quotes),
    )
    settings = Settings(
        control_period_s=0.2, rethink_s=0.2, listing_period_s=0.2, launch_grace_s=2.0
    )
    await world.open(ManagerStarted(at_s=time.time(), epoch=epoch, settings=settings))
    state = await run(world, journal, State())
    await world.publish(state)
    places.given_back.touch()
    await world.close()
    await store.aclose()
    await cloud.close()


def main() -> None:
    places = Places(Path(sys.argv[1]))
    env = {**os.environ, processes.MARK: places.identity}
    server = RedisServer(places, env)
    with only_one(places):
        server.start()
        cloud = _start_cloud(places, env)
        told = House(
            pid=os.getpid(),
            redis_url=server.url,
            dashboard_url="http://127.0.0.1:1/",
            ray_address="",
            local_cloud=str(places.cloud_dir),
            deployment="default",
            started_at_s=time.time(),
            settings=in_force(load(None, {})),
        )
        private.write(places.house, msgspec.json.encode(told))
        try:
            while sys.argv[2:] and Path(sys.argv[2]).exists():
                time.sleep(0.02)
            asyncio.run(live(places, server.url))
        finally:
            places.house.unlink(missing_ok=True)
            processes.end(cloud)
            server.stop()
            places.remove_links()


def _start_cloud(places: Places, env: dict[str, str]) -> "subprocess.Popen[bytes]":
    boot = places.state_dir / "boot.sh"
    boot.write_text("#!/bin/sh\nexec sleep 600\n")
    boot.chmod(0o700)
    words = ["-m", "cloud.local", "--dir", str(places.cloud_dir), "--startup-s", "0.05"]
    words += ["--tempo", "0", "--refused-share", "0", "--boot-script", str(boot)]
    cloud = processes.start([sys.executable, *words], env=env, log=places.log("cloud"))
    deadline = time.monotonic() + START_S_MAX
    while not (places.cloud_dir / "cloud.json").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    return cloud


if __name__ == "__main__":
    main()
