"""A keeper in a process of its own, as Ray would start one: it can be killed, and started again.

python keeper_process.py REDIS_URL CHECKPOINTS HOST SECRET_FILE STORAGE [lasting]    (prints its address)
"""

import sys
import threading

import explain
import injection  # noqa: F401 - arms this process

from agent.machine.actor import KeeperActor


def main() -> None:
    explain.listen()
    redis_url, checkpoints, host, secret, storage, *lasting = sys.argv[1:]
    keeper = KeeperActor(
        redis_url, checkpoints, host, secret, storage.encode(), lasting=bool(lasting)
    )
    for line in sys.stdin:
        name, *arguments = line.rstrip("\n").split("\t")
        getattr(keeper, name)(*[_value(argument) for argument in arguments])
        sys.stdout.write(f"{keeper.address()}\n")
        sys.stdout.flush()
    threading.Event().wait()


def _value(text: str) -> object:
    return bytes.fromhex(text.removeprefix("hex:")) if text.startswith("hex:") else text


if __name__ == "__main__":
    main()
