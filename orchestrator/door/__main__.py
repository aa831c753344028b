"""The door as a process, apart from the house, so that a crowd at it troubles nothing else.

    python -m orchestrator.door --house STATE_DIR --socket FD [--config FILE]   (run by the house)

The house has bound the socket: the port stays its own while this process is started again.
"""

import argparse
import asyncio
import os
import signal
import socket
import sys
from pathlib import Path

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from cloud.clock import CLOCK
from cloud.http_server import Crowd, Listener
from cloud.identity.proof import Verifier
from cloud.open_files import raise_limit
from orchestrator.config import Config, load
from orchestrator.door import certificate
from orchestrator.door.admission import Desk
from orchestrator.door.app import Door
from orchestrator.paths import Places

ANSWER_S_MAX = 2.0


def verifiers(config: Config, places: Places) -> dict[str, Verifier]:
    """Return how machines prove who they are, by cloud; of clouds that are not used, nothing."""
    found: dict[str, Verifier] = {}
    if config.local.enabled:
        from cloud.local.identity import LocalIdentity

        found["local"] = LocalIdentity.at(places.cloud_dir)
    if config.aws.enabled and config.aws.certificates:
        from cloud.aws.identity import AwsIdentity
        from cloud.identity.signed_message import read_certificates

        found["aws"] = AwsIdentity(read_certificates(Path(config.aws.certificates).read_bytes()))
    if config.azure.subscription and config.azure.certificates:
        from cloud.azure.identity import AzureIdentity
        from cloud.identity.signed_message import read_certificates

        authorities = read_certificates(Path(config.azure.certificates).read_bytes())
        found["azure"] = AzureIdentity(authorities, config.azure.subscription)
    return found


def store_at(url: str) -> "redis.asyncio.Redis":
    """Return a client that gives up soon, because the caller asks again by itself."""
    once = Retry(NoBackoff(), 1)
    return redis.asyncio.Redis.from_url(url, socket_timeout=ANSWER_S_MAX, retry=once)


async def run(config: Config, places: Places, listening: socket.socket) -> None:
    """Serve the door until this process is asked to end."""
    over, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, over.set)
    store = store_at(config.manager.redis_url or f"unix://{places.redis_socket}")
    desk = Desk(config.manager.deployment, verifiers(config, places))
    door = Door(store, desk, places.secret("boot"), CLOCK)
    listener = Listener(door.app, Crowd(), certificate.context(places.secret("door")))
    listener.listen_on(listening)
    following = asyncio.create_task(door.follow())
    following.add_done_callback(lambda _: over.set())
    await over.wait()
    following.cancel()
    listener.close()
    await store.aclose()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m orchestrator.door", description=__doc__)
    parser.add_argument("--house", type=Path, required=True, help="the state directory")
    parser.add_argument("--socket", type=int, required=True, help="a socket that is bound")
    parser.add_argument("--config", type=Path)
    options = parser.parse_args()
    raise_limit()
    config = load(options.config, os.environ)
    asyncio.run(run(config, Places(options.house), socket.socket(fileno=options.socket)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
