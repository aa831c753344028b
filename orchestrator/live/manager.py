"""The manager as a process: a detached Ray actor that restarts by itself.

The actor holds nothing that must not be lost. It takes a new epoch, reads the journal, and runs the
loop; if the loop breaks, the process ends and Ray starts the next one. A manager that finds itself
superseded ends for good.
"""

import asyncio
import contextlib
import os
import threading
import time
import traceback
from collections.abc import Set as AbstractSet
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import redis

from agent.keys import COMPILES, OPEN_JOBS
from bidding.acquire import decide
from bidding.compiled import CACHE as BIDDING_CODE
from bidding.compiled import forget_old
from bidding.markets.history import Series
from bidding.model import Demand, HeldMachine, Limits, Offer
from cloud.clock import CLOCK
from cloud.model import InstanceType, Pool
from orchestrator.brain.layouts import layout_choice
from orchestrator.brain.purchases.situation import SlotSpeed
from orchestrator.clouds import providers
from orchestrator.config import Config, read
from orchestrator.door.address import first_boot_of
from orchestrator.events import ManagerStarted
from orchestrator.journal import RedisJournal
from orchestrator.live.order import Order
from orchestrator.live.price_files import LEAST_S, QuoteStore, odds_of
from orchestrator.live.world import LiveWorld
from orchestrator.loop import resume, run
from orchestrator.paths import Places
from orchestrator.planner.compiled import CACHE as MORPH_CODE
from orchestrator.redis_client import connect, retry_policy
from orchestrator.settings import Settings
from orchestrator.world import Superseded

if TYPE_CHECKING:
    import redis.asyncio

CRASH_PAUSE_S = 1.0
PUT_AWAY_S_MAX = 120.0
PUT_AWAY_LOOK_S = 0.1
SIGN_S = 5.0
SUPERSEDED = (
    "a manager of another house took over the same Redis (manager.redis_url); this house ends with "
    "what it started itself, and the other one goes on"
)


class Manager:
    """The work of the Ray actor: a thread that runs the loop."""

    def __init__(self, order: bytes) -> None:
        self._order = msgspec.json.decode(order, type=Order)
        self._thread = threading.Thread(target=self._live, name="loop", daemon=True)
        self._thread.start()

    def ping(self) -> int:
        """Return the pid of the actor's process."""
        return os.getpid()

    def _live(self) -> None:
        """Live one life of a manager; end the process after a failure, so that Ray restarts it."""
        places = Places(Path(self._order.state_dir))
        log = places.log("loop")
        try:
            asyncio.run(live(self._order))
        except Superseded as error:
            _write(log, str(error))
        except BaseException as error:
            _write(log, traceback.format_exc())
            with contextlib.suppress(OSError):
                places.broke_off.write_text(str(error) or type(error).__name__)
            time.sleep(CRASH_PAUSE_S)
            self._wait_for_redis()
            os._exit(1)

    def _wait_for_redis(self) -> None:
        """Wait until Redis answers, because the next manager could do nothing without it.

        If Redis died of a full disk, Ray could not start a working manager now either: its new
        process would never become one.
        """
        store = connect(self._order.redis_url)
        while True:
            try:
                store.ping()
            except redis.RedisError:
                time.sleep(CRASH_PAUSE_S)
            else:
                return


async def live(order: Order) -> None:
    """Live from taking over to the clean end: load the state from the journal, run the loop."""
    import redis.asyncio

    from orchestrator.live.ray_engine import RayEngine

    places = Places(Path(order.state_dir))
    config = read(places.settings, order.settings, os.environ)
    store = redis.asyncio.Redis.from_url(order.redis_url, **retry_policy(asynchronous=True))
    await compile_first(store)
    journal, clock = RedisJournal(store), CLOCK
    epoch = await journal.take_over(order.house)
    state = await resume(journal)
    world = LiveWorld(
        store=store,
        journal=journal,
        providers=await asyncio.to_thread(
            providers, config, places.cloud_dir, partial(first_boot_of, config, places)
        ),
        engine=await RayEngine.connect(places),
        clock=clock,
        quotes=QuoteStore(places.quotes),
    )
    await world.open(
        ManagerStarted(
            at_s=clock.now_s(),
            epoch=epoch,
            settings=settings_from(config),
            house=order.house,
            salt=journal.salt,
        )
    )
    try:
        state = await run(world, journal, state, world.set_aside)
        await world.publish(state)
        await put_away(store, state.jobs.keys())
        places.given_back.touch()
    except Superseded:
        if await journal.holder() != order.house:  # else Ray has only started our next manager
            places.superseded.write_text(SUPERSEDED)
        raise
    finally:
        await world.close()
        await store.aclose()


async def put_away(store: "redis.asyncio.Redis", jobs: AbstractSet[str]) -> None:
    """Wait up to `PUT_AWAY_S_MAX` until the keeper has the states of these jobs on the disk.

    The keeper ends with the house, so states that are only in its memory would be lost.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(PUT_AWAY_S_MAX):
            while not jobs.isdisjoint(await _names(store, OPEN_JOBS)):
                await asyncio.sleep(PUT_AWAY_LOOK_S)


async def _names(store: "redis.asyncio.Redis", key: str) -> list[str]:
    keys: Any = store.hkeys(key)
    return [name.decode() for name in await keys]


async def compile_first(store: "redis.asyncio.Redis") -> None:
    """Compile what decisions need, once after an installation, and leave signs of life meanwhile.

    It takes half a minute of processor time, and so many minutes on a small machine that is busy.
    """
    work = asyncio.ensure_future(asyncio.to_thread(rehearse))
    while not work.done():
        with contextlib.suppress(redis.RedisError):
            await store.set(COMPILES, f"{os.getpid()} {time.monotonic()}")
        await asyncio.wait({work}, timeout=SIGN_S)
    await work


def rehearse() -> None:
    """Make mock decisions, so that their arithmetic is compiled or loaded before it is needed."""
    kind = InstanceType(name="none", cloud="none", slots=1, memory_bytes=1, on_demand_usd_per_h=1.0)
    pool = Pool("none", "none", "none", "none")
    offer = Offer(pool=pool, type=kind, market="spot", price_usd_per_h=0.1)
    held = HeldMachine(
        lease="none",
        pool=pool,
        type=kind,
        market="spot",
        price_usd_per_h=0.1,
        bid_usd_per_h=None,
        started_at_s=0.0,
    )
    demand = Demand(work_left=1.0, start_s=1.0, morph_s=1.0, recovery_s=1.0)
    speed = SlotSpeed(types={"none": kind}, slots_max=4)
    decide([offer], [held], demand, Limits(), speed, 0.0)
    layout_choice.rehearse()
    odds_of(Series(at_s=np.array([0.0, 1.0]), value=np.ones(2)), at_s=2 * LEAST_S)
    for cache in (BIDDING_CODE, MORPH_CODE):
        forget_old(cache)


def settings_from(config: Config) -> Settings:
    return Settings(
        deployment=config.manager.deployment,
        budget_usd=config.budget.total_usd,
        usd_per_h_max=config.budget.per_h_usd,
        on_demand_allowed=config.budget.on_demand_allowed,
        manager_usd_per_h=config.manager.usd_per_h,
        regions=tuple(filter(None, (r.strip() for r in (config.buying.regions or "").split(",")))),
        egress_usd_per_gb=config.buying.egress_usd_per_gb,
        disk_usd_per_h=config.buying.disk_usd_per_h,
        billing=config.local.billing,
        silent_after_s=config.silent_after_s,
        quote_max_age_s=config.buying.quote_max_age_s,
        control_period_s=config.manager.control_period_s,
        rethink_s=config.manager.control_period_s,
        boot_timeout_s=config.limits.boot_timeout_s,
        launch_grace_s=config.limits.launch_grace_s,
    )


def _write(log: Path, text: str) -> None:
    """Write a line to the log; on a full disk it is dropped, and the caller goes on."""
    with contextlib.suppress(OSError), log.open("a") as sink:
        sink.write(f"{time.strftime('%F %T')} {text}\n")
