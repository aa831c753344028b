"""The calls to Azure that the provider makes, each one request or one list of pages.

Every function gets the SDK's client and returns plain values. They block, so `Connection.run` calls
them in a thread and turns what they raise into our errors.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any
from urllib.parse import urlsplit

from cloud import errors
from cloud.azure import refusals
from cloud.azure.connection import LAUNCH_S, PAGES_MAX, must_be, said_in
from cloud.azure.machines import View, is_ours, part_pattern, read_view
from cloud.clock import utc_s

VMS = "Microsoft.Compute/virtualMachines"
DISKS = "Microsoft.Compute/disks"
NICS = "Microsoft.Network/networkInterfaces"
VERSIONS = {VMS: "2026-04-01", DISKS: "2026-03-02", NICS: "2024-05-01"}
SCORES_VERSION = "2025-06-05"
SIZES_ASKED = 5  # sizes in one question for scores

Answer = dict[str, Any]


def put_vm(client: Any, group: str, name: str, body: Mapping[str, Any]) -> Answer:
    """Create a machine, and never change one; how the creation goes on shows in the list."""
    from azure.core import MatchConditions

    accepted = client.virtual_machines.begin_create_or_update(
        group,
        name,
        body,
        polling=False,
        match_condition=MatchConditions.IfMissing,
        read_timeout=LAUNCH_S,
    )
    return _plain(accepted.result())


def get_vm(client: Any, group: str, name: str) -> Answer | None:
    """Return a machine, or `None` if there is none of this name."""
    from azure.core.exceptions import ResourceNotFoundError

    try:
        return _plain(client.virtual_machines.get(group, name))
    except ResourceNotFoundError as error:
        if error.response is not None and '"ResourceNotFound"' in error.response.text():
            return None
        raise  # the whole group is missing, or the subscription


def view_vm(client: Any, group: str, name: str) -> View | None:
    """Return how a machine runs, or `None` if it was deleted since it was listed."""
    from azure.core.exceptions import ResourceNotFoundError

    try:
        return read_view(_plain(client.virtual_machines.instance_view(group, name)))
    except ResourceNotFoundError:
        return None


def simulate_eviction(client: Any, group: str, name: str) -> None:
    client.virtual_machines.simulate_eviction(group, name)


def list_vms(client: Any, group: str, deployment: str) -> list[Answer]:
    """Return the machines of a deployment."""
    return [one for one in _pages(client, group, VMS) if is_ours(one, deployment)]


def list_disks(client: Any, group: str, deployment: str) -> list[Answer]:
    """Return the disks whose names have the mark of a deployment."""
    return _marked(_pages(client, group, DISKS), deployment)


def list_nics(client: Any, group: str, deployment: str) -> list[Answer]:
    """Return the network interfaces whose names have the mark of a deployment."""
    return _marked(_pages(client, group, NICS), deployment)


def list_sizes(client: Any, region: str) -> list[Answer]:
    return [_plain(x) for x in client.resource_skus.list(filter=f"location eq '{region}'")]


def list_quotas(client: Any, region: str) -> list[Answer]:
    return [_plain(one) for one in client.usage.list(region)]


def spot_scores(client: Any, region: str, sizes: Sequence[str], *, zonal: bool) -> list[Answer]:
    """Return how likely one more spot machine of each size is to be had in each zone.

    The SDK has this in a package apart, so it is asked for by its address.
    """
    config = client._config
    url = (
        f"{config.base_url}/subscriptions/{config.subscription_id}/providers/Microsoft.Compute"
        f"/locations/{region}/placementScores/spot/generate?api-version={SCORES_VERSION}"
    )
    found: list[Answer] = []
    for first in range(0, len(sizes), SIZES_ASKED):
        body = {
            "availabilityZones": zonal,
            "desiredCount": 1,
            "desiredLocations": [region],
            "desiredSizes": [{"sku": size} for size in sizes[first : first + SIZES_ASKED]],
        }
        found += (_send(client, "POST", url, body) or {})["placementScores"]
    return found


def look(client: Any, path: str, version: str) -> tuple[Answer, Mapping[str, str]]:
    """Return anything by its id, with the headers of the answer."""
    from azure.core.rest import HttpRequest

    url = f"{client._config.base_url}{path}?api-version={version}"
    response = client.send_request(HttpRequest("GET", url))
    if response.status_code >= 300:
        said = said_in(response.status_code, response.headers, response.text())
        raise refusals.error(said, doing=f"GET {path}")
    return dict(json.loads(response.text())), response.headers


def delete_vm(client: Any, group: str, name: str) -> str | None:
    """Ask for a deletion; return where its end can be asked for, `None` if there is no machine."""
    return _asked(client.virtual_machines, group, name)


def ended_at_s(client: Any, operation: str) -> float | None:
    """Return when an operation has succeeded; `None` if it has not, or Azure does not say when."""
    must_be(operation, client._config.base_url)
    told = _send(client, "GET", operation) or {}
    end = told.get("endTime") if told.get("status") == "Succeeded" else None
    return utc_s(datetime.fromisoformat(str(end))) if end else None


def delete_disk(client: Any, group: str, name: str) -> bool:
    """Ask for a deletion; return whether there is nothing to delete."""
    return _asked(client.disks, group, name) is None


def delete_nic(client: Any, group: str, name: str) -> bool:
    return _send(client, "DELETE", _url(client, group, NICS, f"/{name}")) is None


def _pages(client: Any, group: str, kind: str) -> list[Answer]:
    """Return a whole list, as Azure wrote it.

    The SDK makes objects of all that others have in the group: 10,000 machines take half a minute.
    It also has no network interfaces, but for a package of 31 MB.
    """
    url = _url(client, group, kind)
    found: list[Answer] = []
    for _ in range(PAGES_MAX):
        page = _send(client, "GET", url) or {}
        found += page["value"]
        if not page.get("nextLink"):
            return found
        must_be(page["nextLink"], url)
        url = page["nextLink"]
    raise errors.Unknown(f"Azure, list of {kind}: more than {PAGES_MAX} pages")


def _marked(found: list[Answer], deployment: str) -> list[Answer]:
    ours = part_pattern(deployment)
    return [one for one in found if ours.fullmatch(str(one.get("name")))]


def _url(client: Any, group: str, kind: str, rest: str = "") -> str:
    config = client._config
    return (
        f"{config.base_url}/subscriptions/{config.subscription_id}/resourceGroups/{group}"
        f"/providers/{kind}{rest}?api-version={VERSIONS[kind]}"
    )


def _send(client: Any, method: str, url: str, body: Answer | None = None) -> Answer | None:
    """Send a request that the SDK has no method for; return `None` if there is nothing (204)."""
    from azure.core.rest import HttpRequest

    response = client.send_request(HttpRequest(method, url, json=body))
    if response.status_code >= 300:
        said = said_in(response.status_code, response.headers, response.text())
        raise refusals.error(said, doing=f"{method} {urlsplit(url).path}")
    if response.status_code == 204:
        return None
    return dict(json.loads(response.text())) if response.content else {}


def _asked(owner: Any, group: str, name: str) -> str | None:
    accepted = owner.begin_delete(group, name, polling=False, cls=_operation).result()
    return None if accepted is None else str(accepted)


def _operation(response: Any, *_: Any) -> str | None:
    told = response.http_response
    return None if told.status_code == 204 else told.headers.get("Azure-AsyncOperation", "")


def _plain(answer: Any) -> Answer:
    return dict(answer.as_dict())
