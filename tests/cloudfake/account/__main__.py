"""`python -m cloudfake.account --cloud aws|azure --dir DIR`: a fake account with real machines.

The door answers the cloud's own SDK; what it sells are process groups of this machine, which run
their user data. When all listens, DIR/account.json has the addresses: of the door, and of what only
a test or a demo may ask.

    GET  /books                  what was bought, what it cost, what is left
    POST /drill                  {"nodes": 1, "warning_s": 0}: take machines as the market would
    GET  /metadata/identity/...  the identity of the manager's own machine, on Azure
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from cloudfake import arm, arm_wire, ec2
from cloudfake.account.cores import ArmCore, Core, Ec2Core
from cloudfake.account.service import AccountCloud
from cloudfake.ec2_account import Account
from cloudfake.ec2_account import Dials as Ec2Dials
from cloudfake.papers import pem
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from cloud import azure as azure_cloud
from cloud import private
from cloud.clock import CLOCK
from cloud.http_server import Listener
from cloud.local.api import Drill
from cloud.open_files import raise_limit

NETWORKS = 120
TESTS = Path(__file__).parents[2]
IMAGE = ("PYTHONPATH", "OMP_NUM_THREADS", "SPOT_TEST_RUN")
"""What the image of machines has of this process: where the package is, and the mark of a test."""


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m cloudfake.account", description=__doc__)
    parser.add_argument("--cloud", choices=("aws", "azure"), required=True)
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--startup-s", type=float, default=1.0, help="from launch to first boot")
    parser.add_argument("--room", type=int, default=8, help="machines in each pool")
    parser.add_argument("--owner", default="default", help="the deployment that /books is about")
    return parser


class Desk:
    """What only a test or a demo may ask."""

    def __init__(self, core: Core, cloud: AccountCloud, owner: str) -> None:
        self._core, self._cloud, self._owner = core, cloud, owner
        self.app = Starlette(
            routes=[
                Route("/books", self._books),
                Route("/drill", self._drill, methods=["POST"]),
                Route("/metadata/identity/oauth2/token", self._token),
            ]
        )

    async def _books(self, _: Request) -> JSONResponse:
        books, now_s = self._core.books, CLOCK.now_s()
        bill = books.bill(now_s, self._owner)
        kinds = {line.id: line.kind for line in books.lines.values()}
        by_kind: dict[str, float] = {}
        for name, usd in bill.items():
            by_kind[kinds[name]] = by_kind.get(kinds[name], 0.0) + usd
        machines = [
            x for x in books.lines.values() if (x.owner, x.kind) == (self._owner, "machine")
        ]
        return JSONResponse(
            {
                "usd": sum(bill.values()),
                "by_kind": by_kind,
                "machines": len(machines),
                "left": [f"{x.kind} {x.id}" for x in books.alive(self._owner)],
                "bought_twice": books.bought_twice(),
                "touched": books.touched(self._owner),
                "lines": msgspec.to_builtins(machines),
            }
        )

    async def _drill(self, request: Request) -> JSONResponse:
        wanted = msgspec.json.decode(await request.body(), type=Drill)
        spot = self._core.spot(wanted.deployment)
        taken = spot if wanted.nodes == "all" else spot[: wanted.nodes]
        self._core.revoke(taken, CLOCK.now_s(), wanted.warning_s)
        self._cloud.nudge()
        return JSONResponse(taken)

    async def _token(self, request: Request) -> JSONResponse:
        if request.headers.get("metadata") != "true" or not isinstance(self._core, ArmCore):
            return JSONResponse({"error": "invalid_request"}, 400)
        return JSONResponse(self._core.manager_token())


@contextlib.contextmanager
def door_of(options: argparse.Namespace) -> Iterator[tuple[Core, str]]:
    """Open the door; yield the account as a core, and the door's address."""
    network, startup_s = f"127.{1 + os.getpid() % NETWORKS}", options.startup_s
    if options.cloud == "aws":
        account = Account(Ec2Dials(startup_s=startup_s, ending_s=startup_s), room=options.room)
        door = ec2.Ec2Door(account, CLOCK)
        key = {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}
        key_id, secret = (os.environ.get(name, "") for name in key)
        door.keys = {key_id: ec2.Key(secret=secret, who="manager")}
        with ec2.served(door) as url:
            yield Ec2Core(door, network), url
        return
    span = (0.7 * startup_s, 1.3 * startup_s)
    dials = arm.Dials(create_s=span, delete_s=span, nic_lag_s=1.0, capacity=options.room)
    azure = arm.ArmDoor(CLOCK, dials, broken="others have machines too")
    azure.machine_allowed = set(_role_of_machines()).__contains__
    with arm_wire.listening(azure) as url:
        yield ArmCore(azure, network), url


def _role_of_machines() -> list[str]:
    """Return the actions that our template allows a machine."""
    template = json.loads((Path(azure_cloud.__file__).parent / "template.json").read_bytes())
    kind = "roleDefinitions"
    role = next(x for x in template["resources"] if x["type"].endswith(kind))
    return list(role["properties"]["permissions"][0]["actions"])


async def serve(options: argparse.Namespace, core: Core, url: str) -> None:
    image = {name: os.environ[name] for name in IMAGE if name in os.environ}
    # Not the folder of the tests, which we have: its `agent` would hide the project's on machines.
    found = [x for x in image.pop("PYTHONPATH", "").split(os.pathsep) if x and Path(x) != TESTS]
    image |= {"PYTHONPATH": os.pathsep.join(found)} if found else {}
    image["SPOT_ARM_URL"] = url  # a real one is known to every machine of Azure
    cloud = AccountCloud(core, CLOCK, options.dir, image)
    desk = Listener(Desk(core, cloud, options.owner).app)
    await desk.listen("127.0.0.1")
    loop, over = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, over.set)
    running = asyncio.create_task(cloud.run())
    running.add_done_callback(lambda _: over.set())
    private.write(options.dir / "certificates.pem", pem(*core.certificates))
    told: dict[str, Any] = {"url": url, "desk": desk.url, "pid": os.getpid()}
    private.write(options.dir / "account.json", msgspec.json.encode(told))
    await over.wait()
    desk.close()
    await cloud.stop()
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running


def main() -> int:
    options = arguments().parse_args()
    raise_limit()
    options.dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    with door_of(options) as (core, url):
        asyncio.run(serve(options, core, url))
    return 0


if __name__ == "__main__":
    sys.exit(main())
