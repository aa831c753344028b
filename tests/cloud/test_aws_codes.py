"""Every code of AWS's that we know, through boto3, and what becomes of all others."""

import importlib
import logging
import re
import subprocess
import sys
import traceback
from collections.abc import Callable
from typing import Any

import pytest
from aws_house import EAST, SETTINGS, AwsHouse, KeyedSession, request
from botocore.loaders import Loader
from botocore.retries.standard import ThrottledRetryableChecker, TransientRetryableChecker
from cloudfake import wire
from cloudfake.books import draw
from cloudfake.ec2 import GARBLED, Answer
from msgspec.structs import replace

from cloud.aws.calls import Calls
from cloud.aws.codes import LAUNCH_FAILURES, ROWS, error_of, refusal_of
from cloud.aws.provider import AwsProvider
from cloud.aws.settings import pairs
from cloud.error_codes import Row
from cloud.errors import (
    CloudError,
    Misconfigured,
    NotAllowed,
    Refused,
    Throttled,
    TokenMismatch,
    TokenSpent,
    Unknown,
)
from cloud.model import Closed, Place

MEANS = {
    "refused": Refused,
    "misconfigured": Misconfigured,
    "not_allowed": NotAllowed,
    "throttled": Throttled,
    "unknown": Unknown,
    "mismatch": TokenMismatch,
    "spent": TokenSpent,
}


def answering(house: AwsHouse, answer: Callable[[str], Answer]) -> None:
    """Let the door answer every launch with this, whatever it did."""
    true = house.door.answer

    def answered(method: str, url: str, headers: Any, body: bytes) -> Answer:
        told = true(method, url, headers, body)
        return answer("ec2") if b"Action=RunInstances" in body else told

    house.door.answer = answered


def launch_error(house: AwsHouse, **more: Any) -> CloudError:
    async def scene(provider: AwsProvider) -> CloudError:
        with pytest.raises(CloudError) as no:
            await provider.launch(request("t-1", **more))
        return no.value

    return house.play(scene)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.code}-{row.text[:12]}")
def test_every_code_of_the_table_comes_through_boto3_as_its_row_says(row: Row):
    """Kind, scope and retry time are the row's; advice is in the sentence; the place is named."""
    house = AwsHouse()
    body = wire.refusal_body("ec2", row.code, f"AWS says: {row.text}", "req-1").encode()
    answering(house, lambda _: Answer(500, {"Content-Type": "text/xml"}, body))
    error = launch_error(house)
    assert type(error) is MEANS[row.means]
    assert "us-east-1" in str(error)
    assert row.code in str(error)
    assert row.advice in str(error)
    if row.means == "refused":
        assert (error.refusal.scope, error.refusal.code) == (row.scope, row.code)
        assert error.refusal.retry_s == row.retry_s
        assert refusal_of(row.code, row.text).scope == row.scope


def test_no_row_hides_another_one():
    assert len({(row.code, row.text) for row in ROWS}) == len(ROWS)
    for nth, row in enumerate(ROWS):
        assert not any(row.code == x.code and x.text in row.text for x in ROWS[:nth])
    assert {row.code for row in ROWS} >= LAUNCH_FAILURES


def test_the_reasons_that_ec2_names_are_ends_at_launch_or_ends_of_a_machine_that_ran():
    """A launch failure that counts as the end of a machine that ran is bought again at once."""
    ec2 = Loader().load_service_model("ec2", "service-2")
    said = ec2["shapes"]["StateReason"]["members"]["Message"]["documentation"]
    ran = r"Shutdown|Termination|Terminated|ScheduledStop|Hibernate"
    named = set(re.findall(r"<code>([^<]+)</code>", said))
    assert {code for code in named if not re.search(ran, code)} == LAUNCH_FAILURES


@pytest.mark.parametrize(("status", "kind"), [(400, Refused), (403, Refused), (500, Unknown)])
def test_a_code_without_a_row_is_what_its_status_says_and_said_once(
    status: int, kind: type[CloudError], caplog: pytest.LogCaptureFixture
):
    """A request that EC2 finds wrong started nothing; asked again for ever, the pool hid all others."""
    house = AwsHouse()
    body = wire.refusal_body("ec2", "Surprise", "something new", "req-1").encode()
    answering(house, lambda _: Answer(status, {"Content-Type": "text/xml"}, body))
    calls = Calls(new_session=lambda: house.session)

    async def scene(provider: AwsProvider) -> None:
        for nth in range(3):
            with pytest.raises(CloudError, match="Surprise") as told:
                await provider.launch(request(f"t-{nth}"))
            assert type(told.value) is kind
            if kind is Refused:
                assert (told.value.refusal.scope, told.value.code) == ("pool", "Surprise")

    with caplog.at_level(logging.WARNING, "cloud.aws"):
        house.play(scene, calls=calls)
    assert len([x for x in caplog.records if "Surprise" in x.getMessage()]) == 1
    assert isinstance(error_of("", "", "AWS"), Unknown)


def test_what_boto3_takes_for_a_throttle_or_for_a_moment_is_that_here():
    """A throttle did nothing, also under HTTP 400; a time-out may have done all that was asked."""
    for code in TransientRetryableChecker._TRANSIENT_ERROR_CODES:
        assert type(error_of(code, "", "AWS", 400)) is Unknown, code
    passing = set(TransientRetryableChecker._TRANSIENT_ERROR_CODES)
    for code in set(ThrottledRetryableChecker._THROTTLED_ERROR_CODES) - passing:
        assert type(error_of(code, "", "AWS", 400)) is Throttled, code


@pytest.mark.parametrize(
    ("code", "said", "scope"),
    [
        ("InvalidSubnetID.NotFound", "The subnet ID 'subnet-1' does not exist", "zone"),
        ("InsufficientVolumeCapacity", "There is not enough capacity for the volume", "zone"),
        ("InsufficientReservedInstanceCapacity", "Not enough capacity", "pool"),
        (
            "InvalidParameterCombination",
            "Enhanced networking with the Elastic Network Adapter (ENA) is required for the "
            "'g5.xlarge' instance type. Ensure that you are using an AMI that is enabled for ENA.",
            "pool",
        ),
        (
            "InvalidParameterValue",
            "The architecture 'arm64' of the specified instance type does not match the "
            "architecture 'x86_64' of the specified AMI.",
            "pool",
        ),
        ("InvalidParameterValue", "Invalid IAM Instance Profile name", "place"),
        ("TagPolicyViolation", "The tag policy does not allow the specified value", "place"),
        ("RegionDisabledException", "STS is not activated in this region", "place"),
    ],
)
def test_a_refusal_reaches_no_further_than_what_it_is_about(code: str, said: str, scope: str):
    """A subnet that is gone leaves the other zones, a type that the image does not run on other types."""
    assert error_of(code, said, "AWS", 400).refusal.scope == scope


def fuzzed(seed: int, whole: bytes) -> Answer:
    """An answer that is a little, or very, wrong."""
    which = int(draw(seed, "which") * 6)
    if which == 0:
        status, body = GARBLED[int(draw(seed, "garbled") * len(GARBLED))]
        return Answer(status, {}, body)
    status = (200, 200, 200, 400, 403, 404, 429, 500, 502, 503)[int(draw(seed, "status") * 10)]
    kind = ("text/xml", "application/json", "", "text/html; charset=x")[int(draw(seed, "k") * 4)]
    headers = {"Content-Type": kind, "Date": ("yesterday", "")[int(draw(seed, "d") * 2)]}
    cut = int(draw(seed, "cut") * len(whole))
    if which == 1:
        return Answer(status, headers, whole[:cut])
    if which == 2:
        return Answer(status, headers, whole[:cut] + b"\x00\xff<&" + whole[cut:])
    if which == 3:
        end = whole.find(b">", cut)
        return Answer(status, headers, whole[:cut] + whole[max(end, cut) :])
    if which == 4:
        for tag in (b"instanceId", b"launchTime", b"instanceState", b"placement"):
            if draw(seed, tag) < 0.5:
                whole = whole.replace(tag, b"x" + tag)
        return Answer(status, headers, whole)
    return Answer(status, headers, whole.replace(b"2027-", b"abc-").replace(b"Name>", b"N>"))


def test_no_answer_ends_the_manager(fuzz_cases: int):
    """Whatever EC2 says, a verb returns something or raises an error of ours, and nothing else."""
    house = AwsHouse()
    house.account.dials.describe_burst = house.account.dials.mutate_burst = 1e9
    house.account.dials.machines_burst = 1e9
    true, seeds = house.door.answer, iter(range(10**9))

    def answered(method: str, url: str, headers: Any, body: bytes) -> Answer:
        told = true(method, url, headers, body)
        return fuzzed(next(seeds), told.body)

    async def scene(provider: AwsProvider) -> int:
        await provider.launch(request("t-0"))
        house.door.answer = answered
        raised = 0
        for nth in range(fuzz_cases):
            verb = nth % 5
            try:
                if verb == 0:
                    await provider.launch(request(f"t-{nth}"))
                elif verb == 1:
                    await provider.list(EAST)
                elif verb == 2:
                    await provider.quotes(EAST)
                elif verb == 3:
                    await provider.sold(EAST)
                else:
                    await provider.places()
            except CloudError:
                raised += 1
        return raised

    assert house.play(scene) > fuzz_cases // 3


def test_a_list_never_loses_a_machine_to_an_odd_answer(fuzz_cases: int):
    """A list that is read from a damaged answer is an error, or it has every machine's id."""
    house = AwsHouse()
    house.account.dials.describe_burst = 1e9
    true, seeds = house.door.answer, iter(range(10**9))

    def answered(method: str, url: str, headers: Any, body: bytes) -> Answer:
        told = true(method, url, headers, body)
        seed = next(seeds)
        if b"Action=DescribeInstances&" not in body or int(draw(seed, "which") * 6) == 4:
            return told
        return fuzzed(seed, told.body)

    async def scene(provider: AwsProvider) -> tuple[int, int]:
        given = await provider.launch(request("t-1", count=3))
        ids = {machine.id for machine in given}
        house.door.answer = answered
        whole = short = 0
        for _ in range(fuzz_cases // 4):
            try:
                listing = await provider.list(EAST)
            except CloudError:
                continue
            found = {machine.id for machine in listing.machines}
            whole += found >= ids
            short += not found >= ids
        return whole, short

    whole, short = house.play(scene)
    assert short == 0
    assert whole > 10


CANARIES = {
    "secret key": "CANARY0secretkey/abcdefghijklmnopqrstuvw",
    "session": "CANARY1session",
    "user data": "CANARY2userdata",
    "header": "CANARY3header",
}


def test_no_secret_is_in_what_is_said(caplog: pytest.LogCaptureFixture):
    """Keys, session tokens and user data are in no error, no chain of causes, no log, no value."""
    house = AwsHouse()
    house.door.keys[house.key_id] = replace(
        house.door.keys[house.key_id], secret=CANARIES["secret key"]
    )
    session = KeyedSession(house.key_id, secret=CANARIES["secret key"])
    settings = replace(SETTINGS, user_data=CANARIES["user data"])
    said: list[str] = []

    def heard(error: BaseException) -> None:
        said.extend(traceback.format_exception(error))
        said.extend([repr(error), repr(error.__cause__)])

    faults = ("before", "after", "broken", "throttle", *(f"garbled{n}" for n in range(7)))

    async def scene(provider: AwsProvider) -> None:
        said.append(repr(await provider.sold(EAST)))
        for nth, wrong in enumerate(faults):
            house.door.fault = lambda action, _, wrong=wrong: (
                wrong if action == "RunInstances" else None
            )
            try:
                said.append(repr(await provider.launch(request(f"t-{nth}"))))
            except CloudError as error:
                heard(error)
        house.door.fault = lambda action, nth: None
        house.door.keys[house.key_id] = replace(house.door.keys[house.key_id], secret="another")
        try:
            await provider.list(EAST)
        except CloudError as error:
            heard(error)
        bad = replace(request("t-99"), tags={"name": 3})
        try:
            await provider.launch(bad)
        except CloudError as error:
            heard(error)

    with caplog.at_level(logging.INFO):
        calls = Calls(new_session=lambda: session)
        house.play(scene, calls=calls, settings=settings)
    everything = "\n".join([*said, caplog.text])
    assert len(said) > 20
    assert [name for name, canary in CANARIES.items() if canary in everything] == []
    for x in house.account.instances.values():
        assert CANARIES["secret key"] not in repr(x.request)


def test_one_launch_is_sent_once_whatever_is_answered():
    """boto3 sends a launch that is refused with HTTP 500 three times by itself; here it is once."""
    house = AwsHouse()
    house.account.room["us-east-1a", "g5.xlarge", "spot"] = 0
    assert launch_error(house).refusal.scope == "pool"
    assert house.door.calls["RunInstances"] == 1


def test_without_the_sdk_the_cloud_is_closed_with_one_sentence(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "boto3", None)
    house = AwsHouse()

    async def scene(provider: AwsProvider) -> Any:
        with pytest.raises(NotAllowed, match=r"spot-orchestrator\[aws\]"):
            await provider.list(EAST)
        return await provider.places()

    (closed,) = house.play(scene, calls=Calls())
    assert isinstance(closed, Closed)
    assert closed.place == Place("aws", "")
    assert "boto3 is not installed" in closed.because


def test_the_command_line_imports_no_sdk():
    """The provider's module itself is free of boto3, which is imported where the first call is made."""
    code = (
        "import sys, orchestrator.cli, cloud.aws.provider; "
        "print(sorted(m for m in sys.modules if m.split('.')[0] in ('boto3', 'botocore')))"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "[]"


def test_no_keys_are_one_sentence(monkeypatch: pytest.MonkeyPatch):
    """An empty credential chain closes the whole cloud; the sentence says what to give it."""
    boto3 = importlib.import_module("boto3")
    core = importlib.import_module("botocore.session").Session()
    core.register_component(
        "credential_provider",
        importlib.import_module("botocore.credentials").CredentialResolver([]),
    )
    calls = Calls(new_session=lambda: boto3.Session(botocore_session=core))

    async def scene(provider: AwsProvider) -> Any:
        return await provider.places()

    (closed,) = AwsHouse().play(scene, calls=calls)
    assert "instance profile" in closed.because


@pytest.mark.parametrize("wrong", ["us-east-1a", "us-east-1a=", "=subnet-1"])
def test_a_setting_of_pairs_says_what_is_wrong(wrong: str):
    assert pairs("a=1, b = 2,") == {"a": "1", "b": "2"}
    with pytest.raises(ValueError, match="us-east-1a=subnet-0123"):
        pairs(wrong)
