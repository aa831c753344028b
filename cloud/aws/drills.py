"""Spot interruptions on purpose, by AWS's fault injection: the same notice, the same end."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import Any

from cloud import errors
from cloud.aws.calls import Calls

AT_ONCE = 5  # spot machines of one experiment, by AWS's quota
START_S_MAX = 60.0
LOOK_S = 0.5
BEGUN = ("running", "completed")
WAITING = ("pending", "initiating")
NO_ROLE = (
    "aws.drill_role is not set, so AWS interrupts nothing on purpose; set it to the output DrillRole "
    "of cloud/aws/account.json"
)


async def interrupt(calls: Calls, region: str, role: str, ids: Sequence[str]) -> None:
    """Send each machine the notice of an interruption, and its end two minutes later.

    It returns when AWS says that this has begun. An error names the machines that go all the same.
    """
    if not role:
        raise errors.Misconfigured(NO_ROLE)
    for first in range(0, len(ids), AT_ONCE):
        try:
            await _experiment(calls, region, role, ids[first : first + AT_ONCE])
        except errors.CloudError as error:
            if first:
                _add(error, f"interrupted before that: {', '.join(ids[:first])}")
            raise


async def _experiment(calls: Calls, region: str, role: str, ids: Sequence[str]) -> None:
    account = role.split(":")[4]
    arns = [f"arn:aws:ec2:{region}:{account}:instance/{one}" for one in ids]
    try:
        made = await calls.call(
            region, "fis", "create_experiment_template", **_template(role, arns)
        )
    except errors.Misconfigured as error:
        _add(error, "correct aws.drill_role")
        raise
    name = str(made["experimentTemplate"]["id"])
    try:
        started = await calls.call(
            region, "fis", "start_experiment", clientToken=name, experimentTemplateId=name
        )
        await _begun(calls, region, str(started["experiment"]["id"]))
    finally:
        with suppress(errors.Throttled, errors.Unknown):  # it costs nothing where it is
            await calls.call(region, "fis", "delete_experiment_template", id=name)


async def _begun(calls: Calls, region: str, name: str) -> None:
    """Wait until an accepted experiment runs; raise if it fails, or does not say so in time."""
    late_s, status = time.monotonic() + START_S_MAX, ""
    while time.monotonic() < late_s:
        told = await calls.call(region, "fis", "get_experiment", id=name)
        state = told["experiment"]["state"]
        status = str(state.get("status"))
        if status in BEGUN:
            return
        if status not in WAITING:
            why = str(state.get("reason") or "no reason is given").rstrip(".")
            raise errors.Misconfigured(
                f"AWS, {region}: the experiment {name} is {status}: {why}; set aws.drill_role to "
                "the output DrillRole of the newest cloud/aws/account.json"
            )
        await asyncio.sleep(LOOK_S)
    raise errors.Unknown(
        f"AWS, {region}: the experiment {name} is still {status} after {START_S_MAX:g} s; whether "
        "machines were interrupted is seen with: orchestrator events"
    )


def _add(error: errors.CloudError, said: str) -> None:
    error.args = (f"{str(error).rstrip('.')}; {said}",)


def _template(role: str, arns: Sequence[str]) -> dict[str, Any]:
    return {
        "clientToken": blake2b(",".join(arns).encode(), digest_size=16).hexdigest(),
        "description": "a drill of spot-orchestrator",
        "roleArn": role,
        "stopConditions": [{"source": "none"}],
        "targets": {
            "machines": {
                "resourceType": "aws:ec2:spot-instance",
                "resourceArns": list(arns),
                "selectionMode": "ALL",
            }
        },
        "actions": {
            "interrupt": {
                "actionId": "aws:ec2:send-spot-instance-interruptions",
                "parameters": {"durationBeforeInterruption": "PT2M"},
                "targets": {"SpotInstances": "machines"},
            }
        },
    }
