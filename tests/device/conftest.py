"""The accelerator that torch finds on this machine; else one that is simulated, if there is a compiler to build it."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

pytest.register_assert_rewrite("crews")
AGENT = Path(__file__).parents[1] / "agent"
sys.path.insert(0, str(AGENT))

import late  # noqa: E402
import msgspec  # noqa: E402
from crews import Crew, RedisProcess  # noqa: E402
from injection import VARIABLE  # noqa: E402

from agent.messages import WorkerOrder  # noqa: E402


class Accelerator(NamedTuple):
    name: str
    variables: dict[str, str]  # with which a process has it

    @property
    def env(self) -> dict[str, str]:
        return {**os.environ, **self.variables}


@pytest.fixture(scope="session")
def accelerator(tmp_path_factory: pytest.TempPathFactory) -> Accelerator:
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is not None:
        return Accelerator(found.type, {})
    if late.compiler() is None:
        pytest.skip(
            "NOT RUN, what a worker does on an accelerator: torch finds none on this machine, and there is no C++ "
            "compiler (apt install g++) for the one that these tests can simulate"
        )
    return Accelerator("late", late.plugged_in(tmp_path_factory.mktemp("late")))


class Births:
    """As a `Nursery`, but each worker is a process of its own from the start: what has used a device cannot fork."""

    def __init__(self, env: dict[str, str]) -> None:
        self._env = env
        self._workers: list[subprocess.Popen[bytes]] = []

    def start(self, order: WorkerOrder, host: str = "127.0.0.1", faults: str = "") -> int:
        worker = subprocess.Popen(
            [sys.executable, str(AGENT / "armed_worker.py"), "--host", host],
            env={**self._env, VARIABLE: faults} if faults else self._env,
            stdin=subprocess.PIPE,
        )
        order = msgspec.structs.replace(order, slot=len(self._workers))  # a device after the other
        worker.stdin.write(msgspec.json.encode(order) + b"\n")
        worker.stdin.close()
        self._workers.append(worker)
        return worker.pid

    def kill_all(self) -> None:
        for worker in self._workers:
            worker.kill()
            worker.wait()
        self._workers.clear()


@pytest.fixture
def crew(
    accelerator: Accelerator, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> Iterator[Crew]:
    server = RedisProcess(tmp_path_factory.mktemp("redis"))
    crew = Crew(server, Births(accelerator.env), tmp_path)
    yield crew
    crew.close()
    server.kill()
