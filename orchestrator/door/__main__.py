"""The door as a process, apart from the house, so that a crowd at it troubles nothing else.

    python -m orchestrator.door --house STATE_DIR --socket FD   (run by the house)

The house has bound the socket: the port stays its own while this process is started again. What it
read from the settings comes in the environment, because they are slow to read.
"""

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import sys
from pathlib import Path

import msgspec
import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from cloud.aws.identity import AwsIdentity
from cloud.azure.identity import AzureIdentity
from cloud.clock import CLOCK
from cloud.http_server import Crowd, Listener
from cloud.identity.proof import Verifier
from cloud.identity.signed_message import read_certificates
from cloud.local.identity import LocalIdentity
from cloud.open_files import raise_limit
from orchestrator.door import certificate
from orchestrator.door.admission import Desk
from orchestrator.door.app import Door
from orchestrator.door.order import VARIABLE, DoorOrder
from orchestrator.paths import Places

ANSWER_S_MAX = 2.0


def verifiers(order: DoorOrder, places: Places) -> dict[str, Verifier]:
    """Return how machines prove who they are, by cloud; of clouds that are not used, nothing.

    A cloud whose certificates cannot be read is left out; the manager buys nothing there, either.
    """
    found: dict[str, Verifier] = {}
    if order.local:
        found["local"] = LocalIdentity(places.cloud_dir)
    for cloud, path in (("aws", order.aws_certificates), ("azure", order.azure_certificates)):
        try:
            certificates = read_certificates(Path(path)) if path else []
        except ValueError as error:
            print(f"door: {cloud}.certificates: {error}", file=sys.stderr)  # noqa: T201
            continue
        if certificates and cloud == "aws":
            found[cloud] = AwsIdentity(certificates)
        elif certificates:
            found[cloud] = AzureIdentity(certificates, order.subscription)
    return found


def store_at(url: str) -> "redis.asyncio.Redis":
    """Return a client that gives up soon, because the caller asks again by itself."""
    once = Retry(NoBackoff(), 1)
    return redis.asyncio.Redis.from_url(url, socket_timeout=ANSWER_S_MAX, retry=once)


async def run(order: DoorOrder, places: Places, listening: socket.socket) -> None:
    """Serve the door until this process is asked to end."""
    over, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, over.set)
    store = store_at(order.redis_url)
    desk = Desk(order.deployment, verifiers(order, places))
    door = Door(store, desk, places.secret("boot"), CLOCK)
    listener = Listener(door.app, Crowd(), certificate.context(places.secret("door")))
    listener.listen_on(listening)
    following = asyncio.create_task(door.follow())
    following.add_done_callback(lambda _: over.set())
    await over.wait()
    following.cancel()
    listener.close()
    await store.aclose()
    with contextlib.suppress(asyncio.CancelledError):
        await following  # what ended it is the last thing in the log


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m orchestrator.door", description=__doc__)
    parser.add_argument("--house", type=Path, required=True, help="the state directory")
    parser.add_argument("--socket", type=int, required=True, help="a socket that is bound")
    options = parser.parse_args()
    raise_limit()
    order = msgspec.json.decode(os.environ[VARIABLE], type=DoorOrder)
    asyncio.run(run(order, Places(options.house), socket.socket(fileno=options.socket)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
