"""`python -m cloud.local --dir DIR`: the local cloud as a separate process.

It knows nothing of its customers. When it listens it writes DIR/cloud.json (address and pid); the
bearer token is in DIR/token. It runs until SIGTERM or SIGINT and then ends its machines.
"""

import argparse
import asyncio
import contextlib
import fcntl
import os
import signal
import sys
from pathlib import Path

import msgspec

from cloud import private
from cloud.clock import CLOCK, SystemClock
from cloud.errors import CloudError
from cloud.http_server import Listener
from cloud.local.api import Api
from cloud.local.books import Ledger, start_of_market
from cloud.local.identity import KEY
from cloud.local.service import LocalCloud
from cloud.market import LOCAL, Conduct, SpotMarket
from cloud.open_files import raise_limit
from cloud.replay import read_prices
from cloud.simulated import SimulatedCloud

BOOT_SCRIPT = Path(__file__).parent.parent / "boot.sh"
STARTUP_S = 1.0
NETWORKS = 120


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m cloud.local", description=__doc__)
    parser.add_argument("--dir", type=Path, required=True, help="where its files are")
    parser.add_argument("--seed", type=int, default=0, help="which market")
    parser.add_argument(
        "--tempo", type=float, default=1.0, help="speed of the market; 0 stands still"
    )
    parser.add_argument(
        "--prices",
        type=Path,
        help="price history as `aws ec2 describe-spot-price-history` prints it",
    )
    parser.add_argument(
        "--startup-s", type=float, default=STARTUP_S, help="median time to the first-boot script"
    )
    parser.add_argument(
        "--warning-s",
        type=float,
        help="how long before an eviction a machine is told (default: as EC2 and Azure do)",
    )
    parser.add_argument(
        "--refused-share",
        type=float,
        default=Conduct().refused_share,
        help="share of launches refused without need",
    )
    parser.add_argument(
        "--pool-machines", type=int, default=LOCAL.pool_machines, help="spot machines in each pool"
    )
    parser.add_argument("--quota-slots", type=int, help="most slots the account may hold")
    parser.add_argument(
        "--boot-script", type=Path, default=BOOT_SCRIPT, help="what a machine runs first"
    )
    parser.add_argument(
        "--boot-env", type=Path, help="NAME=VALUE lines for the first-boot script, mode 0600"
    )
    return parser


def market_of(options: argparse.Namespace, start_s: float) -> SpotMarket:
    conduct = Conduct(startup_s=options.startup_s, refused_share=options.refused_share)
    if options.warning_s is not None:
        conduct = msgspec.structs.replace(
            conduct, ec2_warning_s=options.warning_s, azure_warning_s=options.warning_s
        )
    catalogue = msgspec.structs.replace(
        LOCAL, pool_machines=options.pool_machines, quota_slots=options.quota_slots
    )
    replay = read_prices(options.prices, catalogue) if options.prices else None
    return SpotMarket(
        catalogue,
        seed=options.seed,
        start_s=start_s,
        tempo=options.tempo,
        conduct=conduct,
        replay=replay,
    )


def service_of(options: argparse.Namespace, clock: SystemClock) -> LocalCloud:
    """Return the cloud of this directory, with the books of an earlier one if it has any."""
    market = f"seed {options.seed}, tempo {options.tempo:g}, prices {options.prices}"
    ledger = Ledger(options.dir / "ledger.json", market)
    page = ledger.read()
    start_s = start_of_market(page, market, options.tempo, clock.now_s())
    network = f"127.{1 + os.getpid() % NETWORKS}"
    core = SimulatedCloud(market_of(options, start_s), deployment="", network=network)
    if page is not None:
        core.restore(page.books)
    return LocalCloud(core, clock, ledger, options.boot_script.resolve(), options.boot_env)


async def serve(options: argparse.Namespace) -> None:
    clock = CLOCK
    service = service_of(options, clock)
    listener = Listener(Api(service, private.made_secret(options.dir / "token")).app)
    await _listen(listener, options.dir / "port")
    loop, over = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, over.set)
    running = asyncio.create_task(service.run())
    running.add_done_callback(lambda _: over.set())
    ready = options.dir / "cloud.json"
    private.write(ready, msgspec.json.encode({"url": listener.url, "pid": os.getpid()}))
    await over.wait()
    ready.unlink(missing_ok=True)
    listener.close()
    await service.stop()
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running


async def _listen(listener: Listener, port: Path) -> None:
    """Listen at the address of the earlier cloud, since its customers know it; else at any."""
    known = int(port.read_text()) if port.exists() else 0
    try:
        await listener.listen("127.0.0.1", known)
    except OSError:
        await listener.listen("127.0.0.1")
    private.write(port, listener.url.rpartition(":")[2].encode())


def main() -> int:
    options = arguments().parse_args()
    raise_limit()
    options.dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (options.dir / "lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for line in private.mend(options.dir, [options.dir / "token", options.dir / KEY]):
                print(line, file=sys.stderr)  # noqa: T201
            if options.boot_env:
                private.environment(options.boot_env)
            asyncio.run(serve(options))
        except BlockingIOError:
            print(f"another local cloud uses {options.dir}", file=sys.stderr)  # noqa: T201
            return 1
        except (CloudError, OSError, ValueError) as error:
            print(f"the local cloud cannot start: {error}", file=sys.stderr)  # noqa: T201
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
