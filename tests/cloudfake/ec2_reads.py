"""The calls of the fake AWS that only read: EC2's lists, and the few of other services."""

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from cloudfake.ec2_account import ACCOUNT, Refused, iso
from cloudfake.ec2_actions import Call, action, as_tags, described, find
from cloudfake.ec2_policy import allows, like
from cloudfake.ec2_types import GROUPS

Read = Callable[[Any], Iterable[str]]


def chosen(call: Call, entries: Iterable[dict[str, Any]], reads: Mapping[str, Read]) -> list[Any]:
    """Return the entries that pass all filters of the call; a filter is named in `reads`."""
    filters = call.params.get("Filters", [])
    for entry in filters:
        if entry["Name"] not in reads and not entry["Name"].startswith("tag:"):
            raise Refused("InvalidParameterValue", f"The filter '{entry['Name']}' is invalid")

    def values(entry: dict[str, Any], name: str) -> Iterable[str]:
        if name.startswith("tag:"):
            key = name.removeprefix("tag:")
            return [tag["Value"] for tag in entry.get("Tags", ()) if tag["Key"] == key]
        return reads[name](entry)

    return [
        entry
        for entry in entries
        if all(
            any(like(told, one) for told in values(entry, f["Name"]) for one in f["Values"])
            for f in filters
        )
    ]


def zone_id(zone: str) -> str:
    """Return the id that a zone has in every account; its name differs between accounts."""
    return f"{zone}-id"


def paged(call: Call, name: str, entries: list[Any]) -> dict[str, Any]:
    """Return one page, which may be shorter than the caller asked for."""
    token = call.params.get("NextToken")
    try:
        first = int(token.removeprefix("page-")) if token else 0
    except ValueError:
        raise Refused("InvalidNextToken", "The pagination token is not valid") from None
    page = call.account.dials.page
    size = min(call.params.get("MaxResults", page), page)
    last = first + size
    more = {"NextToken": f"page-{last}"} if last < len(entries) else {}
    return {name: entries[first:last]} | more


def _read(call: Call, name: str) -> None:
    call.need(f"ec2:{name}", "*", {"ec2:Region": call.region})


@action("ec2", "DescribeInstances")
def describe_instances(call: Call) -> dict[str, Any]:
    _read(call, "DescribeInstances")
    account, at_s = call.account, call.at_s
    if ids := call.params.get("InstanceIds"):
        found = [find(call, name) for name in ids]
    else:
        found = [
            x for x in account.instances.values() if x.region == call.region and x.visible_s <= at_s
        ]
    reads: dict[str, Read] = {
        "instance-state-name": lambda x: [x["State"]["Name"]],
        "instance-id": lambda x: [x["InstanceId"]],
        "client-token": lambda x: [x["ClientToken"]],
        "instance-lifecycle": lambda x: [x.get("InstanceLifecycle", "")],
        "tag-key": lambda x: [tag["Key"] for tag in x["Tags"]],
    }
    lines = chosen(call, [described(account, x, at_s) for x in found], reads)
    page = paged(call, "Reservations", lines)
    page["Reservations"] = [
        {
            "ReservationId": account.instances[line["InstanceId"]].reservation,
            "OwnerId": ACCOUNT,
            "Instances": [line],
        }
        for line in page["Reservations"]
    ]
    return page


@action("ec2", "DescribeVolumes")
def describe_volumes(call: Call) -> dict[str, Any]:
    _read(call, "DescribeVolumes")
    entries = [
        {
            "VolumeId": v.id,
            "AvailabilityZone": v.zone,
            "Size": v.gib,
            "State": "in-use" if v.instance else "available",
            "CreateTime": iso(v.created_s),
            "Tags": as_tags(v.tags),
        }
        for v in call.account.volumes.values()
        if not v.gone and call.account.region_of[v.zone] == call.region
    ]
    return paged(
        call,
        "Volumes",
        chosen(
            call,
            entries,
            {"status": lambda v: [v["State"]], "volume-id": lambda v: [v["VolumeId"]]},
        ),
    )


@action("ec2", "DescribeNetworkInterfaces")
def describe_network_interfaces(call: Call) -> dict[str, Any]:
    _read(call, "DescribeNetworkInterfaces")
    entries = [
        {
            "NetworkInterfaceId": n.id,
            "AvailabilityZone": n.zone,
            "Status": "in-use" if n.instance else "available",
            "TagSet": as_tags(n.tags),
            "Tags": as_tags(n.tags),
        }
        for n in call.account.nics.values()
        if not n.gone and call.account.region_of[n.zone] == call.region
    ]
    reads: dict[str, Read] = {
        "status": lambda n: [n["Status"]],
        "network-interface-id": lambda n: [n["NetworkInterfaceId"]],
    }
    found = chosen(call, entries, reads)
    for entry in found:
        del entry["Tags"]
    return paged(call, "NetworkInterfaces", found)


@action("ec2", "DescribeSpotInstanceRequests")
def describe_spot_instance_requests(call: Call) -> dict[str, Any]:
    _read(call, "DescribeSpotInstanceRequests")
    entries = [
        {
            "SpotInstanceRequestId": r.id,
            "InstanceId": r.instance,
            "State": r.state,
            "Status": {"Code": r.status, "UpdateTime": iso(r.updated_s)},
            "CreateTime": iso(r.created_s),
            "Type": "one-time",
            "Tags": as_tags(r.tags),
        }
        for r in call.account.spot_requests.values()
        if r.region == call.region
    ]
    reads: dict[str, Read] = {
        "state": lambda r: [r["State"]],
        "spot-instance-request-id": lambda r: [r["SpotInstanceRequestId"]],
    }
    found = chosen(call, entries, reads)
    return paged(call, "SpotInstanceRequests", found)


@action("ec2", "DescribeSpotPriceHistory")
def describe_spot_price_history(call: Call) -> dict[str, Any]:
    """Answer with the changes in the window, newest first, and with the last one before it."""
    _read(call, "DescribeSpotPriceHistory")
    params, account = call.params, call.account
    ends_s = min(call.at_s, params["EndTime"].timestamp() if "EndTime" in params else call.at_s)
    starts_s = params["StartTime"].timestamp() if "StartTime" in params else 0.0
    wanted = params.get("InstanceTypes") or list(account.kinds)
    entries = []
    for zone in account.regions[call.region]:
        for name in wanted:
            if name not in account.kinds or account.room.get((zone, name, "sold")) == 0:
                continue
            steps = [step for step in account.price_steps(zone, name) if step[0] <= ends_s]
            ahead = [step for step in steps if step[0] < starts_s][-1:]
            for since_s, usd in ahead + [step for step in steps if step[0] >= starts_s]:
                for system in ("Linux/UNIX", "Windows"):
                    entries.append((since_s, zone, name, system, usd))
    entries.sort(key=lambda entry: -entry[0])
    told = [
        {
            "AvailabilityZone": zone,
            "InstanceType": name,
            "ProductDescription": system,
            "SpotPrice": f"{usd if system == 'Linux/UNIX' else usd * 2:.6f}",
            "Timestamp": iso(since_s),
        }
        for since_s, zone, name, system, usd in entries
    ]
    if systems := params.get("ProductDescriptions"):
        told = [entry for entry in told if entry["ProductDescription"] in systems]
    reads: dict[str, Read] = {"availability-zone": lambda x: [x["AvailabilityZone"]]}
    return paged(call, "SpotPriceHistory", chosen(call, told, reads))


@action("ec2", "GetSpotPlacementScores")
def get_spot_placement_scores(call: Call) -> dict[str, Any]:
    _read(call, "GetSpotPlacementScores")
    account = call.account
    names = call.params["InstanceTypes"]
    scores = []
    for zone in account.regions[call.region]:
        room = sum(max(0, account.free(zone, name, "spot")) for name in names)
        score = min(10, 1 + room // 2) if len(names) >= 3 else min(3, 1 + room // 2)
        scores.append({"Region": call.region, "AvailabilityZoneId": zone_id(zone), "Score": score})
    return {"SpotPlacementScores": scores}


@action("ec2", "DescribeInstanceTypes")
def describe_instance_types(call: Call) -> dict[str, Any]:
    _read(call, "DescribeInstanceTypes")
    reads: dict[str, Read] = {"instance-type": lambda x: [x["InstanceType"]]}
    entries = [kind.described() for kind in call.account.kinds.values()]
    return paged(call, "InstanceTypes", chosen(call, entries, reads))


@action("ec2", "DescribeInstanceTypeOfferings")
def describe_instance_type_offerings(call: Call) -> dict[str, Any]:
    _read(call, "DescribeInstanceTypeOfferings")
    entries = [
        {"InstanceType": name, "LocationType": "availability-zone", "Location": zone}
        for zone in call.account.regions[call.region]
        for name in call.account.kinds
        if call.account.room.get((zone, name, "sold")) != 0
    ]
    reads: dict[str, Read] = {
        "instance-type": lambda x: [x["InstanceType"]],
        "location": lambda x: [x["Location"]],
    }
    return paged(call, "InstanceTypeOfferings", chosen(call, entries, reads))


def _by_id(call: Call, param: str, known: Mapping[str, str], code: str) -> list[str]:
    wanted = call.params.get(param, list(known))
    for name in wanted:
        if name not in known:
            raise Refused(code, f"'{name}' does not exist")
    return list(wanted)


@action("ec2", "DescribeImages")
def describe_images(call: Call) -> dict[str, Any]:
    _read(call, "DescribeImages")
    known = {name: region for name, region in call.account.images.items() if region == call.region}
    shown = _by_id(call, "ImageIds", known, "InvalidAMIID.NotFound")
    images = [
        {
            "ImageId": name,
            "State": "available",
            "Architecture": "x86_64",
            "RootDeviceName": "/dev/xvda",
            "OwnerId": ACCOUNT,
        }
        | call.account.image_says.get(name, {})
        for name in shown
        if name not in call.account.images_hidden
    ]
    return {"Images": chosen(call, images, {"name": lambda x: [x.get("Name", "")]})}


@action("ec2", "DescribeSubnets")
def describe_subnets(call: Call) -> dict[str, Any]:
    _read(call, "DescribeSubnets")
    account = call.account
    known = {n: z for n, z in account.subnets.items() if account.region_of[z] == call.region}
    return {
        "Subnets": [
            {
                "SubnetId": name,
                "AvailabilityZone": known[name],
                "AvailabilityZoneId": zone_id(known[name]),
                "VpcId": f"vpc-{call.region}",
                "AvailableIpAddressCount": account.free_addresses[name],
                "MapPublicIpOnLaunch": True,
            }
            for name in _by_id(call, "SubnetIds", known, "InvalidSubnetID.NotFound")
        ]
    }


@action("ec2", "DescribeSecurityGroups")
def describe_security_groups(call: Call) -> dict[str, Any]:
    _read(call, "DescribeSecurityGroups")
    known = {name: region for name, region in call.account.groups.items() if region == call.region}
    return {
        "SecurityGroups": [
            {
                "GroupId": name,
                "VpcId": f"vpc-{call.region}",
                "IpPermissions": call.account.rules.get(
                    name,
                    [{"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": name}], "IpRanges": []}],
                ),
            }
            for name in _by_id(call, "GroupIds", known, "InvalidGroup.NotFound")
        ]
    }


@action("ec2", "DescribeVpcEndpoints")
def describe_vpc_endpoints(call: Call) -> dict[str, Any]:
    _read(call, "DescribeVpcEndpoints")
    told = call.account.endpoints.get(call.region)
    entries = [
        {
            "ServiceName": told,
            "VpcId": f"vpc-{call.region}",
            "State": "available",
            "VpcEndpointType": "Gateway",
            "RouteTableIds": call.account.endpoint_routes,
        }
    ]
    reads: dict[str, Read] = {
        "vpc-id": lambda x: [x["VpcId"]],
        "service-name": lambda x: [x["ServiceName"]],
    }
    return {"VpcEndpoints": chosen(call, entries if told else [], reads)}


@action("ec2", "DescribeAvailabilityZones")
def describe_availability_zones(call: Call) -> dict[str, Any]:
    _read(call, "DescribeAvailabilityZones")
    return {
        "AvailabilityZones": [
            {
                "ZoneName": zone,
                "RegionName": call.region,
                "State": "available",
                "ZoneId": zone_id(zone),
            }
            for zone in call.account.regions[call.region]
        ]
    }


@action("sts", "GetCallerIdentity")
def get_caller_identity(call: Call) -> dict[str, Any]:
    """Answer who asks; no policy can forbid this one."""
    arn = f"arn:aws:iam::{ACCOUNT}:user/{call.who}"
    if call.policy is not None:
        arn = f"arn:aws:sts::{ACCOUNT}:assumed-role/{call.who}/i-0123456789abcdef0"
    return {"UserId": "AIDA", "Account": ACCOUNT, "Arn": arn}


def _role(call: Call) -> str:
    return f"arn:aws:iam::{ACCOUNT}:role{call.account.role_path}{call.who}"


@action("iam", "GetRole")
def get_role(call: Call) -> dict[str, Any]:
    call.need("iam:GetRole", _role(call), {})
    role = {"RoleName": call.who, "RoleId": "AROA0123456789ABCDEF", "Path": call.account.role_path}
    return {"Role": {**role, "Arn": _role(call), "CreateDate": iso(0.0)}}


@action("iam", "SimulatePrincipalPolicy")
def simulate_principal_policy(call: Call) -> dict[str, Any]:
    """Answer what the caller's policy allows; the context is what the caller says."""
    source = call.params["PolicySourceArn"]
    call.need("iam:SimulatePrincipalPolicy", source, {})
    if call.policy is not None and source != _role(call):
        raise Refused("NoSuchEntity", f"The role {source} cannot be found")
    context = {
        entry["ContextKeyName"]: entry["ContextKeyValues"][0]
        for entry in call.params.get("ContextEntries", ())
    }
    results = [
        {
            "EvalActionName": name,
            "EvalResourceName": resource,
            "EvalDecision": "allowed"
            if call.policy is None or allows([call.policy], name, resource, context)
            else "implicitDeny",
        }
        for name in call.params["ActionNames"]
        for resource in call.params.get("ResourceArns", ["*"])
    ]
    return {"EvaluationResults": results, "IsTruncated": False}


@action("service-quotas", "ListServiceQuotas")
def list_service_quotas(call: Call) -> dict[str, Any]:
    """List what was applied to this account; a quota that has only its default value is left out."""
    call.need("servicequotas:ListServiceQuotas", "*", {})
    quota = call.account.quota
    entries = [_quota(code, quota[key]) for code, key in _quota_codes() if key in quota]
    return paged(call, "Quotas", entries)


@action("service-quotas", "ListAWSDefaultServiceQuotas")
def list_default_service_quotas(call: Call) -> dict[str, Any]:
    call.need("servicequotas:ListAWSDefaultServiceQuotas", "*", {})
    default = call.account.default_quota
    entries = [_quota(code, default.get(key, 1_000_000)) for code, key in _quota_codes()]
    return paged(call, "Quotas", entries)


def _quota_codes() -> list[tuple[str, tuple[str, str]]]:
    return [
        (code, (group, market))
        for group, codes in GROUPS.items()
        for code, market in zip(codes, ("on-demand", "spot"), strict=True)
    ]


def _quota(code: str, vcpus: int) -> dict[str, Any]:
    return {"ServiceCode": "ec2", "QuotaCode": code, "Value": float(vcpus)}


@action("ssm", "GetParameter")
def get_parameter(call: Call) -> dict[str, Any]:
    name = call.params["Name"]
    call.need("ssm:GetParameter", f"arn:aws:ssm:{call.region}::parameter{name}", {})
    return {"Parameter": {"Name": name, "Value": f"ami-{call.region}", "Version": 1}}


@action("pricing", "GetProducts")
def get_products(call: Call) -> dict[str, Any]:
    call.need("pricing:GetProducts", "*", {})
    wanted = {f["Field"]: f["Value"] for f in call.params.get("Filters", ())}
    kinds = [k for k in call.account.kinds.values() if wanted.get("instanceType", k.name) == k.name]
    lines = [
        json.dumps(
            {
                "product": {"attributes": {"instanceType": kind.name}},
                "terms": {
                    "OnDemand": {
                        "t": {
                            "priceDimensions": {
                                "d": {"unit": "Hrs", "pricePerUnit": {"USD": str(kind.usd_per_h)}}
                            }
                        }
                    }
                },
            }
        )
        for kind in kinds
    ]
    return paged(call, "PriceList", lines)


@action("sqs", "ReceiveMessage")
def receive_message(call: Call) -> dict[str, Any]:
    call.need("sqs:ReceiveMessage", _queue_arn(call), {})
    events = call.account.queue[: call.params.get("MaxNumberOfMessages", 1)]
    return {
        "Messages": [
            {"MessageId": event["id"], "ReceiptHandle": event["id"], "Body": json.dumps(event)}
            for event in events
        ]
    }


@action("sqs", "DeleteMessage")
def delete_message(call: Call) -> dict[str, Any]:
    call.need("sqs:DeleteMessage", _queue_arn(call), {})
    handle = call.params["ReceiptHandle"]
    call.account.queue[:] = [event for event in call.account.queue if event["id"] != handle]
    return {}


def _queue_arn(call: Call) -> str:
    name = call.params["QueueUrl"].rpartition("/")[2]
    return f"arn:aws:sqs:{call.region}:{ACCOUNT}:{name}"
