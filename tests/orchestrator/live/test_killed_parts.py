"""Parts of a house that are killed while they start."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config import load
from orchestrator.supervisor import processes, supervisor
from orchestrator.supervisor.supervisor import House, HouseError

STARTS = processes.STARTS_MAX

Killing = Callable[[int], list["subprocess.Popen[bytes]"]]


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(load(None, {}, {"manager.state_dir": str(tmp_path / "state")}), None)
    house.places.make()
    house._env = house._environment()
    house._open_door()
    yield house
    house.stop()


def test_a_house_without_its_folder_leaves_the_way_of_the_next_house_alone(
    house: House, tmp_path: Path
) -> None:
    """The next one makes the short link before its lock, and its sockets would find no folder."""
    places = house.places
    assert places.run != places.state_dir / "run"
    house._lock = places.lock.stat()
    places.state_dir.rename(tmp_path / "elsewhere")
    house.stop()
    assert places.run.is_symlink()
    (tmp_path / "elsewhere").rename(places.state_dir)
    house.stop()
    assert not places.run.is_symlink()


@pytest.fixture
def killing(monkeypatch: pytest.MonkeyPatch) -> Killing:
    """Return a function that has the next so many processes killed when they start."""
    real = processes.start

    def kill_next(count: int) -> list["subprocess.Popen[bytes]"]:
        killed: list[subprocess.Popen[bytes]] = []

        def start(*words: Any, **options: Any) -> "subprocess.Popen[bytes]":
            process = real(*words, **options)
            if len(killed) < count:
                process.kill()
                process.wait()
                killed.append(process)
            return process

        monkeypatch.setattr(processes, "start", start)
        return killed

    return kill_next


def test_local_cloud_killed_while_it_starts_is_started_again(house, killing):
    """A storm of kills met a house that had just been started, and it ended."""
    killed = killing(STARTS - 1)
    house._start_cloud()
    assert len(killed) == STARTS - 1
    assert house._children["cloud"].poll() is None


def test_local_cloud_killed_at_every_start_of_a_living_house_is_tried_by_the_next_round(
    house, killing, monkeypatch
):
    said: list[str] = []
    monkeypatch.setattr(supervisor, "_say", said.append)
    killing(STARTS)
    with pytest.raises(HouseError, match="the local cloud did not start"):
        house._start_cloud()
    killing(STARTS)
    house._revive()
    assert any("did not start" in line and "tried again" in line for line in said)
    house._revive()
    assert house._children["cloud"].poll() is None


def test_redis_killed_while_it_starts_is_started_again(house, killing):
    killed = killing(STARTS - 1)
    house._start_redis()
    assert len(killed) == STARTS - 1
    assert house._redis is not None
    assert house._redis.alive()


def test_head_killed_while_it_waits_for_the_house_is_started_again(house):
    house._begin_head()
    house._children["ray"].kill()
    house._children["ray"].wait()
    house._start_redis()
    house._choose_addresses()
    house._start_cloud()
    house._start_manager()
    assert house._children["ray"].poll() is None
    house.places.given_back.touch()  # so that it leaves no memory of a keeper


def test_parts_of_a_house_keep_what_python_compiles(tmp_path):
    """A restart took a third longer in a shell that forbids it: each process compiled anew."""
    log, words = tmp_path / "log", "import sys; print(sys.dont_write_bytecode)"
    env = {**os.environ, processes.UNCACHED: "1"}
    processes.start([sys.executable, "-c", words], env=env, log=log).wait()
    assert log.read_text() == "False\n"


def test_local_cloud_that_cannot_start_is_started_once(house, tmp_path):
    """A status that it returned itself tells against its settings, so it is said at once."""
    started: list[str] = []
    real = house._python

    def counted(name: str, *words: Any) -> "subprocess.Popen[bytes]":
        started.append(name)
        return real(name, ["-c", "raise SystemExit(2)"])

    house._python = counted  # type: ignore[method-assign]
    with pytest.raises(HouseError, match=r"see .*cloud\.log"):
        house._start_cloud()
    assert started == ["cloud"]
