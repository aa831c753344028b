"""The fake of AWS's fault injection: it interrupts spot machines as EC2 would, with two minutes' notice."""

from typing import Any

from cloudfake.ec2_account import ACCOUNT, Refused
from cloudfake.ec2_actions import Call, action

AT_ONCE = 5  # spot machines of one target, as AWS's quota has it
INTERRUPT = "aws:ec2:send-spot-instance-interruptions"


def _arn(call: Call, kind: str, name: str) -> str:
    return f"arn:aws:fis:{call.region}:{ACCOUNT}:{kind}/{name}"


@action("fis", "CreateExperimentTemplate")
def create_experiment_template(call: Call) -> dict[str, Any]:
    call.need("fis:CreateExperimentTemplate", _arn(call, "experiment-template", "*"), {})
    call.need("fis:CreateExperimentTemplate", _arn(call, "action", INTERRUPT), {})
    role = call.params["roleArn"]
    call.need("iam:PassRole", role, {"iam:PassedToService": "fis.amazonaws.com"})
    if role != call.account.drill_role:
        raise Refused("ValidationException", f"The role {role} cannot be assumed by FIS.")
    (target,) = call.params["targets"].values()
    if len(target["resourceArns"]) > AT_ONCE:
        raise Refused("ServiceQuotaExceededException", "Too many targets", 402)
    name = call.account.new_id("EXT")
    call.account.experiments[name] = call.params
    return {"experimentTemplate": {"id": name}}


@action("fis", "StartExperiment")
def start_experiment(call: Call) -> dict[str, Any]:
    name = call.params["experimentTemplateId"]
    call.need("fis:StartExperiment", _arn(call, "experiment-template", name), {})
    call.need("fis:StartExperiment", _arn(call, "experiment", "*"), {})
    template = call.account.experiments.get(name)
    if template is None:
        raise Refused("ResourceNotFoundException", f"There is no template {name}.", 404)
    experiment = call.account.new_id("EXP")
    fails = bool(call.account.drill_fails)
    call.account.drills[experiment] = ["initiating", "failed" if fails else "running"]
    (target,) = template["targets"].values()
    for arn in [] if fails else target["resourceArns"]:
        x = call.account.instances.get(arn.rpartition("/")[2])
        if x is not None and x.market == "spot" and x.state == "running":
            call.account.interrupt(x.id, call.at_s, 120.0)
    return {"experiment": {"id": experiment, "experimentTemplateId": name}}


@action("fis", "GetExperiment")
def get_experiment(call: Call) -> dict[str, Any]:
    name = call.params["id"]
    call.need("fis:GetExperiment", _arn(call, "experiment", name), {})
    says = call.account.drills[name]
    status = says.pop(0) if len(says) > 1 else says[0]
    state = {"status": status, "reason": call.account.drill_fails}
    return {"experiment": {"id": name, "state": state}}


@action("fis", "DeleteExperimentTemplate")
def delete_experiment_template(call: Call) -> dict[str, Any]:
    name = call.params["id"]
    call.need("fis:DeleteExperimentTemplate", _arn(call, "experiment-template", name), {})
    call.account.experiments.pop(name, None)
    return {"experimentTemplate": {"id": name}}
