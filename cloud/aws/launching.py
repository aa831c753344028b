"""The one call that buys: what RunInstances is asked for. Pure."""

from typing import Any

from cloud.aws.answers import TOKEN_TAG
from cloud.model import LaunchRequest, Recipe

HOPS = 2  # a container on the machine is one hop further from its metadata
MADE = ("instance", "volume", "network-interface")


def run_instances(request: LaunchRequest, recipe: Recipe, user_data: str) -> dict[str, Any]:
    """Return the parameters of RunInstances: all machines of the request or none.

    Everything that the launch makes goes when its machine goes, and carries our tags from its first
    moment, because they are part of this call. There is no public address. `shutdown` on the
    machine ends it, and with it the bill. The same request and recipe give the same parameters,
    since a token with others is refused.
    """
    parts = recipe.parts
    tags = [{"Key": name, "Value": told} for name, told in sorted(request.tags.items())]
    tags.append({"Key": TOKEN_TAG, "Value": request.token})
    spot = request.market == "spot"
    made = (*MADE, "spot-instances-request") if spot else MADE
    disk = {"VolumeSize": int(parts["disk_gib"]), "VolumeType": "gp3", "DeleteOnTermination": True}
    asked: dict[str, Any] = {
        "ImageId": parts["image"],
        "InstanceType": request.pool.type,
        "MinCount": request.count,
        "MaxCount": request.count,
        "ClientToken": request.token,
        "InstanceInitiatedShutdownBehavior": "terminate",
        "MetadataOptions": {
            "HttpTokens": "required",
            "HttpPutResponseHopLimit": HOPS,
            "HttpEndpoint": "enabled",
        },
        "NetworkInterfaces": [
            {
                "DeviceIndex": 0,
                "SubnetId": parts[f"subnet:{request.pool.zone}"],
                "Groups": [parts["security_group"]],
                "AssociatePublicIpAddress": False,
                "DeleteOnTermination": True,
            }
        ],
        "BlockDeviceMappings": [{"DeviceName": parts["root_device"], "Ebs": disk}],
        "TagSpecifications": [{"ResourceType": kind, "Tags": tags} for kind in made],
    }
    if spot:
        options = {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"}
        if request.bid_usd_per_h is not None:
            options["MaxPrice"] = f"{request.bid_usd_per_h:.6f}"
        asked["InstanceMarketOptions"] = {"MarketType": "spot", "SpotOptions": options}
    if parts["instance_profile"]:
        asked["IamInstanceProfile"] = {"Name": parts["instance_profile"]}
    if user_data:
        asked["UserData"] = user_data
    return asked
