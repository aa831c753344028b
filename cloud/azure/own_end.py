"""A machine of Azure deletes itself, because powering off does not end its bill there.

The machine asks its metadata service for its own id and for a token of its managed identity, and
sends one DELETE. Disk and interface go with it by their delete option. This runs on the machine,
where Azure's SDK is not installed, so it needs the standard library only.
"""

import http.client
import json
import os
import sys
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

METADATA = "http://169.254.169.254"
ARM = "https://management.azure.com"
VERSION = "2024-07-01"
IDENTITY_VARIABLE = "AZURE_MSI_RESOURCE_ID"
TIMEOUT_S = 30.0
ANSWER_BYTES_MAX = 1 << 20


class NotDeleted(Exception):  # noqa: N818 - it names what happened
    """The machine goes on, and so does its bill; try again."""


def delete_this_machine(
    metadata: str = METADATA, arm: str = ARM, identity: str = "", timeout_s: float = TIMEOUT_S
) -> str:
    """Ask Azure to delete the machine that this runs on; return its id.

    `identity` is the id of the one that may do so: without it, Azure takes the machine's only one.

    Raises `NotDeleted` with the reason. It can be called again at any time, because a deletion
    that is under way is accepted once more.
    """
    machine = _metadata(metadata, "/metadata/instance/compute?api-version=2021-02-01", timeout_s)
    query = {"api-version": "2018-02-01", "resource": f"{ARM}/"}
    query |= {"msi_res_id": identity} if identity else {}
    token = _metadata(metadata, f"/metadata/identity/oauth2/token?{urlencode(query)}", timeout_s)
    try:
        path, key = quote(str(machine["resourceId"])), str(token["access_token"])
    except KeyError as missing:
        raise NotDeleted(f"the metadata service does not say {missing}") from None
    bearer = {"Authorization": f"Bearer {key}"}
    status, said = _call("DELETE", arm, f"{path}?api-version={VERSION}", bearer, timeout_s)
    if status not in (200, 202, 204):
        raise NotDeleted(f"Azure answers HTTP {status}: {said[:300].decode(errors='replace')}")
    return str(machine["resourceId"])


def _metadata(base: str, path: str, timeout_s: float) -> dict[str, Any]:
    status, said = _call("GET", base, path, {"Metadata": "true"}, timeout_s)
    if status != 200:
        raise NotDeleted(
            f"the metadata service answers HTTP {status} for {path.split('?', maxsplit=1)[0]}"
        )
    try:
        return dict(json.loads(said))
    except (ValueError, TypeError):
        raise NotDeleted("the metadata service answers something that is not JSON") from None


def _call(
    method: str, base: str, path: str, headers: dict[str, str], timeout_s: float
) -> tuple[int, bytes]:
    parts = urlsplit(base)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.netloc, timeout=timeout_s)
    try:
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        return response.status, response.read(ANSWER_BYTES_MAX)
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise NotDeleted(f"{method} {path.split('?', maxsplit=1)[0]}: {error}") from None
    finally:
        connection.close()


def main() -> int:
    """Try once; the caller tries again."""
    try:
        delete_this_machine(
            os.environ.get("SPOT_METADATA_URL") or METADATA,
            os.environ.get("SPOT_ARM_URL") or ARM,
            os.environ.get(IDENTITY_VARIABLE, ""),
        )
    except NotDeleted as error:
        print(f"own_end: {error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
