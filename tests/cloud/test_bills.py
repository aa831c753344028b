"""Our bill beside the books of both clouds, through the real providers, brain and loop.

A drawn day: prices move, machines are taken and ended by others, launches fail after their answer,
lists lag. What is charged when all is over is what the cloud charges, to the cent. `BILL_DAYS` is
how many days there are of each cloud.
"""

import asyncio
import os
import random
from collections.abc import Callable
from typing import Any

import pytest
from aws_house import OURS, SETTINGS, AwsHouse
from azure_account import EAST, provider_of
from cloudfake.arm import ArmDoor
from cloudfake.arm import Dials as ArmDials
from cloudfake.arm_catalogue import DISK_USD_PER_H
from cloudfake.ec2_account import GIB_USD_PER_H
from cloudfake.ec2_account import Dials as Ec2Dials
from msgspec.structs import replace
from virtual_manager import VirtualManager

from cloud.aws.calls import Calls

DAYS = int(os.environ.get("BILL_DAYS", "2"))
DAY_S = 900.0
QUEUE = "https://sqs.us-east-1.amazonaws.com/111122223333/events"
AFTER_S = 3700.0  # until every price has been asked for again
CENT = 0.01
HAPPENINGS = 12


class Waiting(Calls):
    """Calls of which one waits for events, as SQS does, while there are none."""

    async def call(self, region: str, service: str, operation: str, **params: Any) -> Any:
        answer = await super().call(region, service, operation, **params)
        if operation == "receive_message" and not answer.get("Messages"):
            await asyncio.sleep(params["WaitTimeSeconds"])
        return answer


Act = Callable[[str, random.Random, float], None]


def plan(seed: int, later: Callable[[float, Callable[[float], None]], None], act: Act) -> None:
    """Draw what happens to the machines of a day, and when."""
    luck = random.Random(seed)
    for _ in range(HAPPENINGS):
        what = luck.choice(("take", "take", "reprice", "reprice", "end"))
        later(luck.uniform(60.0, DAY_S), lambda at_s, what=what: act(what, luck, at_s))


def a_day_on_aws(seed: int) -> tuple[VirtualManager, Any]:
    fails = 0.2 if seed % 2 else 0.0
    house = AwsHouse(Ec2Dials(seed=seed, startup_s=30.0, fails_after_share=fails, lag_s=2.0))
    account, begin_s = house.account, house.clock.now_s()

    def act(what: str, luck: random.Random, at_s: float) -> None:
        alive = [x for x in house.made() if x.state == "running" and x.market == "spot"]
        if what == "reprice":
            for zone in account.region_of:
                for name, kind in account.kinds.items():
                    share = luck.uniform(0.2, 0.9)
                    account.reprice(zone, name, round(share * kind.usd_per_h, 4), at_s)
        elif what == "take" and alive:
            account.interrupt(luck.choice(alive).id, at_s, luck.choice((0.0, 120.0)))
        elif alive:
            account.end(luck.choice(alive), at_s, "Client.UserInitiatedShutdown", "user")

    plan(seed, lambda in_s, do: account.push(begin_s + in_s, do), act)
    manager = VirtualManager(house.clock, OURS, disk_usd_per_h=60 * GIB_USD_PER_H)
    manager.cancel(begin_s + DAY_S)
    settings = replace(SETTINGS, regions=SETTINGS.regions[:1], queue_url=QUEUE)
    calls = Waiting(new_session=lambda: house.session)
    assert manager.live(house.provider(calls, settings), begin_s + DAY_S + AFTER_S)
    return manager, account.books


def a_day_on_azure(seed: int) -> tuple[VirtualManager, Any]:
    failed = 0.3 if seed % 2 else 0.0
    door = ArmDoor(dials=ArmDials(failed=failed, list_lag_s=5.0), seed=seed)
    begin_s = door.now_s

    def act(what: str, luck: random.Random, at_s: float) -> None:
        spot = [x for x in door.vms.values() if x.spot and OURS in x.tags.values()]
        alive = [x for x in spot if x.power == "running"]
        if what == "reprice" and not door.priced_s:  # the list of Azure has no history
            for size in ("Standard_NC4as_T4_v3", "Standard_D4s_v5"):
                door.reprice(size, round(luck.uniform(0.03, 0.15), 4), at_s)
        elif alive:
            door.evicted(luck.choice(alive), at_s)

    plan(seed, door.later, act)
    manager = VirtualManager(door.clock, OURS, disk_usd_per_h=DISK_USD_PER_H)
    manager.cancel(begin_s + DAY_S)
    assert manager.live(provider_of(door, EAST), begin_s + DAY_S + AFTER_S)
    return manager, door.books


@pytest.mark.parametrize("seed", range(DAYS))
@pytest.mark.parametrize("a_day", [a_day_on_aws, a_day_on_azure])
def test_our_bill_is_the_clouds_to_the_cent(a_day: Any, seed: int) -> None:
    manager, books = a_day(seed)
    lines = books.bill(manager.clock.now_s(), OURS)
    assert sum(x.kind == "machine" for x in books.lines.values() if x.owner == OURS) >= 6
    assert abs(manager.spent_usd - sum(lines.values())) < CENT / 2, _told(manager, books)


def _told(manager: VirtualManager, books: Any) -> str:
    """Return both accounts, machine by machine."""
    bill = books.bill(manager.clock.now_s(), OURS)
    ours = {x.machine_id: x for x in manager.leases}
    rows = []
    for name, line in books.lines.items():
        if line.owner == OURS and (line.kind == "machine" or bill[name] > 0):
            lease = ours.get(name.partition("#")[0])
            mine = ""
            if lease is not None:
                span_s = f"{lease.prices[0][0] if lease.prices else 0:.1f} to {lease.gone_at_s:.1f}"
                mine = f"{lease.cost_usd - lease.disk_usd:.5f} {span_s} {lease.why_ended[:40]}"
            began_s = line.steps[0][0] if line.steps else 0.0
            span_s = f"{began_s:.1f} to {line.ended_s or 0:.1f}"
            rows.append(f"{name} {line.kind} {line.ended_by} {bill[name]:.5f} {span_s} | {mine}")
    return "\n".join([f"{manager.spent_usd:.5f} and {sum(bill.values()):.5f}", *rows])
