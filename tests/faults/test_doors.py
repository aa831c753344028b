"""Nobody without the token gets in, and nobody gets two managers on one state."""

import contextlib
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest
from houses import RunningHouse, command_line, is_worker, until
from sockets import Door, doors, paths

from agent.keeper.storage import memory_log
from agent.keys import EVENTS
from agent.machine.join.door import Door as JoinDoor
from agent.machine.join.door import NoAnswer, TurnedAway
from cloud.local.identity import Signer
from cloud.local.processes import living
from cloud.model import Machine, Pool
from orchestrator.config import load
from orchestrator.dashboard.keys import Keys
from orchestrator.door.address import read_door
from orchestrator.events import AnyEvent
from orchestrator.supervisor import processes, supervisor
from orchestrator.supervisor.redis_server import find_server
from orchestrator.view import Sentence

pytestmark = pytest.mark.processes

TOY = (Path(__file__).parent / "killable.py").read_text()
SHELLS_FILES = 1024  # Debian's default
IDLE = 1100
UNUSED = ("ray.util.client", "autoscaler", "dashboard.py", "Agent")
INTRUDES = """
import subprocess, sys

code = '''
import json, os, sys
found = {"environment": dict(os.environ), "joined": ""}
import ray
try:
    ray.init(address=sys.argv[2], _node_ip_address="127.0.40.1")
    found["joined"] = sys.argv[2]
except BaseException as error:
    found["refused"] = repr(error)
with open(sys.argv[1] + ".part", "w") as file:
    json.dump(found, file)
os.replace(sys.argv[1] + ".part", sys.argv[1])
'''
address = sys.argv.pop()
subprocess.Popen([sys.executable, "-c", code, f"{sys.argv[3]}.found", address])
"""
JOIN = "import ray; ray.init(address={address!r}, _node_ip_address='127.0.40.1'); print('IN')"


@pytest.fixture(scope="module")
def busy_house(tmp_path_factory) -> Iterator[RunningHouse]:
    """A house with a job on a machine. Its state directory and its tokens were open to other users before."""
    folder = tmp_path_factory.mktemp("busy")
    house = RunningHouse(folder)
    house.places.cloud_dir.mkdir(parents=True)
    house.places.state_dir.chmod(0o777)
    for token in tokens(house):
        token.write_text("known")
        token.chmod(0o666)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (SHELLS_FILES, hard))
        house.begin()
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        house.wait_until_up()
        argv = ("100000", "0.02", str(folder / "out"), house.client().house().ray_address)
        house.submit(INTRUDES + TOY, argv=argv, slots_max=1)
        house.reached(1)
        yield house
    finally:
        house.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def tokens(house: RunningHouse) -> list[Path]:
    named = [house.places.secret(name) for name in ("dashboard", "mesh", "ray")]
    return [*named, house.places.cloud_dir / "token"]


def test_house_closes_an_open_state_directory(busy_house):
    """It says so, and the secrets that others may know are replaced; all else goes on."""
    opened = [busy_house.places.state_dir, *tokens(busy_house)]
    # Others of these tests end the join door, and the house says so.
    lines = [x for x in busy_house.log.read_text().splitlines() if "join door" not in x]
    assert len(lines) == len(opened)
    for path, line in zip(opened, lines, strict=True):
        assert line.startswith(f"{path} was open to other users (mode 0")
        assert path.stat().st_mode & 0o077 == 0
    assert "known" not in {token.read_text() for token in tokens(busy_house)}


def test_every_listening_socket_refuses_a_stranger(busy_house):
    """Of all processes of a house: what can be reached from elsewhere is Ray's, and asks for its token."""
    house = busy_house
    pids = living({"none": house.process.pid}) | {house.process.pid}
    found = doors(pids)
    address = read_door(house.places).address

    def _kind(door: Door) -> str:
        return "join" if f"{door.address}:{door.port}" == address else kind_of(door)

    kinds = {_kind(door) for door in found}
    assert kinds >= {"board", "cloud", "metadata", "ray", "keeper", "worker", "join"}
    assert {door.is_local for door in found if _kind(door) != "ray"} == {True}
    for door in found:
        who = command_line(door.pid), door
        if door.is_grpc():
            assert door.grpc_answers() == {"UNAUTHENTICATED"}, who
        elif _kind(door) == "metadata":  # as on every cloud: whoever is on the machine may ask
            assert door.web_answers() == {404}, who
        elif _kind(door) in {"keeper", "worker", "join"}:  # another protocol than this stranger's
            assert door.web_answers() == set(), who
        else:
            answers = door.web_answers()
            assert answers & {401, 403}, who
            assert answers <= {401, 403, 404}, who
    for path in paths(pids):
        folders = Path(path).resolve().parents
        assert any(folder.stat().st_mode & 0o077 == 0 for folder in folders), path


def kind_of(door: Door) -> str:
    words = command_line(door.pid)
    if "cloud.local" in words:
        return "cloud" if door.address == "127.0.0.1" else "metadata"
    if "orchestrator.supervisor " in words or "orchestrator.dashboard " in words:
        return "board"
    if door.is_local and words.startswith("ray::KeeperActor"):
        return "keeper"
    if door.is_local and is_worker(door.pid):
        return "worker"
    return "ray"


def test_script_has_no_key_of_the_house(busy_house):
    """Its environment has nothing that proves who we are, and it cannot be a node or driver of our Ray."""
    house = busy_house
    told = house.folder / "out.found"
    until("the script to have tried", told.exists, 120.0)
    found = json.loads(told.read_text())
    assert not found["joined"], found
    environment = found["environment"]
    assert [name for name in environment if name.startswith(("RAY_", "ORCHESTRATOR_"))] == []
    values = "\n".join(environment.values())
    for secret in tokens(house):
        assert secret.read_text() not in values
    for path in (house.client().house().redis_url, str(house.places.redis_socket)):
        assert path not in values
    assert environment["SPOT_HOUSE"] == house.places.identity
    assert environment["OMP_NUM_THREADS"] == "1"


def test_ray_refuses_a_driver_without_its_token(busy_house):
    """A driver without the token is no part of the cluster."""
    stranger = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    driver = subprocess.run(
        [sys.executable, "-c", JOIN.format(address=busy_house.client().house().ray_address)],
        env=stranger,
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert driver.returncode != 0
    assert "IN" not in driver.stdout


def test_idle_strangers_leave_house_page_and_cloud_alone(busy_house):
    """While there are as many as a shell allows files, Redis is restarted, the page and the cloud answer, and no log grows.
    A page that is killed comes back on its port."""
    house = busy_house
    told = house.client().house()
    cloud = msgspec.json.decode((house.places.cloud_dir / "cloud.json").read_bytes())["url"]
    logs = [house.log, *house.places.log("x").parent.iterdir()]
    before = sum(log.stat().st_size for log in logs)
    with contextlib.ExitStack() as idle:
        for url in (told.dashboard_url, cloud, f"https://{read_door(house.places).address}"):
            for _ in range(IDLE):
                at = httpx.URL(url)
                idle.enter_context(socket.create_connection((at.host, at.port), 30))
        kill(house, Path(find_server()).name)
        step = until("a step", house.job).step
        house.reached(step + 3)
        assert answered(house, told.dashboard_url, "api/view", "dashboard") == 200
        assert answered(house, f"{cloud}/", "places", "cloud") == 200
        assert joining(house) == "no lease expects"
    assert sum(log.stat().st_size for log in logs) - before < 100_000
    kill(house, "orchestrator.dashboard")
    kill(house, "orchestrator.door")
    until("the door", lambda: joining(house) == "no lease expects")
    until("the page", lambda: answered(house, told.dashboard_url, "api/view", "dashboard") == 200)
    assert house.client().house() == told


def joining(house: RunningHouse) -> str:
    """What the door says to a machine with genuine papers that no lease expects."""
    door = read_door(house.places)
    client = JoinDoor(door.address, door.fingerprint)
    pool = Pool("local", "east", "east-a", "small")
    machine = Machine(
        id="i-none",
        token="t",
        pool=pool,
        market="spot",
        state="running",
        launched_at_s=0.0,
        tags={},
        address="127.0.0.1",
    )
    try:
        ticket = client.call("GET", "/nonce", None, 20.0)
        signature = Signer(house.places.cloud_dir).sign(machine, ticket["nonce"], time.time())
        asked = {"cloud": "local", "deployment": "default", "ticket": ticket, "claim": "c" * 64}
        client.call("POST", "/join", {**asked, "proof": {"signature": signature}}, 20.0)
    except TurnedAway as refused:
        return str(refused)[:16]
    except NoAnswer:
        return ""
    return "let in"


def kill(house: RunningHouse, words: str) -> None:
    (pid,) = (p for p in processes.marked(house.places.identity) if words in command_line(p))
    os.kill(pid, signal.SIGKILL)


def answered(house: RunningHouse, url: str, path: str, name: str) -> int:
    if name == "cloud":
        token = (house.places.cloud_dir / "token").read_text()
    else:
        token = Keys(house.places.secret(name)).make("read-only")
    headers = {"Authorization": f"Bearer {token}"}
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(url + path, headers=headers, timeout=20, trust_env=False).status_code
    return 0


def test_a_redis_that_does_not_answer_is_one_clear_line(new_house, tmp_path):
    """A wrong redis_url is named with the setting, within bounded time."""
    house = new_house(f'redis_url = "unix://{tmp_path}/nowhere.sock"\n')
    assert "check manager.redis_url" in house.refused()


def test_a_house_whose_folder_was_moved_away_ends_with_all_it_started(new_house):
    """Nobody could ask it or end it any more, and nothing that it computes and pays for could be kept. A newer house that
    begins in a folder of that name is not harmed by its end.
    """
    older, newer = new_house(), new_house()
    newer.log = newer.folder / "newer.log"
    older.begin(mark=False)
    older.wait_until_up()
    began = set(processes.marked(older.places.identity))
    older.places.state_dir.rename(older.folder / "elsewhere")
    newer.begin(mark=False)
    newer.wait_until_up()
    assert older.process.wait(30) == 1
    assert "state was moved or removed" in older.log.read_text()
    until("its processes to end", lambda: not began & set(processes.marked(older.places.identity)))
    assert newer.process.poll() is None
    assert newer.client().view() is not None

    def is_removed() -> bool:
        shutil.rmtree(newer.places.state_dir, ignore_errors=True)  # files come while it is emptied
        return not newer.places.state_dir.exists()

    until("its folder to go", is_removed)
    assert newer.process.wait(30) == 1
    until("its processes to end", lambda: processes.marked(newer.places.identity) == [])


def test_the_older_of_two_houses_on_one_redis_leaves(new_house, server, store, monkeypatch):
    """With redis_url a house starts no server of its own, and the keys are there; a second one in its folder says who is
    there and ends. A newer house elsewhere on that Redis makes the older one end by itself with one sentence, and take its
    processes along; the newer one goes on. What loses our mark ends with it: Ray writes titles over the environment.
    """
    settings = f'redis_url = "{server.url}"\n'
    older, newer = new_house(settings, name="older"), new_house(settings, name="newer")
    client = older.start()
    assert store.get("orch:epoch") == b"1"
    ((_, entry),) = store.xrange("orch:journal", count=1)
    assert msgspec.json.decode(entry[b"e"], type=AnyEvent).salt
    assert not older.places.redis_dir.exists()
    assert "another manager already runs in" in older.refused()
    assert client.view().epoch == 1
    running = [command_line(pid) for pid in processes.marked(older.places.identity)]
    assert any("gcs_server" in words for words in running)
    assert not [words for words in running if any(part in words for part in UNUSED)]
    everything = map(command_line, living({"house": older.process.pid}))
    assert not [words for words in everything if "ray::IDLE" in words]

    for name in set(os.environ) - {"HOME", "PATH"}:
        monkeypatch.delenv(name)  # so that the mark of the next one has no room
    newer.start()
    assert older.process.wait(60) == 1
    said = older.log.read_text().splitlines()
    assert ["a manager of another house took over the same Redis" in line for line in said] == [
        True
    ], said
    assert processes.marked(older.places.identity) == []
    assert newer.client().view().epoch == 2
    assert newer.process.poll() is None
    (head,) = {os.getsid(pid) for pid in processes.marked(newer.places.identity) if of_ray(pid)}
    assert newer.down() == 0
    assert of_session(head) == []


def of_ray(pid: int) -> bool:
    return "gcs_server" in command_line(pid)


def of_session(leader: int) -> list[str]:
    """The command lines of what lives in it; who only waits to be reaped has none."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(int(entry.name)) == leader:
                found.append(command_line(int(entry.name)))
    return [words for words in found if words]


def test_a_house_hears_that_it_shall_end_while_it_starts(new_house):
    """SIGTERM in the middle of the start ends it there, with one line; it is never ready, nothing is left."""
    house = new_house()
    house.begin()
    until("its Redis", house.places.redis_socket.exists)
    house.process.terminate()
    assert house.process.wait(30) == 1
    assert house.log.read_text().splitlines() == [
        "orchestrator: told to end while it was starting; nothing is left of it"
    ]
    assert not house.places.house.exists()
    assert processes.marked(house.places.identity) == []


def test_memory_that_cannot_outlive_the_keeper_is_said_before_it_matters(
    tmp_path, server, store, monkeypatch
):
    """By the house as it starts, and in the events."""
    said: list[str] = []
    monkeypatch.setattr(supervisor, "_say", said.append)
    monkeypatch.setattr(memory_log, "SHARED", tmp_path / "none")
    settings = {"manager.state_dir": str(tmp_path / "state"), "manager.redis_url": server.url}
    house = supervisor.House(load(None, {}, settings), None)
    house.places.make()
    house._look_at_memory()
    house._start_redis()
    ((_, row),) = store.xrange(EVENTS)
    event = msgspec.json.decode(row[b"e"], type=Sentence)
    assert [event.because] == said
    assert "takes no files" in event.because
    house.stop()
