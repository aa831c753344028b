"""A manager that is killed at every await of launch, list and end, while EC2 behaves badly.

The judge is the cloud's own books: nothing bought twice, nothing of ours left, nothing foreign
touched. The manager here is the rules of "The loop" in docs/design.md and no more, so that it can be
killed thousands of times: the intent is durable before the call; what is listed under an intent is
adopted; an intent that is not listed after the grace is dropped, and its token with it; what is
listed as ours and claimed by no lease is ended.
"""

import asyncio
import os
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
from aws_house import EAST, OTHER_ZONE, OURS, AwsHouse, request
from cloudfake.books import draw
from cloudfake.ec2 import drawn_faults
from cloudfake.ec2_account import Dials

from cloud.aws.calls import Calls
from cloud.aws.provider import PACE, AwsProvider
from cloud.errors import CloudError, Refused
from cloud.model import DEPLOYMENT_TAG, LaunchRequest, Machine

SEEDS = int(os.environ.get("CRASH_SEEDS", "2"))
TICK_S = 10.0
WANTED_S = 160.0
CHAOS_S = 260.0
END_S = CHAOS_S + 90.0
FAULTS = ("before", "after", "broken", "broken after", "throttle", "garbled0", "garbled2")


class Killed(BaseException):
    """The manager's process is gone."""


class Doomed(Calls):
    """Calls that end their process at the nth await: before a call is sent, or before its answer."""

    def __init__(self, house: AwsHouse, dies_at: int) -> None:
        super().__init__(new_session=lambda: house.session)
        self.dies_at, self.awaits = dies_at, 0
        self.names: list[str] = []

    async def call(self, region: str, service: str, operation: str, **params: Any) -> Any:
        self._await(operation)
        try:
            answer = await super().call(region, service, operation, **params)
        finally:
            self._await(operation)
        return answer

    def _await(self, operation: str) -> None:
        self.names.append(operation)
        self.awaits += 1
        if self.awaits - 1 == self.dies_at:
            raise Killed


class Lease:
    def __init__(self, request: LaunchRequest, at_s: float) -> None:
        self.request, self.at_s, self.state = request, at_s, "intended"


class Manager:
    """One life; `journal` outlives it."""

    def __init__(self, provider: AwsProvider, journal: list[Lease], house: AwsHouse) -> None:
        self.provider, self.journal, self.house = provider, journal, house

    async def turn(self, wanted: bool) -> None:
        now_s = self.house.clock.now_s()
        try:
            listing = await self.provider.list(EAST)
            self._settle(listing.machines, now_s)
            kept = {x.request.token for x in self.journal if x.state in ("intended", "held")}
            stray = [m.ref for m in listing.machines if not m.gone and m.token not in kept]
            stray += [
                x.ref
                for x in listing.leftovers
                if x.token not in kept and x.created_at_s < now_s - PACE.grace_s / 2
            ]
            if stray:
                await self.provider.end(stray)
        except CloudError:
            return
        if not wanted:
            for lease in self.journal:
                lease.state = "dropped" if lease.state == "held" else lease.state
        elif not any(x.state in ("intended", "held") for x in self.journal):
            await self._buy(now_s)

    def _settle(self, machines: Iterable[Machine], now_s: float) -> None:
        for lease in self.journal:
            mine = [m for m in machines if m.token == lease.request.token]
            missing = not mine and now_s > lease.at_s + PACE.grace_s
            if lease.state in ("intended", "held"):
                if mine:
                    lease.state = "dropped" if any(m.gone for m in mine) else "held"
                elif missing:
                    lease.state = "dropped"

    async def _buy(self, now_s: float) -> None:
        token = f"t-{len(self.journal)}"
        lease = Lease(request(token, count=2), now_s)
        self.journal.append(lease)
        try:
            await self.provider.launch(lease.request)
        except Refused:
            lease.state = "dropped"
        except CloudError:
            pass  # the list will tell
        else:
            lease.state = "held"


def played(seed: int, dies_at: int, share: float = 0.15) -> tuple[AwsHouse, list[str], list[Lease]]:
    """Run one case to its end; return the account, the names of all awaits, and the journal."""
    dials = Dials(
        seed=seed,
        young_s=10.0,
        lag_s=60.0,
        startup_s=20.0,
        fails_after_share=0.15 if seed % 2 else 0,
    )
    house = AwsHouse(dials)
    if seed % 3 == 2:
        dials.describe_burst, dials.describe_per_s = 5.0, 0.2
    faults = drawn_faults(seed, share, FAULTS)
    begin_s = house.clock.now_s()

    def fault(action: str, nth: int) -> str | None:
        calm = house.clock.now_s() > begin_s + CHAOS_S
        return None if calm else faults(action, nth)

    house.door.fault = fault
    ec2 = house.session.client("ec2", region_name="us-east-1")
    house.door.fault = lambda action, nth: None
    for owner in ("theirs", ""):
        tags = [
            {"Key": DEPLOYMENT_TAG, "Value": owner},
            {"Key": "orchestrator-token", "Value": "t-0"},
        ]
        ec2.run_instances(
            ImageId="ami-us-east-1", InstanceType="m7i.xlarge", MinCount=1, MaxCount=1,
            ClientToken=f"hand-{owner}",
            TagSpecifications=[{"ResourceType": "instance", "Tags": tags if owner else tags[1:]}],
        )  # fmt: skip
    house.door.fault = fault
    doomed, journal = Doomed(house, dies_at), []

    async def life() -> None:
        manager = Manager(house.provider(doomed), journal, house)
        while house.clock.now_s() < begin_s + END_S:
            await manager.turn(house.clock.now_s() < begin_s + WANTED_S)
            house.wait(TICK_S)

    async def lives() -> None:
        try:
            await life()
        except Killed:
            await doomed.close()
            doomed._executors.clear()
            house.wait(5 * draw(seed, dies_at))
            await life()
        await doomed.close()

    asyncio.run(lives())
    return house, doomed.names, journal


def faults_of(house: AwsHouse) -> dict[str, list[str]]:
    """What the books hold against the manager."""
    books = house.account.books
    return {
        "bought twice": books.bought_twice(),
        "left": [line.id for line in books.alive(OURS)],
        "touched": books.touched(OURS),
    }


CLEAN = {"bought twice": [], "left": [], "touched": []}


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_manager_killed_at_any_await_buys_once_and_leaves_nothing(seed: int):
    """Awaits of every kind of call, in each seed; with CRASH_SEEDS=20 all awaits of all."""
    house, names, journal = played(seed, -1)
    assert faults_of(house) == CLEAN
    assert journal
    seen: Counter[str] = Counter()
    points = []
    for nth, name in enumerate(names):
        seen[name] += 1
        most = 3 if name.startswith(("run", "terminate", "delete", "cancel")) else 1
        if SEEDS > 2 or seen[name] <= most:
            points.append(nth)
    assert len(names) >= 12
    bad = {}
    for nth in points:
        house, _, _ = played(seed, nth)
        if (found := faults_of(house)) != CLEAN:
            bad[nth, names[nth]] = found
    assert bad == {}


def test_the_judge_sees_a_machine_that_is_bought_twice_and_one_that_is_left():
    """Two zones under one token, and no manager to end them: the books say both."""
    house = AwsHouse()

    async def scene(provider: AwsProvider) -> None:
        await provider.launch(request("t-1"))
        await provider.launch(request("t-1", OTHER_ZONE))

    house.play(scene)
    found = faults_of(house)
    assert found["bought twice"] == ["t-1"]
    assert len(found["left"]) == 6
