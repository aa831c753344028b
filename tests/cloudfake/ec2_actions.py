"""The calls of the fake EC2 that change something, and the record in which all calls are found."""

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from cloudfake.books import draw
from cloudfake.ec2_account import (
    ACCOUNT,
    ADDRESS_USD_PER_H,
    CODES,
    GIB_USD_PER_H,
    MESSAGES,
    Account,
    Instance,
    Nic,
    Refused,
    SpotRequest,
    Volume,
    iso,
)

TOKEN_KEPT_S = 24 * 3600.0
USER_DATA_MAX = 16384
IMAGE_GIB = 30
DEPLOYMENT = "orchestrator-deployment"
TOKEN = "orchestrator-token"


class Call(Protocol):
    """One call that the door let in."""

    account: Account
    region: str
    params: dict[str, Any]
    at_s: float
    who: str
    policy: Mapping[str, Any] | None

    def need(self, action: str, resource: str, context: Mapping[str, Any]) -> None:
        """Refuse the call unless the caller's policy allows this."""
        ...


Handler = Callable[[Call], dict[str, Any]]
HANDLERS: dict[tuple[str, str], Handler] = {}


def action(service: str, name: str) -> Callable[[Handler], Handler]:
    def enter(handler: Handler) -> Handler:
        HANDLERS[service, name] = handler
        return handler

    return enter


def arn(call: Call, kind: str, name: str) -> str:
    owner = "" if kind == "image" else ACCOUNT
    return f"arn:aws:ec2:{call.region}:{owner}:{kind}/{name}"


def as_tags(tags: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"Key": name, "Value": value} for name, value in tags.items()]


def only_asked(call: Call) -> None:
    """End a call that only asks whether it would be allowed."""
    if call.params.get("DryRun"):
        raise Refused("DryRunOperation", "Request would have succeeded, but DryRun is set.", 412)


def _tags_for(params: Mapping[str, Any], kind: str) -> dict[str, str]:
    return {
        tag["Key"]: tag.get("Value", "")
        for entry in params.get("TagSpecifications", ())
        if entry.get("ResourceType") == kind
        for tag in entry.get("Tags", ())
    }


class _Order:
    """What a RunInstances asks for, looked up in the account; refuses what can never work."""

    def __init__(self, call: Call) -> None:
        params, account = call.params, call.account
        nic = (params.get("NetworkInterfaces") or [{}])[0]
        self.subnet = nic.get("SubnetId") or params.get("SubnetId") or self._usual_subnet(call)
        self.groups = nic.get("Groups") or params.get("SecurityGroupIds") or []
        self.public = bool(nic.get("AssociatePublicIpAddress", True))
        self.nic_goes = bool(nic.get("DeleteOnTermination", True))
        self.type = params.get("InstanceType", "")
        self.market = "spot" if "InstanceMarketOptions" in params else "on-demand"
        self.spot = params.get("InstanceMarketOptions", {}).get("SpotOptions", {})
        self.tags = {
            kind: _tags_for(params, kind)
            for kind in ("instance", "volume", "network-interface", "spot-instances-request")
        }
        if account.images.get(params.get("ImageId", "")) != call.region:
            raise Refused(
                "InvalidAMIID.NotFound", f"The image id '[{params.get('ImageId')}]' does not exist"
            )
        if self.type not in account.kinds:
            raise Refused("InvalidParameterValue", f"Invalid value '{self.type}' for InstanceType.")
        zone = account.subnets.get(self.subnet)
        if zone is None or account.region_of[zone] != call.region:
            raise Refused(
                "InvalidSubnetID.NotFound", f"The subnet ID '{self.subnet}' does not exist"
            )
        for group in self.groups:
            if account.groups.get(group) != call.region:
                raise Refused(
                    "InvalidGroup.NotFound", f"The security group '{group}' does not exist"
                )
        self.zone: str = zone
        self._check_rest(params, account)

    def _check_rest(self, params: Mapping[str, Any], account: Account) -> None:
        profile = params.get("IamInstanceProfile", {})
        name = profile.get("Name") or profile.get("Arn", "").rpartition("/")[2]
        if profile and name not in account.profiles:
            raise Refused(
                "InvalidParameterValue",
                f"Value ({name}) for parameter iamInstanceProfile.name is invalid. "
                "Invalid IAM Instance Profile name",
            )
        kind = account.kinds[self.type]
        if account.room.get((self.zone, self.type, "sold")) == 0:
            raise Refused(
                "Unsupported",
                f"Your requested instance type ({self.type}) is not supported in your requested "
                f"Availability Zone ({self.zone}).",
            )
        if kind.architecture != "x86_64":
            raise Refused(
                "InvalidParameterValue",
                f"The architecture '{kind.architecture}' of the specified instance type does not "
                "match the architecture 'x86_64' of the specified AMI.",
            )
        if len(base64.b64decode(params.get("UserData", ""))) > USER_DATA_MAX:
            raise Refused("InvalidUserData.Malformed", "User data is limited to 16384 bytes")

    @staticmethod
    def _usual_subnet(call: Call) -> str:
        zone = call.params.get("Placement", {}).get("AvailabilityZone")
        return f"subnet-{zone or call.account.regions[call.region][0]}"


def _authorise(call: Call, order: _Order) -> None:
    params = call.params
    told = {
        "ec2:Region": call.region,
        "ec2:InstanceType": order.type,
        "ec2:MetadataHttpTokens": params.get("MetadataOptions", {}).get("HttpTokens", "optional"),
        "ec2:InstanceMarketType": order.market,
    }
    made = ["instance", "volume", "network-interface"]
    if order.market == "spot":
        made.append("spot-instances-request")
    for kind in made:
        tags = order.tags[kind]
        context = told | {f"aws:RequestTag/{name}": value for name, value in tags.items()}
        context["aws:TagKeys"] = list(tags)
        call.need("ec2:RunInstances", arn(call, kind, "*"), context)
        if tags:
            create = context | {"ec2:CreateAction": "RunInstances"}
            call.need("ec2:CreateTags", arn(call, kind, "*"), create)
    call.need("ec2:RunInstances", arn(call, "image", params["ImageId"]), told)
    call.need("ec2:RunInstances", arn(call, "subnet", order.subnet), told)
    for group in order.groups:
        call.need("ec2:RunInstances", arn(call, "security-group", group), told)
    if profile := params.get("IamInstanceProfile"):
        name = profile.get("Name") or profile["Arn"].rpartition("/")[2]
        role = f"arn:aws:iam::{ACCOUNT}:role/{name}"
        call.need("iam:PassRole", role, {"iam:PassedToService": "ec2.amazonaws.com"})


def earlier(call: Call, order: _Order) -> list[Instance] | None:
    """Return the machines that this token started before; a token holds for one zone and a day."""
    token = call.params.get("ClientToken")
    if not token:
        return None
    asked = {
        name: told for name, told in call.params.items() if name not in ("ClientToken", "DryRun")
    }
    digest = json.dumps(asked, sort_keys=True, default=str)
    key = (call.region, order.zone, token)
    known, ids, at_s = call.account.tokens.get(key, ("", [], 0.0))
    if not known or call.at_s > at_s + TOKEN_KEPT_S:
        call.account.tokens[key] = (digest, [], call.at_s)
        return None
    if known != digest:
        raise Refused(
            "IdempotentParameterMismatch",
            "The client token was used before with other parameters",
        )
    if not ids:
        return None
    found = [call.account.instances.get(name) for name in ids]
    if any(x is None or x.done for x in found):
        raise Refused(
            "IdempotentInstanceTerminated",
            f"The client token was used for an instance that has been terminated: {ids[0]}",
        )
    return [x for x in found if x is not None]


def _check_quota(call: Call, order: _Order, count: int) -> None:
    kind = call.account.kinds[order.type]
    quotas = call.account.default_quota | call.account.quota
    limit = quotas.get((kind.group, order.market))
    held = call.account.vcpus(call.region, kind.group, order.market)
    if limit is not None and held + count * kind.vcpus > limit:
        if order.market == "spot":
            raise Refused("MaxSpotInstanceCountExceeded", "Max spot instance count exceeded")
        raise Refused(
            "VcpuLimitExceeded",
            f"You have requested more vCPU capacity than your current vCPU limit of {limit} allows",
        )


def how_many(call: Call, order: _Order) -> int:
    """Return how many machines the market gives now; fewer than MinCount are none at all."""
    account, least, most = call.account, call.params["MinCount"], call.params["MaxCount"]
    _check_quota(call, order, most)
    if account.free_addresses[order.subnet] < most:
        raise Refused(
            "InsufficientFreeAddressesInSubnet",
            f"There are not enough free addresses in subnet '{order.subnet}'",
        )
    if order.market == "spot" and "MaxPrice" in order.spot:
        price = account.spot_price(order.zone, order.type, call.at_s)
        if float(order.spot["MaxPrice"]) < price:
            raise Refused(
                "SpotMaxPriceTooLow",
                f"Your Spot request price of {order.spot['MaxPrice']} is lower than the minimum "
                f"required Spot request fulfillment price of {price}.",
            )
    count = min(most, account.free(order.zone, order.type, order.market))
    if count < least:
        raise Refused(
            "InsufficientInstanceCapacity",
            f"We currently do not have sufficient {order.type} capacity in the Availability Zone "
            f"you requested ({order.zone}).",
            500,
        )
    return count


@action("ec2", "RunInstances")
def run_instances(call: Call) -> dict[str, Any]:
    order = _Order(call)
    _authorise(call, order)
    only_asked(call)
    machines = earlier(call, order)
    if machines is None:
        count = how_many(call, order)
        reservation = call.account.new_id("r")
        machines = [_start(call, order, nth, reservation) for nth in range(count)]
        _bind(call, order, machines)
    return {
        "ReservationId": machines[0].reservation,
        "OwnerId": ACCOUNT,
        "Instances": [described(call.account, x, call.at_s, fresh=True) for x in machines],
    }


def _bind(call: Call, order: _Order, machines: Sequence[Instance]) -> None:
    if token := call.params.get("ClientToken"):
        key = (call.region, order.zone, token)
        digest, _, at_s = call.account.tokens[key]
        call.account.tokens[key] = (digest, [x.id for x in machines], at_s)


def _start(call: Call, order: _Order, index: int, reservation: str) -> Instance:
    account, dials, at_s = call.account, call.account.dials, call.at_s
    x = Instance(account.new_id("i"), call.params, at_s)
    x.region, x.zone, x.type, x.subnet = call.region, order.zone, order.type, order.subnet
    x.market, x.index, x.reservation = order.market, index, reservation
    x.token = call.params.get("ClientToken", "")
    x.visible_s = at_s + dials.young_s * draw(dials.seed, "young", x.id)
    x.lag_s = dials.lag_s * draw(dials.seed, "lag", x.id)
    x.tags = [(at_s, name, value) for name, value in order.tags["instance"].items()]
    nth = len(account.instances)
    x.address = f"10.{nth // 62500 % 250}.{nth // 250 % 250}.{nth % 250 + 4}"
    if account.address_of is not None:
        x.address = account.address_of(x)
    account.instances[x.id] = x
    account.free_addresses[x.subnet] -= 1
    owner = order.tags["instance"].get(DEPLOYMENT, "")
    token = order.tags["instance"].get(TOKEN) or x.token
    account.own(
        x.id,
        "machine",
        owner,
        at_s,
        0.0,
        token=token,
        zone=x.zone,
        market=x.market,
        asked=call.params["MaxCount"],
    )
    account.books.lines[x.id].steps.clear()  # a pending machine costs nothing
    _attach(call, order, x)
    if draw(dials.seed, "fails", x.id) < dials.fails_after_share:
        code = ("Server.InsufficientInstanceCapacity", "Client.VolumeLimitExceeded")[index % 2]
        account.push(at_s + dials.fails_after_s, lambda due_s: account.fail(x, due_s, code))
    startup_s = dials.startup_s * (0.7 + 0.6 * draw(dials.seed, "startup", x.id))
    account.push(at_s + startup_s, lambda due_s: account.run(x, due_s))
    return x


def _attach(call: Call, order: _Order, x: Instance) -> None:
    """Give a machine its disks, its network interface and its spot request."""
    account, at_s = call.account, call.at_s
    disks: dict[str, dict[str, Any]] = {
        "/dev/xvda": {"VolumeSize": IMAGE_GIB, "DeleteOnTermination": True}
    }
    for entry in call.params.get("BlockDeviceMappings", ()):
        device = entry["DeviceName"]
        root = disks.get(device, {"VolumeSize": 8, "DeleteOnTermination": False})
        disks[device] = root | entry.get("Ebs", {})
    for device, disk in disks.items():
        volume = Volume(
            id=account.new_id("vol"),
            zone=x.zone,
            gib=disk["VolumeSize"],
            instance=x.id,
            goes_along=disk["DeleteOnTermination"],
            created_s=at_s,
            tags=order.tags["volume"],
        )
        account.volumes[volume.id] = volume
        x.volumes[device] = volume.id
        account.own(
            volume.id, "disk", volume.tags.get(DEPLOYMENT, ""), at_s, volume.gib * GIB_USD_PER_H
        )
    nic = Nic(
        id=account.new_id("eni"),
        zone=x.zone,
        instance=x.id,
        goes_along=order.nic_goes,
        created_s=at_s,
        tags=order.tags["network-interface"],
    )
    account.nics[nic.id] = nic
    x.nic = nic.id
    usd_per_h = ADDRESS_USD_PER_H if order.public else 0.0
    account.own(nic.id, "nic", nic.tags.get(DEPLOYMENT, ""), at_s, usd_per_h)
    if order.market == "spot":
        request = SpotRequest(
            id=account.new_id("sir"),
            region=x.region,
            instance=x.id,
            state="active",
            status="fulfilled",
            created_s=at_s,
            updated_s=at_s,
            tags=order.tags["spot-instances-request"],
        )
        account.spot_requests[request.id] = request
        x.spot_request = request.id


def described(account: Account, x: Instance, at_s: float, fresh: bool = False) -> dict[str, Any]:
    """Return a machine as lists show it; `fresh` is the launch's own answer, which never lags."""
    _, state, code = x.states[-1] if fresh else x.seen(at_s)
    since_s = next(began_s for began_s, _, why in x.states if why == code)
    params = x.request
    metadata = {"HttpTokens": "optional", "HttpEndpoint": "enabled"} | params.get(
        "MetadataOptions", {}
    )
    cores = account.kinds[x.type].vcpus // 2 or 1
    told: dict[str, Any] = {
        "InstanceId": x.id,
        "ImageId": params["ImageId"],
        "State": {"Code": CODES[state], "Name": state},
        "PrivateIpAddress": None if state in ("shutting-down", "terminated") else x.address,
        "StateTransitionReason": _transition(code, since_s),
        "ClientToken": x.token,
        "AmiLaunchIndex": x.index,
        "InstanceType": x.type,
        "LaunchTime": iso(x.launched_s),
        "Placement": {"AvailabilityZone": x.zone, "Tenancy": "default"},
        "SubnetId": x.subnet,
        "VpcId": f"vpc-{x.region}",
        "CpuOptions": {"CoreCount": cores, "ThreadsPerCore": 2},
        "MetadataOptions": {"State": "applied"} | metadata,
        "BlockDeviceMappings": [
            {
                "DeviceName": device,
                "Ebs": {
                    "VolumeId": name,
                    "DeleteOnTermination": account.volumes[name].goes_along,
                    "Status": "attached",
                },
            }
            for device, name in x.volumes.items()
        ],
        "Tags": as_tags(x.tags_at(at_s)),
    }
    if x.market == "spot":
        told |= {"InstanceLifecycle": "spot", "SpotInstanceRequestId": x.spot_request}
    if code:
        told["StateReason"] = {"Code": code, "Message": f"{code}: {MESSAGES[code]}"}
    return told


def _transition(code: str, since_s: float) -> str:
    if code == "Client.UserInitiatedShutdown":
        return f"User initiated ({iso(since_s):%Y-%m-%d %H:%M:%S} GMT)"
    return code


def find(call: Call, instance_id: str) -> Instance:
    x = call.account.instances.get(instance_id)
    if x is None or x.region != call.region or x.visible_s > call.at_s:
        raise Refused(
            "InvalidInstanceID.NotFound", f"The instance ID '{instance_id}' does not exist"
        )
    return x


def _of(call: Call, kind: str, name: str, tags: Mapping[str, str], wanted: str) -> None:
    context = {f"aws:ResourceTag/{key}": value for key, value in tags.items()}
    context |= {f"ec2:ResourceTag/{key}": value for key, value in tags.items()}
    call.need(wanted, arn(call, kind, name), context | {"ec2:Region": call.region})
    only_asked(call)


@action("ec2", "TerminateInstances")
def terminate_instances(call: Call) -> dict[str, Any]:
    found = [find(call, name) for name in call.params["InstanceIds"]]
    for x in found:
        _of(call, "instance", x.id, x.tags_at(call.at_s), "ec2:TerminateInstances")
    changes = []
    for x in found:
        before = x.state
        call.account.end(x, call.at_s, "Client.UserInitiatedShutdown", "user")
        changes.append((x.id, before, x.state))
    return {
        "TerminatingInstances": [
            {
                "InstanceId": name,
                "PreviousState": {"Code": CODES[before], "Name": before},
                "CurrentState": {"Code": CODES[after], "Name": after},
            }
            for name, before, after in changes
        ]
    }


@action("ec2", "CreateTags")
def create_tags(call: Call) -> dict[str, Any]:
    seen_s = call.at_s + call.account.dials.tags_lag_s
    for name in call.params["Resources"]:
        x = find(call, name)
        _of(call, "instance", name, x.tags_at(call.at_s), "ec2:CreateTags")
        x.tags += [(seen_s, tag["Key"], tag["Value"]) for tag in call.params["Tags"]]
    return {}


@action("ec2", "DeleteVolume")
def delete_volume(call: Call) -> dict[str, Any]:
    name = call.params["VolumeId"]
    volume = call.account.volumes.get(name)
    if volume is None or volume.gone:
        raise Refused("InvalidVolume.NotFound", f"The volume '{name}' does not exist.")
    _of(call, "volume", name, volume.tags, "ec2:DeleteVolume")
    if volume.instance:
        raise Refused("VolumeInUse", f"Volume {name} is currently attached to {volume.instance}")
    call.account.drop_volume(volume, call.at_s, "user")
    return {}


@action("ec2", "DeleteNetworkInterface")
def delete_network_interface(call: Call) -> dict[str, Any]:
    name = call.params["NetworkInterfaceId"]
    nic = call.account.nics.get(name)
    if nic is None or nic.gone:
        raise Refused(
            "InvalidNetworkInterfaceID.NotFound", f"The networkInterface ID '{name}' does not exist"
        )
    _of(call, "network-interface", name, nic.tags, "ec2:DeleteNetworkInterface")
    if nic.instance:
        raise Refused("InvalidParameterValue", f"Network interface '{name}' is currently in use.")
    call.account.drop_nic(nic, call.at_s, "user")
    return {}


@action("ec2", "CancelSpotInstanceRequests")
def cancel_spot_instance_requests(call: Call) -> dict[str, Any]:
    cancelled = []
    for name in call.params["SpotInstanceRequestIds"]:
        request = call.account.spot_requests.get(name)
        if request is None or request.region != call.region:
            raise Refused(
                "InvalidSpotInstanceRequestID.NotFound",
                f"The spot instance request ID '{name}' does not exist",
            )
        _of(call, "spot-instances-request", name, request.tags, "ec2:CancelSpotInstanceRequests")
        if request.state in ("open", "active"):
            request.state, request.updated_s = "cancelled", call.at_s
        cancelled.append({"SpotInstanceRequestId": name, "State": request.state})
    return {"CancelledSpotInstanceRequests": cancelled}
