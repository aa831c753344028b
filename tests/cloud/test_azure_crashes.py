"""The manager is killed at every request to Azure, before it is sent and after its answer is lost.

The door's books are the judge: nothing is bought twice, nothing of ours is left, and nothing of
others is touched. The manager here is the shortest that keeps the journal's rules: an intent is
written before its launch, a token is used once, and what no lease claims is ended.
"""

import asyncio
import os

import msgspec
import pytest
from azure_account import D4, OURS, PLACE, T4, provider_of, request
from cloudfake.arm import ArmDoor, Dials
from cloudfake.books import draw

from cloud.azure.provider import AzureProvider
from cloud.errors import CloudError, Refused

GRACE_S = 120.0
SEEDS = range(int(os.environ.get("AZURE_CRASH_SEEDS", "6")))
DIALS = {
    "calm": Dials(),
    "failures": Dials(failed=0.4, delete_failed=0.3, refused=0.2, stranded=0.7, list_lag_s=60.0),
    "losses": Dials(stumbles=0.3, honours_create_only=False, list_lag_s=30.0),
    "throttled": Dials(burst=12, per_s=0.4, failed=0.2),
}


class Killed(BaseException):
    """The manager's process is gone: nothing in it may handle this."""


class Wire:
    """A session to the door that kills the manager at its `at`-th point, and loses that answer."""

    def __init__(self, door: ArmDoor, at: int) -> None:
        self._door, self._at, self.points = door, at, 0

    def call(self, *asked):
        self._point()
        answer = self._door.call(*asked)
        self._point()
        return answer

    def _point(self) -> None:
        self.points += 1
        if self.points == self._at:
            raise Killed


class Lease(msgspec.Struct):
    token: str
    asked_s: float
    state: str = "intent"


class Manager:
    """One life of a manager after another, over the same journal."""

    def __init__(self, door: ArmDoor) -> None:
        self.door = door
        self.journal: dict[str, Lease] = {}
        self.seen_s: dict[str, float] = {}

    async def life(self, provider: AzureProvider, wanted: list[str]) -> None:
        """Settle what earlier lives left, buy what is wanted, then give everything back."""
        await self.settle(provider)
        for token in wanted:
            if token not in self.journal:
                self.journal[token] = Lease(token, self.door.now_s)
                await self.launch(provider, self.journal[token])
        self.door.pass_s(45)
        await self.settle(provider)
        for lease in self.journal.values():
            lease.state = "ending" if lease.state in ("intent", "held") else lease.state
        await self.settle(provider)

    async def launch(self, provider: AzureProvider, lease: Lease) -> None:
        pool = T4 if int(lease.token[-1]) % 2 else D4
        try:
            await provider.launch(request(lease.token, pool))
            lease.state = "held"
        except Refused:
            lease.state = "ended"
        except CloudError:
            pass  # the list will tell

    async def settle(self, provider: AzureProvider) -> None:
        """Compare the list with the journal, and end what is failed, unclaimed or left over."""
        try:
            listing = await provider.list(PLACE)
            refs = []
            for machine in listing.machines:
                lease = self.journal.get(machine.token)
                claimed = lease is not None and lease.state in ("intent", "held")
                if not claimed or machine.state in ("failed", "stopped"):
                    refs.append(machine.ref)
            for left in listing.leftovers:
                if left.created_at_s + GRACE_S / 2 < self.door.now_s:
                    refs.append(left.ref)
            await provider.end(refs)
        except CloudError:
            pass  # asked again in the next turn


def lives(door: ArmDoor, at: int) -> int:
    """Kill a manager at a point of its first life, let a second one settle; return the points."""
    manager, wire = Manager(door), Wire(door, at)

    async def first() -> None:
        provider = provider_of(door, session=session(wire))
        try:
            await manager.life(provider, ["t-1", "t-2"])
        except Killed:
            pass
        finally:
            await provider.close()

    async def second() -> None:
        provider = provider_of(door)
        for lease in manager.journal.values():
            lease.state = "ended"
        for _ in range(60):
            await manager.settle(provider)
            door.pass_s(15)
            if not door.books.alive(OURS):
                break
        await provider.close()

    asyncio.run(first())
    door.pass_s(GRACE_S)
    asyncio.run(second())
    door.pass_s(200)  # whatever was asked of Azure by now comes about
    return wire.points


def session(wire: Wire):
    from cloudfake.arm_wire import session as made

    return made(wire)


def judge(door: ArmDoor, what: str) -> None:
    assert door.books.bought_twice() == [], what
    assert [line.id for line in door.books.alive(OURS)] == [], what
    assert door.books.touched(OURS) == [], what
    assert len(door.books.alive("theirs")) == 3, what


@pytest.mark.parametrize("dials", DIALS, ids=str)
def test_a_kill_at_any_request_buys_nothing_twice_and_leaves_nothing(dials):
    """Every point of every life is tried: before a request goes out, and after its answer."""
    cases = 0
    for seed in SEEDS:
        points = lives(ArmDoor(dials=DIALS[dials], seed=seed), at=0)
        assert points >= 12
        for at in range(1, points + 1, 1 if seed == 0 else 5):
            door = ArmDoor(dials=DIALS[dials], seed=seed)
            lives(door, at + int(draw(seed, at) * 5) * (seed > 0))
            judge(door, f"{dials}, seed {seed}, point {at}")
            cases += 1
    assert cases >= 6 * len(SEEDS)
