"""The join client alone: what it imports, and how it ends where no door lets it in."""

import signal
import socket
import subprocess
import sys
import time

import pytest

CLIENT = [sys.executable, "-P", "-m", "agent.machine.join", "--deployment", "ours"]
PATIENCE_S = 60.0
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
