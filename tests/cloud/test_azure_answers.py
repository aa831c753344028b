"""What Azure answers, and what the provider makes of it: codes, broken answers, secrets."""

import asyncio
import base64
import importlib.util
import json
import logging
import os
import subprocess
import sys
import traceback

import pytest
from azure_account import D4, OURS, PLACE, SETTINGS, T4, listed, play, provider_of, request
from cloudfake.arm import Answer, ArmDoor, Dials
from cloudfake.arm_wire import Key, listening, session
from cloudfake.books import draw
from msgspec.structs import replace

from cloud import errors
from cloud.azure import calls, connection, refusals
from cloud.azure.refusals import NO_QUOTA_S, QUOTA_S, SOLD_OUT_S, TABLE, Said
from cloud.model import Closed, Ref

CASES = int(os.environ.get("AZURE_FUZZ_CASES", "1000"))
KINDS = {
    "refused": errors.Refused,
    "quota": errors.Refused,
    "sold_out": errors.Refused,
    "throttled": errors.Throttled,
    "not_allowed": errors.NotAllowed,
    "misconfigured": errors.Misconfigured,
    "mismatch": errors.TokenMismatch,
}
WORDS = {
    "LowPriorityCores": "approved LowPriorityCores quota. Current Limit: 8, Current Usage: 8",
    "Total Regional": "approved Total Regional Cores quota. Current Limit: 0, Current Usage: 0",
    "Cores quota": "approved standardNCASv3_T4Family Cores quota. Current Limit: 12, more",
    "too many requests": "There were too many requests.",
    "is not supported for subscription": "Size X is not supported for subscription Y.",
    "subnet": "The subnet was not found.",
    "keyData": "The value of parameter linuxConfiguration.ssh.publicKeys.keyData is invalid.",
    "Admin Username": "The Admin Username specified is not allowed.",
    "hardwareProfile.vmSize": "It looked at properties.hardwareProfile.vmSize.",
}
"""A message of Azure for each text that the table looks for."""


class Scripted:
    """A door that gives one answer to the calls of some methods, and the real one to all others."""

    def __init__(self, door: ArmDoor, answer: Answer | Exception, methods: tuple[str, ...]) -> None:
        self._door, self._answer, self._methods = door, answer, methods
        self.calls = 0

    def call(self, method, *asked):
        if method not in self._methods:
            return self._door.call(method, *asked)
        self.calls += 1
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row.code} {row.text}".strip())
def test_every_row_of_the_table_is_what_a_launch_raises(row):
    """The code in the answer of a PUT decides the error, its scope and its pause: one call each."""
    door = ArmDoor()
    said = WORDS.get(row.text, "Azure says no.")
    body = {"error": {"code": row.code, "message": said}}
    scripted = Scripted(door, Answer(409, body), ("PUT",))

    async def scene(provider):
        with pytest.raises(errors.CloudError) as raised:
            await provider.launch(request("t-1"))
        return raised.value

    error = play(door, scene, session=session(scripted))
    assert type(error) is KINDS[row.means]
    assert scripted.calls == 1
    assert row.code in str(error) or row.means == "mismatch"
    assert row.advice in str(error)
    if row.means in ("refused", "quota", "sold_out", "not_allowed", "misconfigured"):
        assert error.refusal.scope == row.scope
    expected = {
        "refused": row.retry_s,
        "sold_out": SOLD_OUT_S["spot"],
        "quota": NO_QUOTA_S if "Limit: 0," in said else QUOTA_S,
    }
    if row.means in expected:
        assert error.refusal.retry_s == expected[row.means]


def test_a_sold_out_size_is_asked_for_again_sooner_in_the_spot_market():
    """Spot capacity comes back within hours; a size that is not sold on demand stays so for a day."""
    said = Said(status=409, code="SkuNotAvailable", text="none")
    assert refusals.error(said, "spot").refusal.retry_s == 3600
    assert refusals.error(said, "on_demand").refusal.retry_s == 23 * 3600


@pytest.mark.parametrize("code", ["OperationNotAllowed", "QuotaExceeded"])
def test_a_quota_reaches_as_far_as_its_text_says_under_either_code(code):
    """Azure uses both codes for all its quotas; those of a market are not those of a family."""
    scopes = {
        word: refusals.error(Said(status=409, code=code, text=WORDS[word]), "spot").refusal.scope
        for word in ("LowPriorityCores", "Total Regional", "Cores quota")
    }
    assert scopes == {
        "LowPriorityCores": "market",
        "Total Regional": "market",
        "Cores quota": "family",
    }


@pytest.mark.parametrize(
    ("looked_at", "scope"),
    [
        ("properties.hardwareProfile.vmSize", "pool"),
        ("tags['owner']", "place"),
        ("location", "place"),
    ],
)
def test_a_policy_about_sizes_leaves_the_other_sizes_of_a_region(looked_at, scope):
    """Only what a policy looked at says that another size may be had; the message need not."""
    expressions = [
        {"result": "True", "expression": "type", "path": "type", "operator": "Equals"},
        {"result": "False", "expression": "x", "path": looked_at, "operator": "In"},
    ]
    info = {"evaluationDetails": {"evaluatedExpressions": expressions}}
    said = {
        "code": "RequestDisallowedByPolicy",
        "message": "Resource 't-1' was disallowed by policy.",
        "additionalInfo": [{"type": "PolicyViolation", "info": info}],
    }
    door = ArmDoor()
    scripted = Scripted(door, Answer(403, {"error": said}), ("PUT",))

    async def scene(provider):
        with pytest.raises(errors.NotAllowed) as raised:
            await provider.launch(request("t-1"))
        return raised.value

    error = play(door, scene, session=session(scripted))
    assert error.refusal.scope == scope
    assert looked_at in str(error)


@pytest.mark.parametrize("details", [None, "x", [None], ["x"], [{}], [{"type": "PolicyViolation"}]])
def test_a_policy_that_says_not_what_it_looked_at_is_a_policy(details):
    said = {"code": "RequestDisallowedByPolicy", "message": "No.", "additionalInfo": details}
    told = connection.said_in(403, {}, json.dumps({"error": said}))
    assert (told.code, told.text) == ("RequestDisallowedByPolicy", "No.")


PRICES = "https://prices.example"
ELSEWHERE = (
    "https://other.example/2",
    "http://prices.example/2",
    "http://prices.example:443/2",
    "https://prices.example:444/2",
    "https://prices.example:99999/2",
    "https://prices.example:many/2",
    "https://someone@prices.example/2",
    "https://[prices.example/2",
    "",
)


@pytest.mark.parametrize("link", ELSEWHERE)
def test_a_link_that_leads_elsewhere_or_nowhere_is_refused_in_one_sentence(link):
    with pytest.raises(errors.Unknown, match=r"a next page is not at https://prices\.example"):
        connection.must_be(link, PRICES)


@pytest.mark.parametrize("link", ["/2", ":443/2", "?skip=2"])
def test_a_link_of_the_same_server_is_followed_with_or_without_its_usual_port(link):
    connection.must_be(PRICES + link, PRICES)


@pytest.mark.parametrize(
    ("code", "said", "setting"),
    [
        ("InvalidParameter", WORDS["keyData"], "azure.ssh_public_key"),
        ("InvalidParameter", WORDS["Admin Username"], "azure.admin"),
        ("LinkedInvalidPropertyId", "Property id 'x' at path 'y' is invalid.", "azure.subnets"),
        ("FailedIdentityOperation", "userAssignedIdentities/x was not found", "azure.identity"),
        ("ResourceGroupBeingDeleted", "The group is deprovisioning.", "template.json"),
    ],
)
def test_what_can_never_work_stops_the_place_and_names_the_setting(code, said, setting):
    """Else each size is tried in turn, and the sentence is Azure's alone."""
    told = refusals.error(Said(status=400, code=code, text=said), "spot")
    assert type(told) is errors.Misconfigured
    assert setting in str(told)


def test_what_azure_does_not_allow_was_not_done_whatever_it_says_of_it():
    """A bid below the price, a kept disk, a size of another generation: its texts are many, its code one."""
    said = Said(status=409, code="OperationNotAllowed", text="The specified size is not allowed.")
    told = refusals.error(said, "spot")
    assert (type(told), told.refusal.scope) == (errors.Refused, "pool")


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, errors.Refused),
        (403, errors.Refused),
        (404, errors.Refused),
        (409, errors.Unknown),
        (412, errors.Unknown),
        (500, errors.Unknown),
        (503, errors.Unknown),
    ],
)
def test_a_code_that_nobody_knows_is_named_and_means_what_its_status_says(status, kind):
    """A request that Azure finds wrong made nothing: a size that the image cannot boot on, for one."""
    door = ArmDoor()
    body = {"error": {"code": "BrandNew", "message": "never seen"}}
    scripted = Scripted(door, Answer(status, body), ("PUT",))

    async def scene(provider):
        with pytest.raises(errors.CloudError, match="BrandNew: never seen") as told:
            await provider.launch(request("t-1"))
        assert type(told.value) is kind
        if kind is errors.Refused:
            assert (told.value.refusal.scope, told.value.code) == ("pool", "BrandNew")

    play(door, scene, session=session(scripted))


def test_an_answer_that_is_no_answer_never_raises_anything_else():
    """Drawn statuses, headers, broken JSON and wrong shapes through every verb: only our errors."""
    raised = set()

    async def scene(provider, nth):
        verbs = (
            lambda: provider.launch(request(f"t-{nth}", count=1 + nth % 2)),
            lambda: provider.list(PLACE),
            lambda: provider.end([Ref(PLACE, f"t-{nth}"), Ref(PLACE, "web-1")]),
            lambda: provider.sold(PLACE),
            lambda: provider.quotes(PLACE),
            provider.places,
        )
        try:
            await verbs[nth % len(verbs)]()
        except errors.CloudError as error:
            raised.add(type(error))

    async def all_of_them():
        door = ArmDoor()
        wire = Scripted(door, Answer(200), ("GET", "PUT", "DELETE"))
        provider = provider_of(door, session=session(wire))
        for nth in range(CASES):
            wire._answer = garbled(nth)
            wire._methods = (("GET",), ("PUT",), ("DELETE",), ("GET", "PUT", "DELETE"))[nth % 4]
            await scene(provider, nth)
        await provider.close()

    asyncio.run(all_of_them())
    assert errors.Unknown in raised


def garbled(nth: int) -> Answer | Exception:
    """Return the `nth` answer that is not what it should be."""
    pick = lambda what, of: of[int(draw(nth, what) * len(of))]  # noqa: E731
    whole = {"value": [{"name": "t-1", "location": "eastus", "tags": {"a": "b"}}], "Items": [{}]}
    bodies = [
        b"",
        b"{",
        b"null",
        b"[]",
        b"7",
        b'"x"',
        b"\xff\xfe",
        b"<html>502</html>",
        b"{}" * 2,
        b"[" * 5000,
        json.dumps(whole).encode(),
        b'{"value": null}',
        b'{"value": 3, "Items": 3}',
        b'{"value": [null]}',
        b'{"error": []}',
        b'{"error": {"code": 7, "message": {}}}',
        json.dumps({"value": [], "nextLink": "http://elsewhere.invalid/next"}).encode(),
        json.dumps({"Items": [], "NextPageLink": "http://elsewhere.invalid/next"}).encode(),
        json.dumps(
            {"value": [{**whole["value"][0], "tags": {"orchestrator-deployment": OURS}}]}
        ).encode(),
        json.dumps({"error": {"code": pick("code", TABLE).code, "message": "x"}}).encode(),
    ]
    headers = [
        {},
        {"Retry-After": "soon"},
        {"Retry-After": "-3"},
        {"Retry-After": "1e99"},
        {"Content-Type": "text/html"},
        {"Content-Encoding": "gzip"},
        {"Location": "::"},
    ]
    if draw(nth, "raise") < 0.1:
        return pick(
            "exception", [OSError("reset"), ValueError("odd"), KeyError("x"), TimeoutError()]
        )
    statuses = [200, 201, 202, 204, 302, 400, 401, 403, 404, 409, 412, 418, 429, 500, 503]
    return Answer(pick("status", statuses), pick("body", bodies), pick("headers", headers))


def test_no_secret_is_in_what_an_error_says(caplog):
    """Tokens, the boot script and keys are in no message, no log and no traceback of an error."""
    caplog.set_level(logging.DEBUG)
    canaries = [f"canary-{nth}-{int(draw(nth) * 1e12)}" for nth in range(20)]
    settings = replace(SETTINGS, boot_script=" ".join(canaries[:10]), ssh_public_key=canaries[10])
    told = []

    class Canary(Key):
        def get_token(self, *words, **more):
            from azure.core.credentials import AccessToken

            return AccessToken(" ".join(canaries[11:]), 1 << 40)

    async def scene(provider):
        for call in (
            provider.launch(request("t-1")),
            provider.list(PLACE),
            provider.end([Ref(PLACE, "t-1")]),
            provider.sold(PLACE),
        ):
            try:
                await call
            except errors.CloudError as error:
                told.append("".join(traceback.format_exception(error)))

    door = ArmDoor(dials=Dials(stumbles=0.0))
    play(door, scene, settings=settings, credential=Canary(door))
    for answer in (OSError("reset"), Answer(500, b"oops"), Answer(409, {"error": {"code": "New"}})):
        wire = Scripted(door, answer, ("GET", "PUT"))
        play(door, scene, settings=settings, session=session(wire))
    assert len(told) == 16
    said = " ".join([*told, caplog.text])
    assert [canary for canary in canaries if canary in said] == []
    assert base64.b64encode(settings.boot_script.encode()).decode()[:40] not in said


def test_over_real_sockets_it_is_the_same():
    """The SDK's own connections, on loopback: launch, list, end and prices; one attempt each."""
    door = ArmDoor()
    with listening(door) as url:
        settings = replace(SETTINGS, endpoint=url, prices_endpoint=url)

        async def scene(provider):
            await provider.launch(request("t-1"))
            await provider.launch(request("t-2", D4, market="on_demand"))
            door.pass_s(41)
            machines = await listed(provider)
            assert {x.id: (x.market, x.state) for x in machines.values()} == {
                "t-1": ("spot", "running"),
                "t-2": ("on_demand", "running"),
            }
            assert T4 in {quote.pool for quote in await provider.quotes(PLACE)}
            await provider.end([x.ref for x in machines.values()])
            door.pass_s(121)
            assert await listed(provider) == {}

        play(door, scene, settings=settings, session=None)
    assert door.books.alive(OURS) == []


def test_nothing_listens_and_nobody_is_signed_in():
    """No network is `Unknown`; no key closes the cloud with one sentence that says what to do."""
    door = ArmDoor()

    class Nobody:
        def get_token(self, *_, **__):
            from azure.identity import CredentialUnavailableError

            raise CredentialUnavailableError("no identity found")

    async def silent(provider):
        with pytest.raises(errors.Unknown):
            await provider.list(PLACE)

    async def keyless(provider):
        closed = await provider.places()
        assert all(isinstance(one, Closed) for one in closed)
        assert "az login" in closed[0].because
        with pytest.raises(errors.NotAllowed):
            await provider.launch(request("t-1"))

    with listening(door) as url:
        gone = replace(SETTINGS, endpoint=url)
    play(door, silent, settings=gone, session=None)
    play(door, keyless, credential=Nobody())


def test_keys_are_not_sent_in_plain_text_to_another_machine():
    """Plain HTTP is for this machine's own fakes; anywhere else it is refused before any call."""
    door = ArmDoor()
    settings = replace(SETTINGS, endpoint="http://management.example.invalid")

    async def scene(provider):
        with pytest.raises(errors.Misconfigured, match="https"):
            await provider.list(PLACE)

    play(door, scene, settings=settings)


def test_without_the_packages_azure_is_closed_with_one_sentence(monkeypatch):
    """The sentence names what to install; other clouds do not notice."""
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if "azure" in name else object()
    )
    monkeypatch.setattr(connection, "find_spec", importlib.util.find_spec)

    async def scene(provider):
        (closed,) = await provider.places()
        assert isinstance(closed, Closed)
        assert (closed.place.region, "[azure]" in closed.because) == ("", True)

    play(ArmDoor(), scene)


def test_the_sdk_is_not_imported_until_a_call_needs_it():
    """Making a provider, and every module of the room, imports nothing of Azure's."""
    looked = (
        "import sys, cloud.azure.provider as p, cloud.azure.settings as s\n"
        "x = s.AzureSettings(subscription='', resource_group='', regions=(), subnets={}, image='', "
        "ssh_public_key='')\n"
        "p.AzureProvider(x, 'ours')\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('azure', 'msal')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", looked], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_scores_are_asked_for_a_few_sizes_at_a_time(monkeypatch):
    """Azure takes five sizes in a question; each pool that is sold as spot has a word."""
    door = ArmDoor(dials=Dials(capacity=5))
    monkeypatch.setattr(calls, "SIZES_ASKED", 1)

    async def scene(provider):
        before = len(door.called)
        scores = await provider.scores(PLACE)
        assert set(scores.values()) == {"Medium"}
        assert {pool.zone for pool in scores if pool.type == T4.type} == {"eastus-1", "eastus-2"}
        asked = [action for action in door.called[before:] if "placementScores" in action]
        assert len(asked) == len({pool.type for pool in scores}) > 1

    play(door, scene)
