"""The page as a process, apart from the house, so that a crowd at its door troubles nothing else.

    python -m orchestrator.dashboard --house STATE_DIR --socket FD   (run by the house)

The house has bound the socket: the port stays its own while this process is started again.
"""

import argparse
import asyncio
import signal
import socket
import sys
from pathlib import Path

from cloud.open_files import raise_limit
from orchestrator.client import Client
from orchestrator.dashboard.app import create_app, serve
from orchestrator.dashboard.keys import Keys
from orchestrator.history.reader import History
from orchestrator.paths import Places


async def run(state_dir: Path, listening: socket.socket) -> None:
    """Serve the page until this process is asked to end."""
    places = Places(state_dir)
    keys = Keys(places.secret("dashboard"))
    over = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, over.set)
    await serve(
        create_app(lambda: Client.connect(state_dir), keys, History.open(places)), listening, over
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m orchestrator.dashboard", description=__doc__)
    parser.add_argument("--house", type=Path, required=True, help="the state directory")
    parser.add_argument("--socket", type=int, required=True, help="a socket that is bound")
    options = parser.parse_args()
    raise_limit()
    asyncio.run(run(options.house, socket.socket(fileno=options.socket)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
