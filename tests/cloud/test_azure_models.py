"""What the SDK's models say of our requests and of the fake's answers: the SDK checks neither."""

import enum
import typing
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest
from azure.mgmt.compute import models
from azure.mgmt.compute.models import _models
from azure_account import D4, OURS, SETTINGS, T4, request
from cloudfake.arm import GROUP, SUBSCRIPTION, ArmDoor

from cloud.azure.machines import body_of

GROUPS = f"/subscriptions/{SUBSCRIPTION}/resourceGroups/{GROUP}/providers/Microsoft.Compute"
ACCOUNT = f"/subscriptions/{SUBSCRIPTION}/providers/Microsoft.Compute"
NAMES = vars(typing) | vars(_models) | {"_models": models, "_types": models}
SIMPLE: dict[Any, Any] = {float: (int, float), datetime: str}


def flaws(kind: Any, value: Any, at: str) -> Iterator[str]:
    """Yield what a type of the SDK has against a value as it goes over the wire."""
    if isinstance(kind, typing.ForwardRef):
        kind = kind.__forward_arg__
    kind = eval(kind, dict(NAMES)) if isinstance(kind, str) else kind
    parts, origin = typing.get_args(kind), typing.get_origin(kind)
    if value is None:
        return
    if origin is typing.Union:
        each = [list(flaws(x, value, at)) for x in parts if x not in (type(None), str)]
        yield from [] if [] in each or not each else each[0]
    elif origin is list and isinstance(value, list):
        for entry in value:
            yield from flaws(parts[0], entry, f"{at}[]")
    elif origin is dict and isinstance(value, dict):
        for entry in value.values():
            yield from flaws(parts[1], entry, f"{at}[]")
    elif hasattr(kind, "as_dict") and isinstance(value, dict):
        yield from _of_model(kind, value, at)
    elif isinstance(kind, enum.EnumMeta) or origin is typing.Literal:
        words = [getattr(word, "value", word) for word in parts or kind]
        if value not in words and kind is not models.VirtualMachineSizeTypes:  # it ends in 2020
            yield f"{at} is {value!r}, which is none of its words"
    elif kind is not Any and not isinstance(value, SIMPLE.get(kind, origin or kind)):
        yield f"{at} is {value!r}, and no {kind}"


def _of_model(kind: Any, value: dict[str, Any], at: str) -> Iterator[str]:
    kind()  # reads its fields
    hints: dict[str, Any] = {}
    for base in kind.__mro__:
        hints = getattr(base, "__annotations__", {}) | hints
    fields = {told._rest_name: hints[name] for name, told in kind._attr_to_rest_field.items()}
    for name, part in value.items():
        if name not in fields:
            yield f"{at} has no {name}"
        else:
            yield from flaws(fields[name], part, f"{at}.{name}")


@pytest.mark.parametrize(
    "wanted",
    [request("t-1", bid_usd_per_h=0.2), request("t-2", D4, market="on_demand")],
    ids=["spot", "on demand"],
)
def test_a_launch_is_a_machine_as_the_sdk_knows_it(wanted: Any):
    assert list(flaws(models.VirtualMachine, body_of(wanted, 0, SETTINGS, OURS), "PUT")) == []


def test_a_bid_has_the_five_decimals_that_azure_takes_and_is_not_below_its_price():
    for bid, told in ((0.1234512, 0.12346), (0.07, 0.07), (2.3, 2.3)):
        wanted = request("t-1", bid_usd_per_h=bid)
        profile = body_of(wanted, 0, SETTINGS, OURS)["properties"]["billingProfile"]
        assert profile == {"maxPrice": told}


def test_the_fake_answers_what_the_sdk_knows():
    """A member that only the fake has would be read from no answer of Azure's."""
    door = ArmDoor()
    bearer = {"authorization": f"Bearer {door.new_token()[0]}"}

    def told(path: str) -> Any:
        return door.call("GET", f"https://arm{path}?api-version=2026-04-01", bearer).body

    door.plant("t-1", {"a": "b"})
    found = {
        models.VirtualMachine: told(f"{GROUPS}/virtualMachines")["value"],
        models.VirtualMachineInstanceView: [told(f"{GROUPS}/virtualMachines/t-1/instanceView")],
        models.Disk: told(f"{GROUPS}/disks")["value"],
        models.ResourceSku: told(f"{ACCOUNT}/skus")["value"],
        models.Usage: told(f"{ACCOUNT}/locations/eastus/usages")["value"],
    }
    assert all(found.values())
    wrong = [flaw for kind, some in found.items() for x in some for flaw in flaws(kind, x, "GET")]
    assert wrong == []


def test_what_the_sdk_does_not_know_is_a_flaw():
    """A word, a member and a type, in a machine's depth."""
    body = body_of(request("t-1"), 0, SETTINGS, OURS)
    body["properties"] |= {"priority": "Cheap", "surprise": 1}
    body["properties"]["storageProfile"]["osDisk"]["diskSizeGB"] = "64"
    assert sorted(flaws(models.VirtualMachine, body, "PUT")) == [
        "PUT.properties has no surprise",
        "PUT.properties.priority is 'Cheap', which is none of its words",
        "PUT.properties.storageProfile.osDisk.diskSizeGB is '64', and no <class 'int'>",
    ]
    assert T4.type in str(body)
