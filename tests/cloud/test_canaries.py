"""Secrets of a manager that buys from AWS and Azure are found nowhere: twenty canaries, each one drawn.

They are in keys, in tokens, in what clouds answer beside what is asked for, in what the SDKs raise,
and in the secrets of the house. They are looked for in all that the manager keeps, shows and sends
on: journal, state, sentences, view, logs, requests, and the user data of machines. The processes of
a whole house are looked at where one is played (`test_account_houses.py`).
"""

import base64
import json
import logging
from typing import Any

import pytest
from aws_house import DOORS, OURS, SETTINGS, AwsHouse, KeyedSession
from azure_account import SETTINGS as AZURE
from azure_account import provider_of
from cloudfake import arm_wire
from cloudfake.arm import Answer, ArmDoor
from cloudfake.books import draw
from cloudfake.ec2 import Key
from msgspec.structs import replace
from virtual_manager import VirtualManager

from cloud.aws.calls import Calls
from cloud.first_boot import user_data

CANARIES = [f"canary{nth:02}x{int(draw('canary', nth) * 1e12):012}" for nth in range(20)]
FINGERPRINT = "0f" * 32


def said_by(manager: VirtualManager, logs: str) -> str:
    """Return all that a manager has kept and shown."""
    journal = "\n".join(repr(entry) for entry in manager.journal.entries)
    shown = b"\n".join([*manager.store.lines, *manager.store.shown.values()]).decode()
    return "\n".join([journal, repr(manager.journal._snapshot), shown, logs])


def script(cloud: str) -> str:
    return user_data("127.0.0.1:7000", FINGERPRINT, OURS, cloud, 600.0)


def test_the_canaries_are_found_where_they_are():
    """The search finds what it looks for."""
    manager = VirtualManager(AwsHouse().clock, OURS)
    manager.store.lines.append(CANARIES[3].encode())
    assert [x for x in CANARIES if x in said_by(manager, "")] == [CANARIES[3]]


def test_no_secret_of_aws_is_kept_shown_or_sent_on(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    """The secret key, the session token, and what the SDK raises with the request in it."""
    caplog.set_level(logging.WARNING)  # a house sets no level
    for name in ("cloud", "orchestrator", "agent"):
        caplog.set_level(logging.DEBUG, name)
    for nth, name in enumerate(("RAY_AUTH_TOKEN", "ORCHESTRATOR__MANAGER__REDIS_URL")):
        monkeypatch.setenv(name, f"redis://:{CANARIES[nth]}@host")
    house = AwsHouse()
    key = {"aws_secret_access_key": CANARIES[2], "aws_session_token": CANARIES[3]}
    house.door.keys = {house.key_id: Key(secret=CANARIES[2], session=CANARIES[3])}
    house.session = KeyedSession(house.key_id, CANARIES[2])
    house.session.keys |= key
    sent: list[str] = []
    true = house.door.answer
    calls = 0

    def answered(method: str, url: str, headers: Any, body: bytes) -> Any:
        nonlocal calls
        calls += 1
        sent.append(body.decode())
        if calls % 23 == 0:  # what a proxy, an SDK or a TLS library may put into a message
            raise OSError(f"cannot reach {url} with {CANARIES[4]}: {dict(headers)}")
        told = true(method, url, headers, body)
        return told._replace(headers=told.headers | {"x-debug": CANARIES[5]})

    house.door.answer = answered  # type: ignore[method-assign]
    DOORS[house.key_id] = house.door
    manager = VirtualManager(house.clock, OURS)
    calls_of = Calls(new_session=lambda: house.session)
    provider = house.provider(calls_of, replace(SETTINGS, user_data=script("aws")))
    manager.live(provider, house.clock.now_s() + 120.0)
    assert any("Action=RunInstances" in body for body in sent)
    data = [base64.b64decode(x.request["UserData"]).decode() for x in house.made()]
    assert data and set(data) == {script("aws")}
    found = said_by(manager, caplog.text) + "\n".join([*sent, *data])
    assert [x for x in CANARIES if x in found] == []


def test_no_secret_of_azure_is_kept_shown_or_sent_on(caplog: pytest.LogCaptureFixture):
    """Bearer tokens, what answers hold beside what we read, and exceptions with the request."""
    caplog.set_level(logging.WARNING)  # a house sets no level
    for name in ("cloud", "orchestrator", "agent"):
        caplog.set_level(logging.DEBUG, name)
    door = ArmDoor()
    tokens = iter(CANARIES[6:12] * 100)
    new_token = door.new_token

    def with_canary() -> tuple[str, float]:
        token, until_s = new_token()
        name = f"{token}-{next(tokens)}"
        door._tokens[name] = until_s
        return name, until_s

    door.new_token = with_canary  # type: ignore[method-assign]
    wire = _Leaky(door)
    bodies: list[str] = wire.bodies
    manager = VirtualManager(door.clock, OURS)
    settings = replace(AZURE, boot_script=script("azure"))
    provider = provider_of(door, settings, session=arm_wire.session(wire))
    manager.live(provider, door.now_s + 120.0)
    data = [
        base64.b64decode(json.loads(body)["properties"]["userData"]).decode()
        for body in bodies
        if "userData" in body
    ]
    first, rest = script("azure").split("\n", 1)
    assert data
    for each in data:  # what a machine boots with names our identity, which is no secret
        boots, identity, whole = each.split("\n", 2)
        assert (boots, whole) == (first, rest)
        assert identity == f"export AZURE_MSI_RESOURCE_ID={AZURE.identity}"
    found = said_by(manager, caplog.text) + "\n".join([*bodies, *data])
    assert [x for x in CANARIES if x in found] == []


class _Leaky:
    """A session to the door whose answers and failures hold what nobody may pass on."""

    def __init__(self, door: ArmDoor) -> None:
        self._door = door
        self._calls = 0
        self.bodies: list[str] = []

    def call(self, method: str, url: str, headers: Any, body: bytes | None = None) -> Answer:
        self._calls += 1
        self.bodies.append((body or b"").decode())
        if self._calls % 11 == 0:
            raise OSError(f"no route to {url} for {CANARIES[12]}: {dict(headers)}")
        if self._calls % 13 == 0:
            inner = {"innererror": CANARIES[13], "additionalInfo": [{"info": CANARIES[14]}]}
            error = {"code": "InternalServerError", "message": "try again", **inner}
            return Answer(500, {"error": error}, {"x-ms-debug": CANARIES[15]})
        answer: Any = self._door.call(method, url, headers, body)
        if isinstance(answer.body, dict) and "properties" in answer.body:
            secret = {"adminPassword": CANARIES[16], "customData": CANARIES[17]}
            kept = {**answer.body["properties"], "osProfile": secret, "extra": CANARIES[18]}
            return Answer(answer.status, {**answer.body, "properties": kept}, answer.headers)
        return Answer(answer.status, answer.body, {**answer.headers, "x-id": CANARIES[19]})
