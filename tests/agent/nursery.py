"""Starts worker processes in milliseconds: one process has imported everything, and forks.

python nursery.py < lines of JSON: {"order": ..., "host": ..., "faults": ...} > lines with the pids
"""

import os
import signal
import sys

import explain
import injection
import msgspec

from agent.machine import worker_process
from agent.messages import WorkerOrder


class Birth(msgspec.Struct):
    order: WorkerOrder
    host: str
    faults: str  # an encoded plan, or nothing


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    worker_process.warm_up()
    for line in sys.stdin.buffer:
        birth = msgspec.json.decode(line, type=Birth)
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            explain.listen()
            if birth.faults:
                injection.arm(birth.faults)
            code = 0
            try:
                worker_process.run(birth.order, birth.host)
            except Exception as error:
                sys.stderr.write(f"{birth.order.worker}: {error}\n")
                code = 1
            finally:
                os._exit(code)
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
