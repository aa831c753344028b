"""A process that starts workers in milliseconds: it has imported everything, and forks.

    python -m agent.machine.fork_server PARENT < orders, one on each line > the pid of each

All of them end with the process PARENT, which has started this one. Their output goes to standard
error.
"""

import os
import signal
import sys

import msgspec

from agent.errors import AgentError
from agent.machine import worker_process
from agent.machine.parent_death import tie
from agent.messages import WorkerOrder

HOST = "127.0.0.1"


def main() -> None:
    tie(int(sys.argv[1]))
    # Exit statuses of workers are not read, so the kernel may drop them.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    worker_process.warm_up()
    nursery = os.getpid()
    for line in sys.stdin.buffer:
        order = msgspec.json.decode(line, type=WorkerOrder)
        pid = os.fork()
        if pid == 0:
            _live(order, nursery)
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()


def _live(order: WorkerOrder, nursery: int) -> None:
    code = 1
    try:
        tie(nursery)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)
        worker_process.run(order, HOST)
        code = 0
    except AgentError as error:
        sys.__stderr__ and sys.__stderr__.write(f"{order.worker}: {error}\n")
    finally:
        os._exit(code)


if __name__ == "__main__":
    main()
