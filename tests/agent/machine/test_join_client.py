"""The join client alone: what it imports, and how it ends where no door lets it in."""

import argparse
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from explain import lives

from agent.boot.node import BECOME_WORKER, CLUSTER_VARIABLE, versions
from agent.machine.join import __main__ as client_module
from agent.machine.join.door import Door, NoAnswer
from agent.machine.join.node import TOKEN, Node

CLIENT = [sys.executable, "-P", "-m", "agent.machine.join", "--deployment", "ours"]
PATIENCE_S = 60.0
BEHIND = f"/session/{versions()}"  # a cluster's name
LOADED = """
import sys
import agent.machine.join.__main__
print([name for name, module in sys.modules.items() if "site-packages" in (getattr(module, "__file__", "") or "")
       and not name.startswith(("_", "sitecustomize"))])
"""


def client(port: int, silent_after_s: float) -> "subprocess.Popen[str]":
    door = ["--door", f"127.0.0.1:{port}", "--fingerprint", "ab" * 32, "--cloud", "local"]
    words = [*CLIENT, *door, "--silent-after-s", str(silent_after_s)]
    return subprocess.Popen(words, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def nobody() -> int:
    """A port at which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        return closed.getsockname()[1]


def test_it_imports_the_standard_library_only():
    """Every machine starts it and keeps it for life, so it costs a tenth of a second and 23 MB."""
    ran = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, timeout=60)
    assert ran.stdout.strip() == "[]", ran.stderr


def test_a_process_of_rays_begins_without_the_script_that_imports_it_first(tmp_path: Path):
    """It gets the words that it knows, and keeps its number, by which its node knows it."""
    script = tmp_path / "worker_of_ray.py"
    script.write_text("import os, sys; print(os.getpid(), *sys.argv[1:])")
    words = [str(script), "--language=PYTHON", "--node-id=1", "--serialized-runtime-env-context={}"]
    with subprocess.Popen(
        [sys.executable, str(BECOME_WORKER), *words], stdout=subprocess.PIPE, text=True
    ) as process:
        said = process.communicate(timeout=60)[0]
    assert said == f"{process.pid} --node-id=1\n"


def test_a_machine_that_no_door_lets_in_ends(nobody: int):
    """After the same time as one that hears no word; its console says what it asked in vain."""
    began_s = time.monotonic()
    machine = client(nobody, 0.5)
    _, said = machine.communicate(timeout=PATIENCE_S)
    assert machine.returncode == 75
    assert time.monotonic() - began_s >= 0.5
    assert "not in yet: GET /nonce: [Errno 111]" in said
    assert "no door let this machine in for 0.5 s" in said
    assert said.count("not in yet") == 1


def test_a_machine_that_is_switched_off_stops_asking(nobody: int):
    """SIGTERM ends it while it waits, as the power button does."""
    machine = client(nobody, 600.0)
    assert "not in yet" in machine.stderr.readline()
    machine.send_signal(signal.SIGTERM)
    machine.communicate(timeout=PATIENCE_S)
    assert machine.returncode == 143


def test_a_door_that_accepts_and_says_nothing_holds_nobody_up():
    """Each answer has its time-out, and all of them together are bounded."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        machine = client(silent.getsockname()[1], 1.0)
        _, said = machine.communicate(timeout=PATIENCE_S)
    assert machine.returncode == 75
    assert "timed out" in said


class Listening(Door):
    """A door that hears what a machine says."""

    heard: dict[str, object]
    cluster = "id/session/Ray 2.0 on Python 3.99"

    def call(self, method: str, path: str, body: object, patience_s: float) -> object:
        assert isinstance(body, dict)
        self.heard = body
        return {"silent_s": 0.0, "cluster": self.cluster}


def test_a_machine_of_another_version_says_so_at_the_door(
    nobody: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Its console, where it said so before, is read by nobody, and the next one would be bought."""
    found = f"exec {sys.executable} -P -m agent.boot.node"
    node = a_node(tmp_path, monkeypatch, found, theirs="Ray 2.0 on Python 3.99")
    door = Listening(f"127.0.0.1:{nobody}", "ab" * 32)
    with pytest.raises(client_module.Over) as over:
        client_module.Machine(argparse.Namespace(silent_after_s=60.0), door).live(node)
    assert over.value.args == (65,)
    assert door.heard["phase"] == "unlike"
    assert f"this machine has {versions()} and the manager Ray 2.0" in str(door.heard["why"])
    assert node.status() == 65
    node.kill()


class Counted(Door):
    """A door that nobody answers at, and how often it was tried."""

    calls = 0

    def call(self, *words: object) -> object:
        self.calls += 1
        return super().call(*words)


def test_a_node_that_is_up_does_not_hurry_a_silent_door(
    nobody: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Its phase waits for the next regular word, however often the node is looked at."""
    monkeypatch.setattr(client_module, "LOOK_S", 0.005)
    monkeypatch.setattr(client_module, "LEAVE_S", 0.0)
    node = a_node(tmp_path, monkeypatch)
    monkeypatch.setattr(node, "is_up", lambda: True)
    door = Counted(f"127.0.0.1:{nobody}", "ab" * 32)
    with pytest.raises(client_module.Over):
        client_module.Machine(argparse.Namespace(silent_after_s=1.0), door).live(node)
    node.kill()
    assert 1 <= door.calls <= 12


def test_the_orphans_of_a_dead_node_are_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its number stays its own until then, so that no other process gets the signal."""
    node = a_node(tmp_path, monkeypatch, 'sh -c "sleep 600 & echo \\$! > orphan"; exit 3')
    node.start()
    deadline_s = time.monotonic() + PATIENCE_S
    while (status := node.status()) is None and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert status == node.status() == 3
    orphan = int((tmp_path / "orphan").read_text())
    node.kill()
    assert node.status() is None
    while lives(orphan) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert not lives(orphan)


class Words(Door):
    """A door that lets in at once, and says one of these clusters after the other; None: no word.

    Until the file is there that a first node writes, the cluster is the one that was handed out.
    """

    def __init__(self, written: Path, *clusters: str | None) -> None:
        super().__init__("127.0.0.1:1", "ab" * 32)
        self.written, self.clusters, self.handed_out, self.let_in = written, [*clusters], "one", 0

    def call(self, _: str, path: str, *__: object) -> object:
        if path == "/nonce":
            return {"nonce": "0123456789"}
        if path == "/join":
            self.let_in += 1
            return {"machine_id": "i-1", "environment": handed_out(f"{self.handed_out}{BEHIND}")}
        if not self.written.exists():
            return {"silent_s": 0.0, "cluster": f"{self.handed_out}{BEHIND}"}
        said = self.clusters.pop(0) if len(self.clusters) > 1 else self.clusters[0]
        if said is None:
            raise NoAnswer("nobody listens")
        self.handed_out = said or self.handed_out
        return {"silent_s": 0.0, "cluster": said and f"{said}{BEHIND}"}


def stays(
    folder: Path, monkeypatch: pytest.MonkeyPatch, door: Words, script: str, silent_after_s: float
) -> tuple[int, list[str]]:
    """How a machine ended whose node is this script, and the lines that its nodes have written."""
    a_node(folder, monkeypatch, f'echo "$SPOT_CLUSTER" >> nodes\n{script}')
    monkeypatch.setattr(client_module, "proof_of", lambda *_: {})
    options = argparse.Namespace(silent_after_s=silent_after_s, cloud="local", deployment="ours")
    with pytest.raises(client_module.Over) as over:
        client_module.Machine(options, door).stay()
    nodes = (folder / "nodes").read_text().replace(BEHIND, "").split()
    return over.value.args[0], nodes


SECOND_ENDS = 'if [ "$(wc -l < nodes)" = 2 ]; then exit 3; fi\n'


@pytest.mark.parametrize(
    "clusters", [("two",), ("", "", "two"), (None, None, "", "two")], ids=["up", "starts", "away"]
)
def test_a_machine_whose_head_was_started_again_joins_the_next_one(
    clusters: tuple[str | None, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Its node ends, as one of a cluster that is gone. It waits for the next head, and costs nobody a machine."""
    door = Words(tmp_path / "nodes", *clusters)
    ended = stays(tmp_path, monkeypatch, door, SECOND_ENDS + "kill -ABRT $$", 60.0)
    assert (ended, door.let_in) == ((3, ["one", "two"]), 2)


def test_a_node_that_hangs_gives_way_to_one_of_the_next_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A regular word says so; and nothing of the node before is left."""
    door = Words(tmp_path / "hung", "two")
    ended = stays(tmp_path, monkeypatch, door, SECOND_ENDS + "echo $$ > hung; exec sleep 600", 2.0)
    assert ended == (3, ["one", "two"])
    assert not lives(int((tmp_path / "hung").read_text()))


def test_a_node_that_ends_in_a_cluster_that_lives_ends_its_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """With its own status: the machine is at fault, and another one is bought."""
    door = Words(tmp_path / "nodes", "one")
    assert stays(tmp_path, monkeypatch, door, "exit 9", 60.0) == (9, ["one"])


def test_a_machine_whose_node_has_ended_and_whose_manager_is_gone_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """After the same time as one whose node runs."""
    assert stays(tmp_path, monkeypatch, Words(tmp_path / "nodes", None), "exit 9", 0.5) == (
        75,
        ["one"],
    )


def handed_out(cluster: str) -> dict[str, str]:
    needed = {"SPOT_HEAD": "127.0.0.1:1", "SPOT_ADDRESS": "127.0.0.1", TOKEN: "token"}
    return {CLUSTER_VARIABLE: cluster, **needed}


def a_node(
    folder: Path, monkeypatch: pytest.MonkeyPatch, script: str = "exec sleep 600", theirs: str = ""
) -> Node:
    """A node whose process is a shell with this script; `theirs` are the versions of the manager."""
    shell = folder / "python"
    shell.write_text(f"#!/bin/sh\ncd {folder}\n{script}\n")
    shell.chmod(0o700)
    monkeypatch.setenv("SPOT_TEMP_DIR", str(folder))
    node = Node(handed_out(f"id/session/{theirs or versions()}"), "i-1", "127.0.0.1")
    monkeypatch.setattr(sys, "executable", str(shell))
    return node
