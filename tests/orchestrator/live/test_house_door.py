"""The house's part in the join door: its port outlives houses, and its process may die."""

import contextlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from agent.machine.environment import of_worker
from agent.machine.join.door import Door, NoAnswer
from cloud.http_server import bound
from orchestrator.config import load
from orchestrator.door.address import DoorFile, read_door
from orchestrator.supervisor import supervisor
from orchestrator.supervisor.supervisor import House, HouseError
from tests.waiting import until

NOTHING: dict[str, str] = {}
AZURE = {
    "azure.subscription": "s",
    "azure.image": "i",
    "azure.ssh_public_key": "ssh-ed25519 AAAA",
    "azure.subnets": "eastus=/a",
}


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(supervisor, "_say", lines.append)
    return lines


def a_house(folder: Path, settings: Mapping[str, str] = NOTHING) -> House:
    told = {"manager.state_dir": str(folder / "state"), **settings}
    house = House(load(None, {}, told), None)
    house.places.make()
    return house


def answering_door(house: House) -> DoorFile:
    """Start the door of a house; return where it answers."""
    house._env = house._environment()
    house._open_door()
    house._start_door()
    known = read_door(house.places)
    assert known is not None
    until("a nonce", lambda: _answer(Door(known.address, known.fingerprint)), 60)
    return known


def open_door(folder: Path) -> str:
    """Where the door of the next house is; the port is free again after."""
    house = a_house(folder)
    house._open_door()
    assert house._door is not None
    house._door.close()
    house.places.remove_links()
    known = read_door(house.places)
    assert known is not None
    return known.address


def test_the_door_keeps_its_port_from_house_to_house(tmp_path, said):
    """The system gives no outgoing connection that port while no house runs."""
    first = open_door(tmp_path)
    assert int(first.rpartition(":")[2]) in supervisor.PORTS
    assert open_door(tmp_path) == first
    assert said == []


def test_a_door_that_has_to_move_says_what_that_ends(tmp_path, said):
    """The machines that are there know the old address only, so a person has to hear of it."""
    first = open_door(tmp_path)
    host, _, port = first.rpartition(":")
    with bound(host, int(port)):
        second = open_door(tmp_path)
    assert int(second.rpartition(":")[2]) in supervisor.PORTS
    (line,) = said
    assert f"at {second} now and no longer at {first} (Address already in use)" in line
    assert "end themselves after 600 s" in line


def test_a_door_that_cannot_live_ends_no_house(tmp_path, said, monkeypatch):
    """Its process is started again at a pace, and its log holds why it ended."""
    monkeypatch.setattr(supervisor, "RESTARTS_MAX", 0)
    monkeypatch.setattr(supervisor, "PACE_S", 0.0, raising=False)
    house = a_house(tmp_path)
    try:
        house._env = house._environment()
        house._open_door()
        house.places.secret("door").unlink()
        house._start_door()
        first = house._children["door"]
        assert first.wait(60) == 1
        house._revive()
        assert house._children["door"].pid != first.pid
        assert "FileNotFoundError" in house.places.log("door").read_text()
        assert any("the join door ended" in line for line in said)
    finally:
        house.stop()


def test_the_door_opens_before_the_local_cloud_has_begun(tmp_path, said):
    """The cloud makes its papers when it starts, which on a busy machine is after the door."""
    house = a_house(tmp_path)
    try:
        answering_door(house)
        assert house._children["door"].poll() is None
        assert not house.places.cloud_dir.exists()
    finally:
        house.stop()


def test_a_copy_of_a_living_house_does_not_start(tmp_path, said):
    """Each of the two would end the other's machines. The local cloud's are each house's own."""
    house = a_house(tmp_path)
    try:
        known = answering_door(house)
        shutil.copytree(house.places.state_dir, tmp_path / "copy" / "state", symlinks=True)
        copy = a_house(tmp_path / "copy", AZURE)
        with pytest.raises(HouseError, match=f"is a copy, .* still answers at {known.address}: "):
            copy.start()
        a_house(tmp_path / "copy")._refuse_if_copied()
    finally:
        house.stop()
        copy.places.remove_links()
    copy._refuse_if_copied()


def _answer(client: Door) -> Any:
    with contextlib.suppress(NoAnswer):
        return client.call("GET", "/nonce", None, 5.0)
    return None


def test_machines_look_for_a_bucket_where_the_manager_does(tmp_path, monkeypatch):
    """Workers write large states there themselves, and S3 answers only in the bucket's region."""
    for name, given in (("AWS_REGION", "eu-west-1"), ("AWS_DEFAULT_REGION", "eu-north-1")):
        monkeypatch.delenv("AWS_REGION", raising=False)
        monkeypatch.setenv(name, given)
        house = a_house(tmp_path)
        house._environment()
        house._choose_addresses()
        assert house._head_order().told["AWS_REGION"] == given
        house.places.remove_links()
    assert of_worker({"AWS_REGION": "eu-west-1"}) == {"AWS_REGION": "eu-west-1"}
