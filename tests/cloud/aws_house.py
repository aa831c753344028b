"""A provider of AWS in front of the fake EC2, with a virtual clock: what tests of it stand on.

boto3 talks to the door without a socket: its own hook before sending hands each request over and takes
the answer. What boto3 builds, signs, checks and parses is all real. `fault` decides what goes wrong.
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Mapping
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import boto3
from botocore.awsrequest import AWSResponse
from botocore.exceptions import ConnectionClosedError
from botocore.session import Session as CoreSession

sys.path.insert(0, str(Path(__file__).parents[1]))

from cloudfake.ec2 import Ec2Door, Key, Lost
from cloudfake.ec2_account import Account, Dials

from cloud.aws.calls import Calls
from cloud.aws.provider import AwsProvider
from cloud.aws.settings import AwsSettings, Region
from cloud.clock import VirtualClock
from cloud.model import DEPLOYMENT_TAG, LaunchRequest, Market, Place, Pool

OURS = "ours"
ZONES = {"us-east-1": ("us-east-1a", "us-east-1b"), "us-west-2": ("us-west-2a",)}
EAST = Place("aws", "us-east-1")
WEST = Place("aws", "us-west-2")
GPU = Pool(cloud="aws", region="us-east-1", zone="us-east-1a", type="g5.xlarge")
BIG = Pool(cloud="aws", region="us-east-1", zone="us-east-1a", type="g5.12xlarge")
OTHER_ZONE = Pool(cloud="aws", region="us-east-1", zone="us-east-1b", type="g5.xlarge")
FAR = Pool(cloud="aws", region="us-west-2", zone="us-west-2a", type="g5.xlarge")
BEGIN_S = 1_800_000_000.0
SETTINGS = AwsSettings(
    regions=tuple(
        Region(
            name=name,
            image=f"ami-{name}",
            subnets={zone: f"subnet-{zone}" for zone in zones},
            security_group=f"sg-{name}",
        )
        for name, zones in ZONES.items()
    ),
    types=("g5.*", "m7i.*"),
    instance_profile="workers",
    drill_role="arn:aws:iam::111122223333:role/drill",
    user_data="#!/bin/sh\nexec boot\n",
)


def request(
    token: str,
    pool: Pool = GPU,
    market: Market = "spot",
    count: int = 1,
    bid: float | None = None,
    tags: Mapping[str, str] | None = None,
) -> LaunchRequest:
    marks = {DEPLOYMENT_TAG: OURS, "orchestrator-job": "j-1"} if tags is None else dict(tags)
    return LaunchRequest(
        token=token, pool=pool, market=market, count=count, bid_usd_per_h=bid, tags=marks
    )


class _Raw:
    """A body as urllib3 hands it over."""

    def __init__(self, body: bytes) -> None:
        self._body = body

    def stream(self, *_: Any, **__: Any) -> Any:
        yield self._body


DOORS: WeakValueDictionary[str, Ec2Door] = WeakValueDictionary()
NUMBERS = count()
"""By the key that opens them: one session of boto3, which is dear to make, serves all houses."""


def _send(request: Any, **_: Any) -> AWSResponse:
    """Hand a request to the door that its key opens."""
    headers = {
        name: told.decode() if isinstance(told, bytes) else str(told)
        for name, told in request.headers.items()
    }
    body = request.body or b""
    door = DOORS[headers["Authorization"].partition("Credential=")[2].partition("/")[0]]
    try:
        told = door.answer(
            request.method, request.url, headers, body.encode() if isinstance(body, str) else body
        )
    except Lost:
        raise ConnectionClosedError(endpoint_url=request.url) from None
    return AWSResponse(request.url, told.status, told.headers, _Raw(told.body))


@cache
def _shared() -> boto3.Session:
    core = CoreSession()
    core.get_component("event_emitter").register_first("before-send", _send)
    return boto3.Session(botocore_session=core)


class KeyedSession:
    """What the provider needs of a session of boto3, with keys of a house.

    A client is as dear to make as a hundred calls, so all lives of a house share them.
    """

    def __init__(self, key_id: str, secret: str = "secret") -> None:
        self.keys = {"aws_access_key_id": key_id, "aws_secret_access_key": secret}
        self._clients: dict[tuple[str, str, Any], Any] = {}

    def client(self, service: str, region_name: str, config: Any = None, **more: Any) -> Any:
        key = (service, region_name, getattr(config, "read_timeout", None))
        if key not in self._clients:
            words = {**self.keys, **more, "region_name": region_name, "config": config}
            self._clients[key] = _shared().client(service, **words)
        return self._clients[key]


class AwsHouse:
    """An account, its door, a clock, and providers in front of them."""

    def __init__(self, dials: Dials | None = None, room: int = 8) -> None:
        self.clock = VirtualClock(BEGIN_S)
        self.account = Account(dials, ZONES, room=room)
        self.door = Ec2Door(self.account, self.clock)
        self.key_id = f"AKIDTEST{next(NUMBERS)}"
        self.door.keys = {self.key_id: Key(secret="secret")}
        DOORS[self.key_id] = self.door
        self.session = KeyedSession(self.key_id)
        self.calls = Calls(new_session=lambda: self.session)

    def provider(self, calls: Calls | None = None, settings: AwsSettings = SETTINGS) -> AwsProvider:
        return AwsProvider(settings, OURS, calls or self.calls, self.clock)

    def examined(self, look: Callable[[Calls], Awaitable[Any]]) -> Any:
        """Return what a look with calls to this account finds."""

        async def played() -> Any:
            calls = Calls(new_session=lambda: self.session)
            try:
                return await look(calls)
            finally:
                await calls.close()

        return asyncio.run(played())

    def made(self) -> list[Any]:
        """Return the machines that were bought under our deployment's name."""
        return [x for x in self.account.instances.values() if (DEPLOYMENT_TAG, OURS) in x.marks()]

    def play(self, scene: Callable[[AwsProvider], Awaitable[Any]], **more: Any) -> Any:
        async def played() -> Any:
            provider = self.provider(**more)
            try:
                told = await scene(provider)
            finally:
                await provider.close()
            assert self.door.flaws == set()
            return told

        return asyncio.run(played())

    def wait(self, seconds: float) -> None:
        self.clock.advance_to(self.clock.now_s() + seconds)
        self.account.advance(self.clock.now_s())


def with_policy(house: AwsHouse, policy: Mapping[str, Any]) -> None:
    house.door.keys[house.key_id] = Key(secret="secret", who="manager", policy=policy)
