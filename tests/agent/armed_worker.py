"""A worker in a process of its own, which can be armed: see `injection`."""

import sys

import injection  # noqa: F401 - arms this process

from agent.machine import worker_process

if __name__ == "__main__":
    sys.exit(worker_process.main())
