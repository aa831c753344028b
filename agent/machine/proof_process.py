"""A worker's second process, which proves a step of the job and ends with the worker.

    python -m agent.machine.proof_process PID_OF_THE_WORKER HOST < order.json

It lowers its priority before its imports, which take long, so that the training worker goes first.
"""

import gc
import os
import sys

import msgspec

from agent.machine.parent_death import tie
from agent.messages import WorkerOrder

NICE = 10


def main() -> None:
    tie(int(sys.argv[1]))
    os.nice(NICE)
    gc.disable()  # see `agent.machine.fork_server`
    from agent.machine import worker_process

    worker_process.warm_up()
    gc.enable()
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=WorkerOrder)
    worker_process.run(order, sys.argv[2])


if __name__ == "__main__":
    main()
