"""The role and the template for Azure: nothing is missing, and nothing is allowed in vain."""

import json
from pathlib import Path

from azure_account import EAST, OURS, PLACE, examined, play, request, swept
from cloudfake.arm import ArmDoor, Dials

import cloud.azure

ROOM = Path(cloud.azure.__file__).parent
ROLE = json.loads((ROOM / "role.json").read_text())
TEMPLATE = json.loads((ROOM / "template.json").read_text())


def test_every_action_of_the_role_is_used_and_none_is_missing():
    """All verbs work with the role alone, also on failed creations, and need all of it."""
    door = ArmDoor(dials=Dials(failed=0.5, stranded=1.0, nic_lag_s=0.0), seed=3)
    door.restrict(ROLE["Actions"])

    async def scene(provider):
        await provider.places()
        await provider.sold(PLACE)
        await provider.quotes(PLACE)
        await provider.scores(PLACE)
        for nth in range(4):
            await provider.launch(request(f"t-{nth}"))
        door.pass_s(240)
        machines = (await provider.list(PLACE)).machines
        assert await provider.rehearse([machines[0].ref]) == 30.0
        await swept(door, provider)

    play(door, scene)
    assert all(line.ok for line in examined(door, EAST))
    assert door.books.alive(OURS) == []
    assert set(door.called) == set(ROLE["Actions"])


def test_the_template_opens_nothing_and_gives_machines_one_permission():
    """Only addresses of the network get in, and a machine may delete machines and nothing else."""
    by_type = {}
    for resource in TEMPLATE["resources"]:
        by_type.setdefault(resource["type"].split("/")[-1], []).append(resource)
    (group,) = by_type["networkSecurityGroups"]
    rules = sorted(
        (rule["properties"] for rule in group["properties"]["securityRules"]),
        key=lambda rule: rule["priority"],
    )
    assert [(rule["access"], rule["sourceAddressPrefix"]) for rule in rules] == [
        ("Allow", "VirtualNetwork"),
        ("Deny", "*"),
    ]
    (role,) = by_type["roleDefinitions"]
    assert role["properties"]["permissions"] == [
        {"actions": ["Microsoft.Compute/virtualMachines/delete"], "notActions": []}
    ]
    assert role["properties"]["assignableScopes"] == ["[resourceGroup().id]"]
    assert set(by_type) == {
        "networkSecurityGroups",
        "virtualNetworks",
        "userAssignedIdentities",
        "roleDefinitions",
        "roleAssignments",
    }


def test_what_a_resource_of_the_template_needs_is_made_before_it():
    """Each resource that a different one names is in its `dependsOn`, and is in the template."""
    made = {
        f"resourceId('{one['type']}', {str(one['name']).strip('[]')})"
        for one in TEMPLATE["resources"]
    }
    for resource in TEMPLATE["resources"]:
        text = json.dumps(resource["properties"]) if "properties" in resource else ""
        named = {one for one in made if one in text}
        assert {f"[{one}]" for one in named} == set(resource.get("dependsOn", ()))
    for output in TEMPLATE["outputs"].values():
        kinds = {one["type"] for one in TEMPLATE["resources"]}
        assert output["value"].split("'")[1].removesuffix("/subnets") in kinds


def test_the_templates_subnet_has_a_way_to_azures_management_endpoint():
    """Newer versions of Azure's API make a subnet private that does not say otherwise."""
    (network,) = (x for x in TEMPLATE["resources"] if x["type"].endswith("/virtualNetworks"))
    for subnet in network["properties"]["subnets"]:
        assert subnet["properties"]["defaultOutboundAccess"] is True
