"""The metadata services of the local cloud say what EC2 and Azure document, to the letter."""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable

import httpx
import pytest
from running_cloud import POOLS, RunningCloud, request, until

from cloud.local.provider import LocalProvider
from cloud.model import Machine
from cloud.provider import all_machines

pytestmark = pytest.mark.processes

ISO = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"
HTTP_DATE = r"\w{3}, \d\d \w{3} \d{4} \d\d:\d\d:\d\d GMT"
TOKEN_TTL = {"X-aws-ec2-metadata-token-ttl-seconds": "21600"}
EVENTS = "/metadata/scheduledevents"
AZURE = {"Metadata": "true"}
VERSION = {"api-version": "2020-07-01"}

Scene = Callable[[httpx.AsyncClient, Machine, LocalProvider], Awaitable[None]]


@contextlib.asynccontextmanager
async def metadata(running: RunningCloud, url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=5) as client:
        yield client


def play(running: RunningCloud, dialect: str, scene: Scene) -> None:
    """One machine in a zone of this dialect, and a client as a program on the machine has one."""

    async def played() -> None:
        provider = running.provider()
        (machine,) = await provider.launch(request("t-1", POOLS[dialect]))
        url = await asyncio.to_thread(running.metadata_url, machine)
        async with metadata(running, url) as client:
            await scene(client, machine, provider)
        await provider.close()

    asyncio.run(played())


async def session(client: httpx.AsyncClient) -> dict[str, str]:
    token = await client.put("/latest/api/token", headers=TOKEN_TTL)
    assert token.status_code == 200
    return {"X-aws-ec2-metadata-token": token.text}


def test_ec2_answers_only_to_holders_of_a_session_token(running: RunningCloud):
    """No token and a wrong one are 401, a token without a sane life is 400, a forwarded PUT is 403."""

    async def scene(client: httpx.AsyncClient, machine: Machine, _: LocalProvider) -> None:
        path = "/latest/meta-data/instance-id"
        assert (await client.get(path)).status_code == 401
        wrong = {"X-aws-ec2-metadata-token": "guess"}
        assert (await client.get(path, headers=wrong)).status_code == 401
        for ttl in ({}, {next(iter(TOKEN_TTL)): "0"}, {next(iter(TOKEN_TTL)): "21601"}):
            assert (await client.put("/latest/api/token", headers=ttl)).status_code == 400
        forwarded = {**TOKEN_TTL, "X-Forwarded-For": "10.0.0.1"}
        assert (await client.put("/latest/api/token", headers=forwarded)).status_code == 403
        said = await client.get(path, headers=await session(client))
        assert said.text == machine.id

    play(running, "ec2", scene)


def test_ec2_says_nothing_until_there_is_something_to_say(running: RunningCloud):
    """The action, the old termination time and the rebalance hint are 404 in quiet times."""

    async def scene(client: httpx.AsyncClient, _: Machine, __: LocalProvider) -> None:
        headers = await session(client)
        for path in (
            "spot/instance-action",
            "spot/termination-time",
            "events/recommendations/rebalance",
        ):
            said = await client.get(f"/latest/meta-data/{path}", headers=headers)
            assert said.status_code == 404

    play(running, "ec2", scene)


def test_ec2_tells_of_an_eviction_as_documented(running: RunningCloud):
    """`{"action": "terminate", "time": "2017-09-18T08:22:00Z"}`, never later than the end itself."""

    async def scene(client: httpx.AsyncClient, machine: Machine, cloud: LocalProvider) -> None:
        assert await cloud.drill(warning_s=120, nodes=1) == [machine.id]
        headers = await session(client)
        said = (await client.get("/latest/meta-data/spot/instance-action", headers=headers)).json()
        assert set(said) == {"action", "time"}
        assert said["action"] == "terminate"
        assert re.fullmatch(ISO, said["time"])
        old = await client.get("/latest/meta-data/spot/termination-time", headers=headers)
        assert old.text == said["time"]

    play(running, "ec2", scene)


def test_ec2_hints_as_documented(running: RunningCloud):
    """`{"noticeTime": "2020-11-05T08:22:00Z"}`, and the machine goes on running."""

    async def scene(client: httpx.AsyncClient, machine: Machine, cloud: LocalProvider) -> None:
        assert await cloud.drill(warning_s=0, nodes="all", only_hint=True) == [machine.id]
        headers = await session(client)
        path = "/latest/meta-data/events/recommendations/rebalance"
        said = (await client.get(path, headers=headers)).json()
        assert set(said) == {"noticeTime"}
        assert re.fullmatch(ISO, said["noticeTime"])
        assert [held.state for held in await all_machines(cloud)] == ["running"]

    play(running, "ec2", scene)


def test_azure_wants_its_header_and_a_version(running: RunningCloud):
    """Without either the answer is 400, and says which is missing."""

    async def scene(client: httpx.AsyncClient, _: Machine, __: LocalProvider) -> None:
        bare = await client.get(EVENTS, params=VERSION)
        assert (bare.status_code, "Required metadata header" in bare.text) == (400, True)
        unversioned = await client.get(EVENTS, headers=AZURE)
        assert (unversioned.status_code, "api-version" in unversioned.text) == (400, True)
        quiet = await client.get(EVENTS, headers=AZURE, params=VERSION)
        assert quiet.json() == {"DocumentIncarnation": 1, "Events": []}

    play(running, "azure", scene)


def test_azure_tells_of_an_eviction_as_documented(running: RunningCloud):
    """One Preempt event with every documented field; the incarnation has gone up."""

    async def scene(client: httpx.AsyncClient, machine: Machine, cloud: LocalProvider) -> None:
        await cloud.drill(warning_s=30, nodes=1)
        said = (await client.get(EVENTS, headers=AZURE, params=VERSION)).json()
        assert said["DocumentIncarnation"] == 2
        (event,) = said["Events"]
        assert re.fullmatch(HTTP_DATE, event.pop("NotBefore"))
        assert re.fullmatch(r"[0-9A-F]{8}(-[0-9A-F]{4}){3}-[0-9A-F]{12}", event.pop("EventId"))
        assert event == {
            "EventType": "Preempt",
            "ResourceType": "VirtualMachine",
            "Resources": [machine.id],
            "EventStatus": "Scheduled",
            "Description": "",
            "EventSource": "Platform",
            "DurationInSeconds": -1,
        }

    play(running, "azure", scene)


def test_azure_takes_a_machine_that_says_it_is_ready(running: RunningCloud):
    """A StartRequests for the event ends the waiting; one for an unknown event is refused."""

    async def scene(client: httpx.AsyncClient, machine: Machine, cloud: LocalProvider) -> None:
        await cloud.drill(warning_s=600, nodes=1)
        said = (await client.get(EVENTS, headers=AZURE, params=VERSION)).json()
        for body in ({"StartRequests": [{"EventId": "UNKNOWN"}]}, {"StartRequests": 7}, [1]):
            refused = await client.post(EVENTS, headers=AZURE, params=VERSION, json=body)
            assert refused.status_code == 400
        wanted = {"StartRequests": [{"EventId": said["Events"][0]["EventId"]}]}
        with contextlib.suppress(httpx.TransportError):
            await client.post(EVENTS, headers=AZURE, params=VERSION, json=wanted)
        (ended,) = await all_machines(cloud)
        assert (ended.state, ended.ended_by) == ("terminated", "provider")
        pid = running.init_of(machine.id)
        until("its processes to end", lambda: pid is None or running.init_of(machine.id) is None)

    play(running, "azure", scene)
