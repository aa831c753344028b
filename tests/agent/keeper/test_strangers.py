"""A crowd of strangers at the keeper's port, while an agent and a worker have something to say."""

import contextlib
import itertools
import os
import resource
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from crews import SECRET, RedisProcess
from entrances import crowd, is_open

from agent.errors import Refused
from agent.keeper.keeper import Keeper, connect
from agent.keeper.storage.vault import Place
from agent.messages import AgentJoined, JobOrder
from agent.net.front import PLACES_MAX
from agent.net.handshake import job_secret
from agent.net.wire import dial
from agent.protocol import AgentHello, Heard, Hello, Told, Welcome
from cloud.open_files import raise_limit

pytestmark = pytest.mark.processes

MANY = 1100
GREEDY = [  # a payload, or a message, of 3 GiB
    meta.to_bytes(4, "little") + payload.to_bytes(8, "little") + bytes(32)
    for meta, payload in ((100, 3 << 30), (3 << 30, 0))
]


@contextlib.contextmanager
def dripping(strangers: list[socket.socket]) -> Iterator[None]:
    """Each of them sends a byte of a head now and then, for as long as this lasts."""
    over = threading.Event()

    def drip() -> None:
        for one in itertools.cycle(strangers):
            if over.wait(0.001):
                return
            with contextlib.suppress(OSError):
                one.send(b"\x01")

    thread = threading.Thread(target=drip)
    thread.start()
    yield
    over.set()
    thread.join()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_keeper_in_a_crowd_of_strangers_lets_ours_in_and_keeps_its_memory(
    redis_process: RedisProcess, tmp_path: Path
) -> None:
    """Idle and slow ones on more connections than there are places, and some who send what they have announced:
    an agent is let in and heard, a worker is welcomed, and one of an unknown job is refused in words."""
    raise_limit()
    keeper = Keeper(connect(redis_process.url), Place(checkpoints=tmp_path), "127.0.0.1", SECRET)
    keeper.open_job(JobOrder(job="job", script="train.py", script_sha=""), b"")
    try:
        with crowd(keeper.address, MANY) as strangers, dripping(strangers[::2]):
            agent = dial(keeper.address, SECRET, AgentHello(machine_id="m"))
            agent.send(
                Told(serial=1, report=AgentJoined(at_s=0.0, machine_id="m", address="", slots=1))
            )
            assert agent.receive()[0] == Heard(serial=1)
            hello = Hello(job="job", worker="w", machine_id="m", mesh_address="127.0.0.1:1")
            worker = dial(keeper.address, job_secret(SECRET, "job"), hello)
            assert isinstance(worker.receive()[0], Welcome)
            with pytest.raises(Refused, match="nobody here knows that job"):
                gone = Hello(job="gone", worker="w", machine_id="m", mesh_address="127.0.0.1:1")
                dial(keeper.address, job_secret(SECRET, "gone"), gone)
            assert not is_open(strangers[0])
            assert len(keeper._front._waiting) <= PLACES_MAX
        before_bytes = resident_bytes()
        with crowd(keeper.address, 8) as greedy:
            junk = memoryview(os.urandom(1 << 20))
            for number, one in enumerate(greedy):
                one.settimeout(5)
                with contextlib.suppress(OSError):  # it hangs up at the first head
                    one.sendall(GREEDY[number % 2])
                    for _ in range(32):
                        one.sendall(junk)
            assert resident_bytes() - before_bytes < 50 << 20
        agent.close()
        worker.close()
    finally:
        keeper.close()
