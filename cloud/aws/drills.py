"""Spot interruptions on purpose, by AWS's fault injection: the same notice, the same end."""

from collections.abc import Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import Any

from cloud import errors
from cloud.aws.calls import Calls

AT_ONCE = 5  # spot machines of one experiment, by AWS's quota
NO_ROLE = (
    "aws.drill_role is not set, so AWS interrupts nothing on purpose; set it to the output DrillRole "
    "of cloud/aws/account.json"
)


async def interrupt(calls: Calls, region: str, role: str, ids: Sequence[str]) -> None:
    """Send each machine the notice of an interruption, and its end two minutes later."""
    if not role:
        raise errors.Misconfigured(NO_ROLE)
    account = role.split(":")[4]
    for first in range(0, len(ids), AT_ONCE):
        some = ids[first : first + AT_ONCE]
        arns = [f"arn:aws:ec2:{region}:{account}:instance/{one}" for one in some]
        made = await calls.call(
            region, "fis", "create_experiment_template", **_template(role, arns)
        )
        name = str(made["experimentTemplate"]["id"])
        try:
            await calls.call(
                region, "fis", "start_experiment", clientToken=name, experimentTemplateId=name
            )
        finally:
            with suppress(errors.Throttled, errors.Unknown):  # it costs nothing where it is
                await calls.call(region, "fis", "delete_experiment_template", id=name)


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
