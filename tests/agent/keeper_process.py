"""Keepers in processes of their own, as Ray would start them: they can be killed, and started again.

One process has imported what a keeper needs, and forks: a keeper starts in milliseconds.

python keeper_process.py < a socket    (takes a `Start` with two pipes for each keeper, and answers with its pid)
"""

import gc
import os
import shutil
import socket
import sys
import tempfile
import threading
import traceback
from pathlib import Path

import explain
import injection
import msgspec

import agent.keeper.keeper  # noqa: F401 - the actor imports it when it starts
from agent.keeper.storage import memory_log
from agent.machine.actor import KeeperActor

START_BYTES_MAX = 1 << 16
SHARED_BYTES_MIN = 1 << 29  # for the keepers of all tests that run at once

# A container may have less (Docker's 64 MiB); files on the disk outlive a keeper as well.
if shutil.disk_usage(memory_log.SHARED).total < SHARED_BYTES_MIN:
    memory_log.SHARED = Path(tempfile.gettempdir())


class Start(msgspec.Struct):
    """A keeper; it takes orders from the first pipe, and writes its address into the second after each."""

    redis_url: str
    checkpoints: str
    host: str
    secret: str  # a file
    storage: str
    lasting: bool
    faults: str = ""  # an encoded plan, or nothing


def main() -> None:
    door = socket.socket(fileno=0)
    gc.collect()
    gc.freeze()
    while True:
        asked, pipes, *_ = socket.recv_fds(door, START_BYTES_MAX, 2)
        if not asked:
            os._exit(0)
        _bury()
        pid = os.fork()
        if pid == 0:
            door.detach()
            _end_with(msgspec.json.decode(asked, type=Start), *pipes)
        for pipe in pipes:
            os.close(pipe)
        door.send(str(pid).encode())


def _bury() -> None:
    """Let go of those that have ended; until then nobody else has their pids."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def _end_with(start: Start, orders: int, answers: int) -> None:
    try:
        os.dup2(orders, 0)
        _live(start, answers)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(1)


def _live(start: Start, answers: int) -> None:
    explain.listen()
    if start.faults:
        injection.arm(start.faults)
    keeper = KeeperActor(
        start.redis_url,
        start.checkpoints,
        start.host,
        start.secret,
        start.storage.encode(),
        lasting=start.lasting,
    )
    with open(0) as orders:
        for line in orders:
            name, *arguments = line.rstrip("\n").split("\t")
            getattr(keeper, name)(*[_value(argument) for argument in arguments])
            os.write(answers, f"{keeper.address()}\n".encode())
        threading.Event().wait()


def _value(text: str) -> object:
    return bytes.fromhex(text.removeprefix("hex:")) if text.startswith("hex:") else text


if __name__ == "__main__":
    main()
