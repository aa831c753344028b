"""What a machine is called and where it is: `identity.py machine` and `identity.py address HOST:PORT`.

The name comes from the metadata service of EC2 or of Azure; the address is the one from which the machine
reaches HOST. Asks for at most a minute, since metadata may come up later than the machine. Uses nothing
but the standard library, so that it says what is wrong even if nothing else works.
"""

import json
import os
import socket
import sys
import time
import urllib.error
import urllib.request

METADATA_URL = "http://169.254.169.254"
PATIENCE_S = 60.0
TIMEOUT_S = 2.0
TTL = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
AZURE_PATH = "/metadata/instance/compute?api-version=2019-08-01"

_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def fetch(method: str, path: str, headers: dict[str, str]) -> str:
    url = (os.environ.get("SPOT_METADATA_URL") or METADATA_URL) + path
    request = urllib.request.Request(url, method=method, headers=headers)  # noqa: S310
    with _direct.open(request, timeout=TIMEOUT_S) as answer:
        return str(answer.read(65_536).decode())


def ec2() -> str:
    token = fetch("PUT", "/latest/api/token", TTL)
    return fetch("GET", "/latest/meta-data/instance-id", {"X-aws-ec2-metadata-token": token})


def azure() -> str:
    return str(json.loads(fetch("GET", AZURE_PATH, {"Metadata": "true"}))["name"])


def machine() -> str:
    """The first name that either cloud gives."""
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        for ask in (ec2, azure):
            try:
                return ask()
            except (OSError, ValueError, KeyError) as error:
                reason = error
        if time.monotonic() > deadline_s:
            raise SystemExit(f"identity: no metadata service names this machine: {reason}")
        time.sleep(1.0)


def address(head: str) -> str:
    """No packet is sent: a datagram socket only has to know its way."""
    host, _, port = head.rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        try:
            way.connect((host, int(port)))
        except (OSError, ValueError) as error:
            raise SystemExit(f"identity: {head!r} cannot be reached: {error}") from error
        return str(way.getsockname()[0])


def main() -> None:
    match sys.argv[1:]:
        case ["machine"]:
            print(machine())  # noqa: T201
        case ["address", head]:
            print(address(head))  # noqa: T201
        case _:
            raise SystemExit("use: identity.py machine | identity.py address HOST:PORT")


if __name__ == "__main__":
    main()
