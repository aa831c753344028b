"""Up and down, and what trouble leaves behind."""

import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from redis.connection import AbstractConnection

from orchestrator import redis_client
from orchestrator.cli import jobs, up_down, watch
from orchestrator.cli.up_down import alive, news
from orchestrator.client import House, Silent
from orchestrator.dashboard.keys import Keys
from orchestrator.paths import SHORT
from orchestrator.supervisor import processes
from orchestrator.supervisor.redis_server import find_server

pytestmark = pytest.mark.processes


def test_up_finds_what_is_up(housed):
    """A second `up` starts nothing; it says where the page is, with a new key of which only the hash is kept."""
    answer = housed("up", "--json").json
    assert answer["was_up"] is True
    keys = Keys(housed.places.secret("dashboard"))
    assert opened(keys, answer) == "admin"
    assert "already up" in housed("up").out
    assert opened(keys, housed("tools", "dashboard", "--json").json) == "admin"
    assert opened(keys, housed("tools", "dashboard", "--read-only", "--json").json) == "read-only"
    assert opened(keys, housed("tools", "dashboard", "--days", "365", "--json").json) == "admin"


def opened(keys: Keys, answer: dict[str, str]) -> str:
    return keys.opened_by(answer["dashboard_url"].partition("/#key=")[2]).role


def test_up_says_which_settings_are_not_in_force(housed):
    """A budget that was lowered in the file binds nobody before the house is started again."""
    assert housed("up", "--json").json["not_in_force"] == []
    changed = ("up", "--set", "budget.total_usd=5", "--set", "job.slots_max=2")
    assert housed(*changed, "--json").json["not_in_force"] == ["budget.total_usd"]
    said = " ".join(housed(*changed).out.split())
    assert "budget.total_usd is 5.0 in the settings now, and not set where it runs" in said


@pytest.mark.parametrize("waits", [True, False])
def test_up_while_another_starts_leaves_that_one_alone(housed, monkeypatch, waits):
    """Whoever comes second waits until it is up, or is told so, and takes nothing along when it ends."""
    note, before = housed.places.house, processes.marked(housed.places.identity)
    text = note.read_bytes()
    note.unlink()  # it is not ready yet
    if waits:
        monkeypatch.setattr(time, "sleep", lambda _: note.write_bytes(text))
    else:
        monkeypatch.setattr(up_down, "_settled", lambda command: command.client())
    try:
        answer = housed("up")
    finally:
        note.write_bytes(text)
    if waits:
        assert (answer.code, answer.out.startswith("already up in")) == (0, True)
    else:
        assert (answer.code, "another manager already runs" in answer.line) == (1, True)
    assert processes.marked(housed.places.identity) == before


def test_up_shows_what_its_house_says_and_not_the_end_of_another(tmp_path):
    """Two begin at the same moment, and write to one log: whoever is up has nothing to do with the other's end."""
    log = tmp_path / "house.log"
    log.write_text("of an earlier life\n")
    begins_at = log.stat().st_size
    with log.open("a") as sink:
        sink.write("orchestrator: another manager already runs\n\nthe last write was torn\n")
    assert news(log, begins_at) == ["the last write was torn"]


def test_check_says_that_the_running_manager_cannot_be_asked(own_house, monkeypatch):
    """A Redis that is stopped holds every command up; later nobody has heard of the manager for long."""
    assert own_house("check").out.endswith("Next: orchestrator status\n")  # not `up` once more
    ok = {one["name"]: one["ok"] for one in own_house("check", "--json").json["checks"]}
    assert ok["manager"]
    redis_pid = next(
        pid
        for pid in processes.marked(own_house.places.identity)
        if Path(find_server()).name.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    )
    monkeypatch.setattr(redis_client, "ANSWER_S_MAX", 0.1)
    os.kill(redis_pid, signal.SIGSTOP)
    try:
        stopped = own_house("check", "--json")
    finally:
        os.kill(redis_pid, signal.SIGCONT)
    monkeypatch.setattr(watch, "OLD_S", 0.0)
    old = own_house("check", "--json")
    for answer, said in ((stopped, "its Redis does not answer"), (old, "has said nothing since")):
        (wrong,) = [one for one in answer.json["checks"] if not one["ok"]]
        assert (answer.code, wrong["name"]) == (1, "manager")
        assert wrong["found"].startswith(f"running in {own_house.places.state_dir}, but ")
        assert said in wrong["found"]
        assert "orchestrator down --force" in wrong["remedy"]


def test_an_address_that_this_machine_does_not_have_is_said_to_be_one(shell):
    """Another port would be of no use there."""
    words = ("--set", "ray.head_address=10.213.7.199")
    answer, checked = shell("up", *words), shell("check", *words)
    assert answer.code == 1
    assert answer.line.endswith("set ray.head_address to an address that this machine has")
    assert "set ray.head_address to an address that this machine has" in checked.out


def test_a_port_in_use_is_one_line_and_nothing_is_left(shell):
    """What the starting manager said last is what the person sees; all that it started is gone."""
    with socket.create_server(("127.0.40.9", 0)) as taken:
        port = taken.getsockname()[1]
        words = ("--set", "ray.head_address=127.0.40.9", "--set", f"ray.port={port}")
        answer = shell("up", *words)
        checked = shell("check", *words)
    assert answer.code == 1
    assert answer.line.startswith(f"ray.port: 127.0.40.9 port {port} cannot be used")
    assert "0 to have one chosen" in answer.line
    assert "set ray.port to a free port" in checked.out
    assert not shell.places.house.exists()
    assert processes.marked(shell.places.identity) == []


def test_a_full_disk_is_named_though_it_took_no_last_words(shell, monkeypatch):
    """The log of a manager that could write nothing is empty: what is looked at instead is the room that there is."""
    monkeypatch.setattr(up_down, "_spawn", lambda *_: (subprocess.Popen(["false"]), 0))
    monkeypatch.setattr(up_down, "no_room", lambda folder, then: f"{folder} is full, {then}")
    shell.places.make()
    shell.places.log("house").touch()
    answer = shell("up")
    assert (answer.code, "is full, then: orchestrator up" in answer.line) == (1, True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_while_it_starts_leaves_nothing(shell, number, until):
    """Real Ctrl-Cs, again and again, or a SIGTERM when Redis is up already: it and everything else is gone again, and that is said."""
    starting = shell.start("up")
    until(lambda: len(processes.marked(shell.places.identity)) > 0)
    starting.send_signal(number)
    while number == signal.SIGINT and starting.poll() is None:
        starting.send_signal(number)
        time.sleep(0.01)
    answer = shell.ended(starting)
    assert (answer.code, answer.line) == (130, "interrupted; what it had started is ended")
    assert processes.marked(shell.places.identity) == []
    assert not shell.places.house.exists()


def test_down_ends_a_house_whose_up_was_killed_while_it_started(shell, until):
    """It goes on starting by itself; it is waited for, asked, and gone."""
    starting = shell.start("up")
    until(lambda: len(processes.marked(shell.places.identity)) > 0)
    starting.kill()
    try:
        answer = shell("down", "--json")
    finally:
        shell("down")
    assert (answer.code, answer.json["was_up"], answer.json["killed"]) == (0, True, False)
    assert processes.marked(shell.places.identity) == []


def test_down_by_force_ends_a_house_that_hangs_while_it_starts(shell, until):
    """It was waited for all the same, for minutes, as no client can ask it yet."""
    starting = shell.start("up")
    until(lambda: _pids(shell, b"orchestrator.supervisor.ray_head"))
    for pid in _pids(shell, b"orchestrator.supervisor.ray_head"):
        os.kill(pid, signal.SIGSTOP)
    answer = shell("down", "--force")
    assert (answer.code, answer.out.startswith("down in")) == (0, True)
    said = shell.ended(starting)
    assert (said.code, "told to end while it was starting" in said.line) == (1, True)
    assert processes.marked(shell.places.identity) == []


def test_ctrl_c_while_all_is_given_back_says_that_it_goes_on(own_house, until):
    """What was asked is asked; a person is told, rather than left with an exit code."""
    pid = own_house.client().house().pid
    os.kill(pid, signal.SIGSTOP)
    ending = own_house.start("down")
    until(lambda: own_house.client()._redis.xlen("orch:inbox") > 0)
    assert own_house.client().is_asked_to_end()  # so that `up` waits for it
    ending.send_signal(signal.SIGINT)
    answer = own_house.ended(ending)
    os.kill(pid, signal.SIGCONT)
    assert answer.code == 130
    assert answer.line.startswith("interrupted; the manager goes on giving everything back")
    until(lambda: not alive(pid))


def test_ctrl_c_before_all_of_a_killed_manager_is_given_back_says_what_may_cost_money(shell, until):
    """Nobody holds its machines to account any more, so that the next `down` is needed."""
    shell.places.make()
    shell.places.house.write_bytes(msgspec.json.encode(dead_house()))
    ending = shell.start("down")
    until(lambda: len(processes.marked(shell.places.identity)) > 0)
    ending.send_signal(signal.SIGINT)
    answer = shell.ended(ending)
    assert answer.code == 130
    assert "machines may still cost money; give them back with: orchestrator down" in answer.line
    assert processes.marked(shell.places.identity) == []


def dead_house() -> House:
    return House(
        pid=2**22 - 1,
        redis_url="unix:///nowhere",
        dashboard_url="",
        ray_address="",
        local_cloud="",
        deployment="default",
        started_at_s=0.0,
    )


def test_down_gives_everything_back(own_house, until):
    """The job ends with a reason, the cloud sells no machine any more, the process is gone."""
    own_house.script("long.py", "x = 'wait'\n")
    job = own_house("submit", "long.py", "--json").json["id"]
    until(lambda: own_house("status", job).code == 0)  # a busy manager takes it up later
    pid = own_house.client().house().pid
    answer = own_house("down", "--json")
    assert answer.json["cancelled"] == [job]
    assert answer.json["was_up"] is True
    assert answer.json["cost"]["spent_usd"] >= 0
    until(lambda: not alive(pid))
    assert (answer.json["killed"], answer.json["processes_swept"]) == (False, 0)
    again = own_house("down", "--json")
    assert (again.code, again.json["was_up"], again.json["killed"]) == (0, False, False)


def test_a_redis_that_hangs_is_asked_once_and_named(own_house, monkeypatch):
    """It was asked twenty times more, half a minute each."""
    monkeypatch.setattr(redis_client, "ANSWER_S_MAX", 0.3)
    client, calls = own_house.client(), []
    server, send = client._redis.info()["process_id"], AbstractConnection.send_packed_command

    def sent(connection, *words, **options):
        calls.append(words)
        return send(connection, *words, **options)

    monkeypatch.setattr(AbstractConnection, "send_packed_command", sent)
    os.kill(server, signal.SIGSTOP)
    try:
        with pytest.raises(Silent, match="Redis does not answer"):
            client.view()
    finally:
        os.kill(server, signal.SIGCONT)
    assert len(calls) == 1


def test_up_behind_a_down_waits_for_its_end_and_starts_again(own_house, until, monkeypatch):
    """It said that all was up, and a moment later nothing was. What is asked of the ending one is refused in words."""
    own_house.script("long.py", "x = 'wait'\n")
    job = own_house("submit", "long.py", "--json").json["id"]
    until(lambda: _held(own_house, "ready"))
    (cloud,) = _pids(own_house, b"cloud.local")
    os.kill(cloud, signal.SIGSTOP)  # so that nothing is given back
    ending = own_house.start("down", "--json")
    until(lambda: own_house.client().view().ending)
    assert "the manager gives everything back, and ends then" in own_house("status").out
    monkeypatch.setattr(jobs, "TAKEN_S_MAX", 2.0)
    resumed = own_house("resume", job)
    assert (resumed.code, resumed.line) == (1, f"{job}: not resumed: the manager is shutting down")
    look, started = up_down._is_ending, []

    def looked(client):
        found = look(client)
        os.kill(cloud, signal.SIGCONT)
        return found

    monkeypatch.setattr(up_down, "_is_ending", looked)
    note = own_house.places.house
    monkeypatch.setattr(up_down, "_start", lambda *_: started.append(note.exists()) or dead_house())
    answer = own_house("up")
    assert (answer.code, started) == (0, [False])
    assert answer.out.startswith("the manager gives everything back, and ends then; it is started")
    assert own_house.ended(ending).code == 0


def _pids(house, module):
    """Processes of a house that run this module."""
    return [
        pid
        for pid in processes.marked(house.places.identity)
        if module in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    ]


def test_down_by_several_at_once_is_done_for_all_of_them(own_house):
    """Who comes second waits for what the first sweeps up, and does not take it for another manager."""
    answers = [
        own_house.ended(each) for each in [own_house.start("down", "--json") for _ in range(4)]
    ]
    assert [answer.code for answer in answers] == [0] * 4, answers
    assert processes.marked(own_house.places.identity) == []


def test_a_drill_takes_machines_of_the_local_cloud(housed, until):
    """Without notice they are gone; the event says so; what is bought next replaces them."""
    housed.script("long.py", "x = 'wait'\n")
    job = housed("submit", "long.py", "--json").json["id"]
    until(lambda: _held(housed, "ready"))
    taken = housed("tools", "drill", "--warning", "0", "--nodes", "all", "--json").json
    assert taken["warning_s"] == 0
    assert taken["machines"]
    until(lambda: set(taken["machines"]) <= set(_held(housed, "ended")))
    housed("cancel", job)
    until(lambda: not _on_the_way(housed))
    none = housed("tools", "drill", "--nodes", "1")
    assert (none.code, none.line) == (
        1,
        "no spot machine is running, so none was taken; see: orchestrator status",
    )


def _on_the_way(house):
    every = house("status", "--json").json["machines"]
    return [one["id"] for one in every if one["state"] != "ended"]


def _held(house, state):
    return [
        one["id"] for one in house("status", "--json").json["machines"] if one["state"] == state
    ]


def test_a_drill_of_a_local_cloud_that_is_off_says_so(housed):
    """A house without one is told so, with what takes machines of a real cloud."""
    note = housed.places.house
    before = note.read_bytes()
    note.write_bytes(before.replace(str(housed.places.cloud_dir).encode(), b""))
    try:
        assert "the local cloud is off" in housed("tools", "drill").line
    finally:
        note.write_bytes(before)


def test_gc_ends_a_machine_that_no_lease_claims(housed):
    """Bought behind the manager's back, which is stopped: listed by a dry run, ended by the other."""
    house = housed.client().house()
    os.kill(house.pid, signal.SIGSTOP)
    try:
        machine = _buy_behind_its_back(housed)
        late = ("--set", "limits.launch_grace_s=0.01", "--json")
        assert _left(housed("tools", "gc", "--dry-run", *late)) == [("machine", machine)]
        assert _left(housed("tools", "gc", *late)) == [("machine", machine)]
        assert _left(housed("tools", "gc", "--dry-run", *late)) == []
    finally:
        os.kill(house.pid, signal.SIGCONT)


def _left(answer):
    """What was found, but for links, which other houses of this machine may have left."""
    found = answer.json["leftovers"]
    return [(one["kind"], one["id"]) for one in found if one["kind"] != "link"]


def _buy_behind_its_back(house) -> str:
    import asyncio

    from cloud.model import DEPLOYMENT_TAG, LaunchRequest
    from orchestrator.client import local_cloud

    async def buy():
        async with local_cloud(house.client().house()) as cloud:
            (place, *_) = await cloud.places()
            pools = (await cloud.sold(place)).pools
            request = LaunchRequest(
                token="nobody",
                pool=pools[0],
                market="on_demand",
                bid_usd_per_h=None,
                tags={DEPLOYMENT_TAG: "default"},
            )
            return (await cloud.launch(request))[0].id

    return asyncio.run(buy())


def test_gc_never_touches_what_a_living_manager_uses(housed):
    """Its processes, folders and machines are claimed; there is nothing to list."""
    assert _left(housed("tools", "gc", "--dry-run", "--json")) == []


@pytest.mark.parametrize("there", [True, False])
def test_down_ends_what_a_dead_manager_left(shell, there):
    """Also where its directory was removed; it says what it did, and not that it should be typed."""
    if there:
        shell.places.make()
    env = {**os.environ, processes.MARK: shell.places.identity}
    with subprocess.Popen(["sleep", "600"], env=env) as left:
        try:
            said = shell("status").line
            assert "1 process of its manager still runs: end it with: orchestrator down" in said
            with subprocess.Popen(["sleep", "600"], env=env) as second:
                assert "2 processes of its manager still run: end them" in shell("status").line
                second.kill()
            answer = shell("down")
            assert left.wait(10) < 0
        finally:
            left.kill()
    assert answer.code == 0
    assert "1 process of an ended manager was left and is swept up" in answer.out
    assert "orchestrator down" not in answer.out


def test_gc_ends_what_a_dead_manager_left(shell, until):
    """Its processes by their mark, and the folders that only a running one needs."""
    places = shell.places
    places.make()
    (places.state_dir / "run" / "old.sock").touch()
    env = {**os.environ, processes.MARK: places.identity}
    left = subprocess.Popen(["sleep", "600"], env=env)
    other = subprocess.Popen(["sleep", "600"], env={**os.environ, processes.MARK: "another"})
    try:
        assert "orchestrator tools gc" in shell("check").out
        listed = {
            (one["kind"], one["id"])
            for one in shell("tools", "gc", "--dry-run", "--json").json["leftovers"]
        }
        assert ("process", str(left.pid)) in listed
        assert left.poll() is None
        ended = {
            one["id"].rpartition("/")[2] for one in shell("tools", "gc", "--json").json["leftovers"]
        }
        assert "old.sock" in ended
        until(lambda: left.poll() is not None)
        assert other.poll() is None
        assert _left(shell("tools", "gc", "--dry-run", "--json")) == []
    finally:
        for process in (left, other):
            process.kill()
            process.wait()


@pytest.mark.parametrize("name", ["a[/b]", "[bold]x", "a[/]"])
def test_leftovers_in_a_folder_with_a_name_like_markup_are_listed(shell, tmp_path, name):
    """The name is shown as it is."""
    shell = type(shell)(tmp_path.joinpath(name))
    shell.folder.mkdir(parents=True)
    shell.places.make()
    (shell.places.state_dir / "run" / "old").mkdir()
    try:
        answer = shell("tools", "gc", "--dry-run")
        assert (answer.code, answer.err) == (0, "")
        assert name in answer.out.replace("\n", "")
    finally:
        shell.close()


@pytest.fixture
def link(tmp_path):
    """Makes links where our short ways are, as other houses would."""
    made = []

    def make(name, to="gone"):
        made.append(SHORT / name)
        made[-1].symlink_to(tmp_path / to)
        os.utime(made[-1], (0, 0), follow_symlinks=False)  # nobody has needed it for long
        return made[-1]

    yield make
    for path in made:
        path.unlink(missing_ok=True)


def test_a_house_that_starts_clears_up_after_killed_ones(shell, link):
    """Short ways to nowhere are gone, and of Ray's old logs only the newest stay; nothing else is touched."""
    gone, mine = link(f"spot-{secrets.token_hex(6)}"), link(f"mine-{secrets.token_hex(6)}")
    shell.places.make()
    for day in range(10, 16):
        (shell.places.state_dir / "run" / "ray" / f"session_2026-01-{day}").mkdir(parents=True)
    with socket.create_server(("127.0.40.9", 0)) as taken:
        port = taken.getsockname()[1]
        words = ("--set", "ray.head_address=127.0.40.9", "--set", f"ray.port={port}")
        assert shell("up", *words).code == 1
    sessions = (shell.places.state_dir / "run" / "ray").iterdir()
    assert sorted(path.name[-2:] for path in sessions) == ["13", "14", "15"]
    assert not gone.is_symlink()
    assert mine.is_symlink()


def test_gc_removes_short_ways_to_nowhere(shell, link):
    """Links of ours whose state directory is gone; others are left alone."""
    gone, lives = link(f"spot-{secrets.token_hex(6)}"), link(f"spot-{secrets.token_hex(6)}", ".")
    others = link(f"spot-light-{secrets.token_hex(4)}"), link(f"mine-{secrets.token_hex(6)}")
    found = shell("tools", "gc", "--json").json["leftovers"]
    assert str(gone) in [one["id"] for one in found]
    assert not gone.is_symlink()
    assert all(path.is_symlink() for path in (lives, *others))


@pytest.mark.parametrize(
    ("program", "heavy"),
    [
        (
            "from orchestrator.cli import main; main(['status'])",
            {"numba", "scipy", "numpy"},
        ),
        ("import orchestrator.supervisor.ray_head", {"numba", "scipy", "ray"}),
        ("import orchestrator.door.__main__", {"numba", "scipy", "httpx"}),
        (
            "import orchestrator.live.manager, orchestrator.supervisor.supervisor",
            {"scipy.optimize", "torch"},
        ),
    ],
)
def test_a_program_imports_nothing_large_that_it_does_not_use(tmp_path, program, heavy):
    """It takes longer than all else that a short command, or the house's start, has to import."""
    asked = f"import sys; {program}; print({heavy} & set(sys.modules))"
    ran = subprocess.run(
        [sys.executable, "-c", asked], cwd=tmp_path, capture_output=True, text=True
    )
    assert ran.stdout == "set()\n", ran.stderr


def test_down_says_which_jobs_it_cancels_and_how_they_go_on(own_house):
    """Not those that were cancelled before; at whatever step they were, and of how many if that is known by then."""
    own_house.script("long.py", "x = 'wait'\n")
    before, job = (own_house("submit", "long.py", "--json").json["id"] for _ in range(2))
    own_house("cancel", before)
    text = own_house("down").out
    assert re.search(rf"^cancelled {job} at step 0( of 8)?$", text, re.MULTILINE)
    assert f"orchestrator up\n      orchestrator resume {job}\n" in text
    assert before not in text
