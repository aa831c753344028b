"""What `examine` says of a subscription: one line for each thing that is wrong, and what to do."""

import re

import pytest
from azure_account import EAST, SETTINGS, examined
from cloudfake.arm import ArmDoor, Dials
from lines import by_name, faults
from msgspec.structs import replace

from cloud.azure.examine import needed
from cloud.findings import Finding

NO_SPOT = Dials(quotas={"lowPriorityCores": 0})


def found(door: ArmDoor, settings=EAST) -> dict[str, Finding]:
    return by_name(examined(door, settings), "azure ")


def wrong(door: ArmDoor, settings=EAST) -> dict[str, str]:
    return faults(found(door, settings))


def test_a_whole_subscription_is_good():
    """Every part has its line, and nothing was bought or changed."""
    door = ArmDoor()
    before = set(door.vms)
    lines = found(door)
    assert all(line.ok for line in lines.values()), lines
    assert {name for name in lines if "quota" not in name} == {
        "sign-in",
        "clock",
        "image",
        "permissions",
        "eastus subnet",
        "eastus storage endpoint",
        "eastus way out",
        "eastus security group",
        "eastus types",
    }
    assert "eastus quota all spot" in lines
    assert set(door.vms) == before
    assert not {action.rpartition("/")[2] for action in door.called} & {"write", "delete", "action"}


def rule(access: str, source: str, priority: int, port: str = "*") -> dict:
    return {
        "priority": priority,
        "direction": "Inbound",
        "access": access,
        "sourceAddressPrefix": source,
        "destinationPortRange": port,
    }


BAD_DAYS = {
    "an image version that is gone": (
        lambda d: d.images.clear(),
        "image",
        "GalleryImageNotFound.*azure.image",
    ),
    "an image that was not replicated": (
        lambda d: d.images.update({"1.0.0": ["westus"]}),
        "image",
        "not in eastus; replicate",
    ),
    "a group that the world may enter": (
        lambda d: d.rules.append(rule("Allow", "Internet", 50, "22")),
        "eastus security group",
        "admits everybody to port 22.*remove that rule",
    ),
    "a group that keeps its own machines out": (
        lambda d: d.rules.append(rule("Deny", "*", 50)),
        "eastus security group",
        "none could join",
    ),
    "no group at all": (
        lambda d: d.subnet.pop("networkSecurityGroup"),
        "eastus security group",
        "has none",
    ),
    "a subnet that is full": (
        lambda d: d.subnet.update({"addressPrefix": "10.40.0.0/28"}),
        "eastus subnet",
        "11 free addresses.*larger subnet",
    ),
    "no way to storage": (
        lambda d: d.subnet.pop("serviceEndpoints"),
        "eastus storage endpoint",
        "Microsoft.Storage",
    ),
    "a private subnet, as Azure's tools make it now": (
        lambda d: d.subnet.update({"defaultOutboundAccess": False}),
        "eastus way out",
        "could not end its own bill.*NAT gateway",
    ),
    "a spot quota of zero": (
        lambda d: setattr(d, "dials", NO_SPOT),
        "eastus quota all spot",
        "0 of 0 vCPUs.*Quotas",
    ),
    "a spot quota below the smallest machine": (
        lambda d: setattr(d, "dials", Dials(quotas={"lowPriorityCores": 1})),
        "eastus quota all spot",
        "0 of 1 vCPUs are used, and the smallest machine has .*Quotas",
    ),
    "a group that closes the ports of its own machines": (
        lambda d: d.rules.append(rule("Deny", "*", 50, "1000-65535")),
        "eastus security group",
        "none could join",
    ),
}


@pytest.mark.parametrize("day", BAD_DAYS)
def test_what_is_wrong_is_one_line_with_a_remedy(day):
    """Nothing else is complained of."""
    door = ArmDoor()
    change, name, said = BAD_DAYS[day]
    change(door)
    lines = wrong(door)
    assert list(lines) == [name]
    assert re.search(said, lines[name]), lines


@pytest.mark.parametrize(
    "denied",
    [
        rule("Deny", "Internet", 50),
        rule("Deny", "*", 50, "22"),
        rule("Deny", "*", 50, "1-1023"),
        {**rule("Deny", "*", 50), "protocol": "Icmp"},
    ],
)
def test_a_rule_that_keeps_others_out_is_good(denied):
    """The tag Internet is all but the network, and nothing of ours listens on SSH's port."""
    door = ArmDoor()
    door.rules.append(denied)
    assert wrong(door) == {}


@pytest.mark.parametrize(
    ("settings", "name", "said"),
    [
        (
            replace(EAST, types=("Standard_NC*", "Standard_Z9")),
            "eastus types",
            "Standard_Z9: eastus",
        ),
        (replace(EAST, resource_group="elsewhere"), "sign-in", "ResourceGroupNotFound"),
        (replace(EAST, subscription="1-2-3"), "sign-in", "SubscriptionNotFound"),
        (replace(EAST, image="/x/versions/latest"), "image", "pin one version"),
        (replace(EAST, subnets={"eastus": "machines"}), "eastus subnet", "names no subnet"),
        (SETTINGS, "northcentralus subnet", "it is in eastus"),
    ],
)
def test_a_setting_that_names_what_is_not_there_is_named(settings, name, said):
    """A size, a group, a subscription, an image, a subnet, a region."""
    lines = wrong(ArmDoor(), settings)
    assert list(lines) == [name]
    assert said in lines[name]


def test_a_newer_image_is_named_and_nothing_is_wrong():
    """Versions are compared as numbers: 1.0.10 is newer than 1.0.9."""
    door = ArmDoor()
    door.images |= {"1.0.9": ["eastus"], "1.0.10": ["eastus"]}
    assert "1.0.10 is newer" in found(door)["image"].found


@pytest.mark.parametrize("action", needed())
def test_each_permission_that_the_role_lacks_is_named(action):
    """Azure lists what the manager may do, so nothing has to be tried."""
    door = ArmDoor()
    door.restrict(x for x in needed() if x != action)
    lines = wrong(door)
    assert any(action in line for line in lines.values()), lines


def test_a_sign_in_that_is_none_is_one_line():
    """A token that expired, and a clock that is two minutes off."""
    door = ArmDoor()
    door._tokens.clear()

    class Old:
        def get_token(self, *_: str, **__: object):
            from azure.core.credentials import AccessToken

            return AccessToken("old", 9_999_999_999)

    (line,) = (line for line in examined(door, SETTINGS, credential=Old()))
    assert (line.name, line.ok) == ("azure sign-in", False)
    assert "sign in again" in line.found
    slow = ArmDoor()
    slow.clock_off_s = 120.0
    assert re.match(r"-1[12]\d s from Azure's", wrong(slow)["clock"])  # a header has whole seconds


@pytest.mark.parametrize("way", ["natGateway", "routeTable"])
def test_a_private_subnet_with_a_way_of_its_own_is_good(way):
    """A gateway, or a route through a firewall, leads to Azure's management endpoint as well."""
    door = ArmDoor()
    door.subnet |= {"defaultOutboundAccess": False, way: {"id": "/x"}}
    assert wrong(door) == {}
