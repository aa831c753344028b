"""Processes that have the accelerator of this machine."""

from pathlib import Path
from typing import NamedTuple

import msgspec
from crews import Nursery

from agent.messages import WorkerOrder


class Accelerator(NamedTuple):
    name: str
    variables: dict[str, str]  # with which a process has it


class Births(Nursery):
    """Forks that have the device, of a process that has not used it: as on a machine.

    Each worker in turn gets the next device.
    """

    def __init__(self, disk: Path, accelerator: Accelerator) -> None:
        variables = (f"{name}={value}" for name, value in accelerator.variables.items())
        super().__init__(disk, ["env", *variables])

    def start(self, order: WorkerOrder, host: str = "127.0.0.1", faults: str = "") -> int:
        return super().start(msgspec.structs.replace(order, slot=len(self.pids)), host, faults)
