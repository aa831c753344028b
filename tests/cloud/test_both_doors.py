"""Both clouds at once under one manager that is killed, in an account where everything goes wrong.

A case is a seed. It draws which places fall silent and when, when keys stop to be taken, how wrong the
clocks are, what others and people by hand have in the accounts, how large answers are, and whether a
second manager uses our deployment's name. The judges are the books of both doors.
`ATTACK_SEEDS=FIRST:COUNT` draws others.
"""

import asyncio
import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import requests
from aws_house import EAST, OURS, SETTINGS, AwsHouse
from azure_account import provider_of
from cloudfake import arm_wire
from cloudfake.arm import Answer, ArmDoor
from cloudfake.arm import Dials as ArmDials
from cloudfake.ec2 import drawn_faults
from cloudfake.ec2_account import Dials as Ec2Dials
from msgspec.structs import replace
from test_killed_managers import ARM_DIALS, FAULTS, Doomed
from virtual_manager import Doom, OffClock, VirtualManager

from cloud.aws.provider import AwsProvider
from cloud.model import DEPLOYMENT_TAG
from cloud.provider import Provider
from orchestrator.cli.tools.gc import Held, unclaimed
from orchestrator.events import EventSetAside
from orchestrator.loop import resume

FIRST, _, MANY = os.environ.get("ATTACK_SEEDS", "0:3").partition(":")
WANTED_S, CHAOS_S, CALM_S, SILENT_S = 400.0, 900.0, 90.0, 600.0
HERE = ("us-east-1", "us-west-2", "azure")
MANAGED = "deadbeef0000-1-1"  # how a manager that is gone would have named its launch


class Weather:
    """What goes wrong at which time, drawn from a seed."""

    def __init__(self, seed: int, now_s: Callable[[], float]) -> None:
        self.luck = luck = random.Random(seed)
        self.now_s, self.begin_s = now_s, now_s()
        from_s = luck.uniform(0.0, 300.0)
        self.silent_place = luck.choice(HERE)
        self.silent = (from_s, from_s + SILENT_S)
        from_s = luck.uniform(0.0, 500.0)
        self.keyless = (from_s, from_s + luck.uniform(20.0, 200.0))
        self.off_s = luck.choice((0.0, 0.0, 290.0, -290.0))
        from_s = luck.uniform(0.0, 500.0)
        self.skewed = (from_s, from_s + luck.uniform(0.0, 200.0))
        self.foreign = luck.choice((3, 30, 200))
        self.huge_bytes = luck.choice((0, 1000, 10_000_000))

    def now(self, span: tuple[float, float]) -> bool:
        return span[0] <= self.now_s() - self.begin_s < span[1]

    def is_silent(self, place: str) -> bool:
        return place == self.silent_place and self.now(self.silent)


class Silent(set[str]):
    """The regions that do not answer now."""

    def __init__(self, weather: Weather) -> None:
        super().__init__()
        self._weather = weather

    def __contains__(self, region: object) -> bool:
        return self._weather.is_silent(str(region))


class Wire:
    """A session to the ARM door in this weather, which ends its process at the doom's point."""

    def __init__(self, door: ArmDoor, weather: Weather, doom: Doom) -> None:
        self._door, self._weather, self._doom = door, weather, doom

    def call(self, method: str, *asked: Any) -> Answer:
        self._doom.point(method)
        if self._weather.is_silent("azure"):
            raise requests.exceptions.ConnectTimeout("nobody answers")
        answer = self._door.call(method, *asked)
        self._doom.point(method)
        return answer


class Attacked:
    """Two accounts, what was in them before us, and the managers that live over them."""

    def __init__(self, seed: int) -> None:
        fails = 0.15 if seed % 2 else 0.0
        self.house = house = AwsHouse(
            Ec2Dials(seed=seed, young_s=10.0, lag_s=60.0, startup_s=20.0, fails_after_share=fails),
            room=1000,
        )
        dials: ArmDials = replace(ARM_DIALS[seed % len(ARM_DIALS)], page=1000)
        self.door = ArmDoor(house.clock, dials, seed)
        self.weather = weather = Weather(seed, house.clock.now_s)
        faults = drawn_faults(seed, 0.1, FAULTS)
        self._key = house.door.keys[house.key_id]

        def fault(action: str, nth: int) -> str | None:
            self._turn()
            return faults(action, nth) if weather.now((0.0, CHAOS_S)) else None

        house.door.fault = fault
        house.door.silent = Silent(weather)
        self.door.allowed = lambda _: not weather.now(weather.keyless)
        self.by_hand = self._others()

    def _turn(self) -> None:
        """Let the keys and the date of AWS be as the weather has them."""
        house, weather = self.house, self.weather
        house.door.clock_off_s = 600.0 if weather.now(weather.skewed) else 0.0
        late = house.clock.now_s() - 1 if weather.now(weather.keyless) else None
        house.door.keys[house.key_id] = type(self._key)(secret="secret", expires_s=late)

    def _others(self) -> set[str]:
        """Put in what is not ours, and copies by hand that say they are; return the copies."""
        house, door, weather = self.house, self.door, self.weather
        house.account.dials.machines_burst = 1e9
        client = house.session.client("ec2", region_name="us-east-1")
        house.door.fault = lambda *_: None
        for owner, count, token in (
            ("theirs", weather.foreign, "t-0"),
            (OURS, 2, "t-0"),
            (OURS, 1, f"{OURS}-{MANAGED}"),
        ):
            tags = {DEPLOYMENT_TAG: owner, "orchestrator-token": token}
            client.run_instances(
                ImageId="ami-us-east-1",
                InstanceType="m7i.xlarge",
                MinCount=count,
                MaxCount=count,
                ClientToken=f"hand-{owner}-{token}",
                TagSpecifications=[
                    {
                        "ResourceType": "instance",
                        "Tags": [{"Key": key, "Value": value} for key, value in tags.items()],
                    }
                ],
            )
        for nth in range(weather.foreign):
            door.plant(f"web-{nth + 2}", {DEPLOYMENT_TAG: "theirs"})
        door.plant("copy", {DEPLOYMENT_TAG: OURS, "orchestrator-token": "t-0"})
        door.plant("huge", {"note": "x" * weather.huge_bytes})
        lines = {**house.account.books.lines, **door.books.lines}
        return {name for name, line in lines.items() if line.owner == OURS}

    def providers(self, doom: Doom) -> list[Provider]:
        house, clock = self.house, OffClock(self.house.clock, self.weather.off_s)
        aws = AwsProvider(SETTINGS, OURS, Doomed(house, doom), clock)
        wire = arm_wire.session(Wire(self.door, self.weather, doom))
        azure = provider_of(self.door, session=wire)
        return [aws, azure]

    def manager(self, salt: str = "") -> VirtualManager:
        return VirtualManager(
            self.house.clock, OURS, machines=6, off_s=self.weather.off_s, salt=salt
        )

    def after(self) -> dict[str, list[str]]:
        """Return what the books hold against us once all is over and calm."""
        house, door, weather = self.house, self.door, self.weather
        house.wait(max(0.0, weather.begin_s + CHAOS_S - house.clock.now_s()) + CALM_S)
        door.work_off(house.clock.now_s())
        found: dict[str, list[str]] = {"bought twice": [], "left": [], "touched": []}
        for books in (house.account.books, door.books):
            found["bought twice"] += [x for x in books.bought_twice() if x != "t-0"]
            found["left"] += [x.id for x in books.alive(OURS) if x.id not in self.by_hand]
            found["touched"] += books.touched(OURS)
            hands = [x for name, x in books.lines.items() if name in self.by_hand]
            found["touched"] += [x.id for x in hands if x.ended_by == "user"]
        return found


CLEAN: dict[str, list[str]] = {"bought twice": [], "left": [], "touched": []}


def ends_at_s(attacked: Attacked) -> float:
    return attacked.weather.begin_s + WANTED_S


def aside(manager: VirtualManager) -> list[str]:
    """Return what the manager set aside, because it could not decide about it."""
    found = [x.event for x in manager.journal.entries]
    return [event.why for event in found if isinstance(event, EventSetAside)]


@pytest.mark.parametrize("seed", range(int(FIRST), int(FIRST) + int(MANY)))
def test_a_killed_manager_of_both_clouds_buys_once_and_leaves_nothing(seed: int):
    attacked = Attacked(seed)
    first, doom = attacked.manager(), Doom(attacked.weather.luck.randrange(5, 400))
    if not first.live(attacked.providers(doom), ends_at_s(attacked), doom):
        attacked.house.wait(attacked.weather.luck.uniform(0.0, 30.0))
        first.live(attacked.providers(Doom(0)), ends_at_s(attacked))
    assert attacked.after() == CLEAN
    assert aside(first) == []


@pytest.mark.parametrize("seed", range(int(FIRST), int(FIRST) + int(MANY)))
def test_two_managers_of_one_name_end_what_they_bought_and_no_more(seed: int):
    """The second one comes later; both train on, and each gives back what it bought itself."""
    attacked = Attacked(seed)
    first, second = attacked.manager("a"), attacked.manager("b")
    first.live(
        attacked.providers(Doom(0)),
        ends_at_s(attacked),
        beside=[(second, attacked.providers(Doom(0)))],
    )
    assert attacked.after() == CLEAN
    assert aside(first) + aside(second) == []


def test_gc_would_end_no_machine_that_a_lease_claims():
    """The machines of one launch share its token; each of them is a lease's, and one more is not."""
    house = AwsHouse()
    manager, points = VirtualManager(house.clock, OURS, machines=3), Doom(0)
    end_s = house.clock.now_s() + WANTED_S
    manager.live(house.provider(Doomed(house, points)), end_s, points)
    bought = points.points.index("run_instances")
    doom = Doom(points.points.index("describe_instances", bought + 4) + 1)
    house = AwsHouse()
    manager = VirtualManager(house.clock, OURS, machines=3)
    assert not manager.live(house.provider(Doomed(house, doom)), end_s, doom)
    state = asyncio.run(resume(manager.journal))
    machines = house.play(lambda provider: provider.list(EAST)).machines
    held = [Held(one.ref, one.token, "machine", one.index) for one in machines]
    assert len({one.token for one in machines}) < len(machines) == 3
    assert unclaimed(held, state) == ([], 0)
    more = replace(held[0], index=3)
    assert unclaimed([*held, more], state) == ([more], 0)
