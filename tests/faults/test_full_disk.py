"""A disk that runs full under the house."""

import os
import resource
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest
import redis
from houses import RunningHouse

from orchestrator import client
from orchestrator.client import Client, Silent
from orchestrator.client import House as HouseFile
from orchestrator.config import load
from orchestrator.live import manager
from orchestrator.live.manager import Manager
from orchestrator.live.order import Order
from orchestrator.paths import Places
from orchestrator.supervisor import supervisor as house_module
from orchestrator.supervisor.supervisor import House

pytestmark = pytest.mark.processes


@contextmanager
def full(pid: int, at_bytes: int) -> Iterator[None]:
    """No file of this process, of what it starts, and of that other one can grow beyond so many bytes."""
    kept, most = resource.getrlimit(resource.RLIMIT_FSIZE), resource.RLIM_INFINITY
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (at_bytes, most))
    resource.setrlimit(resource.RLIMIT_FSIZE, (at_bytes, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, kept)


def test_the_house_waits_for_room_and_nothing_acknowledged_is_lost(tmp_path, monkeypatch):
    """Redis ends with the first write that does not fit. The house says why, once, as does every command, and does not
    wear itself out with starting it again; with room it is back, with every write that it has acknowledged.
    """
    said: list[str] = []
    monkeypatch.setattr(client, "brief_policy", dict)
    monkeypatch.setattr(house_module, "_say", said.append)
    house = House(load(None, {}, {"manager.state_dir": str(tmp_path / "state")}), None)
    house.places.make()
    house._start_redis()
    server = house._redis
    assert server is not None
    assert server.pid is not None
    store, written = redis.Redis.from_url(server.url), 0
    house._announce()
    asked = Client(
        msgspec.json.decode(house.places.house.read_bytes(), type=HouseFile), house.places.state_dir
    )

    def write() -> None:
        nonlocal written
        store.set(f"key {written}", b"x" * 10_000)
        written += 1

    try:
        for _ in range(10):
            write()
        size = sum(file.stat().st_size for file in house.places.redis_dir.rglob("*"))
        with full(server.pid, size + 25_000):
            with pytest.raises(redis.ConnectionError):
                for _ in range(10):
                    write()
            os.waitid(os.P_PID, server.pid, os.WEXITED | os.WNOWAIT)  # its sockets close before
            before = written
            for _ in range(house_module.RESTARTS_MAX + 1):
                house._revive()
                with pytest.raises(redis.ConnectionError):
                    for _ in range(3):
                        write()
            assert written == before
            with pytest.raises(Silent, match=r"takes nothing more \(File too large\): make room"):
                asked.view()
        with pytest.raises(Silent, match=r"Redis does not answer .*: orchestrator check"):
            asked.view()
        house._revive()
        write()
        assert asked.view() is None
        assert store.dbsize() == written == before + 1
        full_up, room, torn = (line for line in said if line)
        assert full_up.startswith(f"{house.places.state_dir} takes nothing more (")
        assert room == "there is room again"
        assert torn.startswith("the last write to ") and "are cut off" in torn
    finally:
        house.stop()


def test_a_house_that_finds_no_room_says_so_in_a_line(tmp_path):
    house = RunningHouse(tmp_path)
    with full(os.getpid(), 0):
        ran = subprocess.run(house._command(), capture_output=True, text=True, timeout=60)
    of_memory, of_the_disk = ran.stderr.splitlines()  # for `full`, both are full
    assert of_memory.startswith("/dev/shm takes no files")
    assert of_the_disk == (
        f"orchestrator: {house.places.state_dir} takes nothing more (File too large): make room on that disk, "
        "then: orchestrator up"
    )
    assert ran.returncode == 1


def test_a_manager_without_redis_does_not_end_before_redis_is_back(server, tmp_path, monkeypatch):
    """And it ends then, though it cannot say why: its log takes nothing."""
    places = Places(tmp_path / "state")
    places.make()
    places.log("loop").symlink_to("/dev/full")
    order = Order(
        state_dir=str(places.state_dir),
        redis_url=server.url,
        ray_address="",
        settings="",
        house="",
    )
    server.stop()
    ended = threading.Event()
    monkeypatch.setattr(manager, "live", _no_redis)
    monkeypatch.setattr(manager, "CRASH_PAUSE_S", 0.01)
    monkeypatch.setattr(manager.os, "_exit", lambda code: ended.set())
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(server.url.removeprefix("unix://"))
        listener.listen()
        listener.settimeout(20)
        Manager(msgspec.json.encode(order))
        caller, _ = listener.accept()  # it looks whether Redis is there
        caller.close()
        assert not ended.is_set()
    server.start()
    assert ended.wait(20)
    places.remove_links()


async def _no_redis(order: Order) -> None:
    raise redis.ConnectionError("gone")
