"""The real manager is killed at any await of any call, while its cloud behaves badly.

The judge is the cloud's own books: nothing bought twice, nothing of ours left, nothing foreign
touched. A case is a seed and the point at which the first life ends; the second one settles what it
finds in the journal and in the lists, and gives everything back. The first life of a seed is lived
once, and at each point at which it is to end a fork of the process goes on as if it had. `CRASH_CASES`
is how many cases there are of each cloud, from the seed `CRASH_SEED` on: a few here, ten thousand
together in `make nightly`.
"""

import asyncio
import json
import os
import traceback
from collections.abc import Collection
from typing import Any

import pytest
from aws_house import OTHER_ZONE, OURS, AwsHouse
from aws_house import request as aws_request
from azure_account import provider_of
from cloudfake import arm_wire
from cloudfake.arm import ArmDoor
from cloudfake.arm import Dials as ArmDials
from cloudfake.books import Books, draw
from cloudfake.ec2 import drawn_faults
from cloudfake.ec2_account import Dials as Ec2Dials
from virtual_manager import Doom, VirtualManager

from cloud.aws.calls import Calls
from cloud.model import DEPLOYMENT_TAG

CASES = int(os.environ.get("CRASH_CASES", "8"))
SEED = int(os.environ.get("CRASH_SEED", "0"))
POINTS = 2 if CASES < 100 else 20  # of each seed; the first four seeds are all kinds of bad days
WANTED_S = 160.0
CHAOS_S = 260.0
CALM_S = 90.0
POINTS_MIN = 12
FAULTS = ("before", "after", "broken", "broken after", "throttle", "garbled0", "garbled2")
CHANGING = ("run_", "terminate_", "delete_", "cancel_", "PUT", "DELETE")
CLEAN: dict[str, list[str]] = {"bought twice": [], "left": [], "touched": []}


def held_against(books: Books) -> dict[str, list[str]]:
    return {
        "bought twice": books.bought_twice(),
        "left": [line.id for line in books.alive(OURS)],
        "touched": books.touched(OURS),
    }


class Doomed(Calls):
    """Calls to AWS that end their process: before one is sent, or before its answer is read."""

    def __init__(self, house: AwsHouse, doom: Doom) -> None:
        super().__init__(new_session=lambda: house.session)
        self._doom = doom

    async def call(self, region: str, service: str, operation: str, **params: Any) -> Any:
        self._doom.point(operation)
        try:
            return await super().call(region, service, operation, **params)
        finally:
            self._doom.point(operation)


class Forking(Doom):
    """Goes on living, and at each of these points leaves it to a fork to die there and be judged."""

    def __init__(self, points: Collection[int]) -> None:
        super().__init__(0)
        self._wanted = frozenset(points)
        self._answer: int | None = None  # where a fork says what became of it
        self.judged: dict[int, Any] = {}

    def point(self, name: str = "") -> None:
        nth = len(self.points) + 1
        if nth in self._wanted and self._answer is None:
            reader, writer = os.pipe()
            loop = asyncio.get_running_loop()
            pid = os.fork()
            if pid == 0:
                asyncio.events._set_running_loop(loop)  # a loop knows in which process it runs
                self._answer, self._at = writer, nth
            else:
                os.close(writer)
                with os.fdopen(reader, "rb") as told:
                    self.judged[nth] = json.loads(told.read())
                os.waitpid(pid, 0)
        super().point(name)

    def judge(self, killed: Any, seed: int) -> dict[int, Any]:
        """Return what the books hold against us, by the point at which the first life ended."""
        try:
            found, _ = killed(seed, self)
        except BaseException:
            if self._answer is None:
                raise
            found = {"failed": [traceback.format_exc()]}
        if self._answer is not None:
            os.write(self._answer, json.dumps(found).encode())
            os._exit(0)
        return {**self.judged, 0: found}


def killed_on_aws(seed: int, doom: Doom) -> tuple[dict[str, list[str]], list[str]]:
    """Play a case; return what the books hold against us, and the points of the first life."""
    dials = Ec2Dials(
        seed=seed,
        young_s=10.0,
        lag_s=60.0,
        startup_s=20.0,
        fails_after_share=0.15 if seed % 2 else 0,
    )
    if seed % 3 == 2:
        dials.describe_burst, dials.describe_per_s = 5.0, 0.2
    house = AwsHouse(dials)
    begin_s = house.clock.now_s()
    _others(house)
    faults = drawn_faults(seed, 0.15, FAULTS)
    house.door.fault = lambda action, nth: (
        None if house.clock.now_s() > begin_s + CHAOS_S else faults(action, nth)
    )
    manager = VirtualManager(house.clock, OURS)
    if not manager.live(house.provider(Doomed(house, doom)), begin_s + WANTED_S, doom):
        house.wait(5 * draw(seed, len(doom.points)))
        manager.live(house.provider(Calls(new_session=lambda: house.session)), begin_s + WANTED_S)
    house.wait(max(0.0, begin_s + CHAOS_S - house.clock.now_s()) + CALM_S)
    return held_against(house.account.books), doom.points


def _others(house: AwsHouse) -> None:
    """Put machines of others into the account: another deployment's, and one made by hand."""
    ec2 = house.session.client("ec2", region_name="us-east-1")
    for owner in ("theirs", ""):
        tags = [
            {"Key": DEPLOYMENT_TAG, "Value": owner},
            {"Key": "orchestrator-token", "Value": "t-0"},
        ]
        ec2.run_instances(
            ImageId="ami-us-east-1",
            InstanceType="m7i.xlarge",
            MinCount=1,
            MaxCount=1,
            ClientToken=f"hand-{owner}",
            TagSpecifications=[{"ResourceType": "instance", "Tags": tags if owner else tags[1:]}],
        )


ARM_DIALS = (
    ArmDials(),
    ArmDials(failed=0.4, delete_failed=0.3, refused=0.2, stranded=0.7, list_lag_s=60.0),
    ArmDials(stumbles=0.3, honours_create_only=False, list_lag_s=30.0),
    ArmDials(burst=12, per_s=0.4, failed=0.2),
)


class Wire:
    """A session to the ARM door that ends its process: before a request, or before its answer."""

    def __init__(self, door: ArmDoor, doom: Doom) -> None:
        self._door, self._doom = door, doom

    def call(self, method: str, *asked: Any) -> Any:
        self._doom.point(method)
        answer = self._door.call(method, *asked)
        self._doom.point(method)
        return answer


def killed_on_azure(seed: int, doom: Doom) -> tuple[dict[str, list[str]], list[str]]:
    door = ArmDoor(dials=ARM_DIALS[seed % len(ARM_DIALS)], seed=seed)
    begin_s = door.now_s
    manager = VirtualManager(door.clock, OURS)
    first = provider_of(door, session=arm_wire.session(Wire(door, doom)))
    if not manager.live(first, begin_s + WANTED_S, doom):
        door.pass_s(5 * draw(seed, len(doom.points)))
        manager.live(provider_of(door), begin_s + WANTED_S)
    door.pass_s(CALM_S)
    assert len(door.books.alive("theirs")) == 3
    return held_against(door.books), doom.points


def cases(points: list[str], seed: int) -> list[int]:
    """Return points of a life, half of them at calls that change something, as far as there are."""
    changing = [nth for nth, name in enumerate(points, 1) if name.startswith(CHANGING)]
    drawn: dict[int, None] = {}
    for nth in range(10 * POINTS):
        some = changing if nth % 2 and changing else range(1, len(points) + 1)
        drawn[some[int(draw(seed, nth) * len(some))]] = None
    return [*drawn][:POINTS]


@pytest.mark.timeout(0)  # the nightly one takes hours
@pytest.mark.parametrize("killed", [killed_on_aws, killed_on_azure])
def test_a_manager_killed_anywhere_buys_once_and_leaves_nothing(killed: Any):
    bad = {}
    for seed in range(SEED, SEED + CASES // POINTS):
        _, points = killed(seed, Doom(0))
        assert len(points) >= POINTS_MIN
        judged = Forking(cases(points, seed)).judge(killed, seed)
        bad |= {(seed, at): found for at, found in judged.items() if found != CLEAN}
    assert bad == {}


def test_the_judge_sees_a_machine_that_is_bought_twice_and_one_that_is_left():
    """Two zones under one token, and no manager to end them: the books say both."""
    house = AwsHouse()

    async def scene(provider: Any) -> None:
        await provider.launch(aws_request("t-1"))
        await provider.launch(aws_request("t-1", OTHER_ZONE))

    house.play(scene)
    found = held_against(house.account.books)
    assert found["bought twice"] == ["t-1"]
    assert len(found["left"]) == 6
