"""What a machine's metadata service signs about who it is, in the dialect of each cloud."""

import http.client
import json
import os
from collections.abc import Callable
from urllib.parse import urlencode, urlsplit

METADATA_URL = "http://169.254.169.254"
TIMEOUT_S = 5.0
ANSWER_BYTES_MAX = 65_536
EC2_TTL = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
AZURE_VERSION = "2020-09-01"

Proof = dict[str, str]


class NoIdentity(Exception):  # noqa: N818 - it names what happened
    """The metadata service does not say who this machine is; ask again."""


def proof_of(cloud: str, nonce: str) -> Proof:
    """Return what proves to the door which machine this is, signed for the nonce if it can be."""
    try:
        return PROOFS[cloud](nonce)
    except (OSError, ValueError, KeyError, http.client.HTTPException) as error:
        raise NoIdentity(f"the metadata service: {error or type(error).__name__}") from error


def _aws(_: str) -> Proof:
    token = {"X-aws-ec2-metadata-token": _ask("PUT", "/latest/api/token", EC2_TTL)}
    signed = "/latest/dynamic/instance-identity/"
    return {
        "signature": _ask("GET", f"{signed}rsa2048", token),
        "document": _ask("GET", f"{signed}document", token),
    }


def _azure(nonce: str) -> Proof:
    query = urlencode({"api-version": AZURE_VERSION, "nonce": nonce})
    said = _ask("GET", f"/metadata/attested/document?{query}", {"Metadata": "true"})
    return {"signature": str(json.loads(said)["signature"])}


def _local(nonce: str) -> Proof:
    return {"signature": _ask("GET", f"/identity?nonce={nonce}", {"Metadata": "true"})}


PROOFS: dict[str, Callable[[str], Proof]] = {"aws": _aws, "azure": _azure, "local": _local}


def _ask(method: str, path: str, headers: dict[str, str]) -> str:
    """Return one answer; it never comes through a proxy, as the service is this machine's own."""
    parts = urlsplit(os.environ.get("SPOT_METADATA_URL") or METADATA_URL)
    connection = http.client.HTTPConnection(parts.netloc, timeout=TIMEOUT_S)
    try:
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        said = response.read(ANSWER_BYTES_MAX)
    finally:
        connection.close()
    if response.status != 200:
        raise ValueError(f"HTTP {response.status} for {path.partition('?')[0]}")
    return said.decode()
