"""The scripts of the images are run, as far as they can be without the images."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from running_cloud import until

from agent.boot.node import refusal, versions
from agent.keeper.storage.memory_log import root_of

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docker"
SCRIPTS = [*sorted(FOLDER.glob("*.sh")), ROOT / "cloud" / "boot.sh"]
PYTHON = Path(sys.executable).parent
PATH = f"{PYTHON}:{os.environ['PATH']}"


def run(*words: object, **environment: str) -> "subprocess.CompletedProcess[str]":
    env = {"PATH": PATH, **environment}
    return subprocess.run(
        [str(word) for word in words], env=env, capture_output=True, text=True, timeout=100
    )


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_is_understood_by_a_plain_shell(script):
    """`sh -n` reads it without a complaint."""
    checked = run("sh", "-n", script)
    assert (checked.returncode, checked.stderr) == (0, "")


def test_requirements_are_those_of_the_project():
    """All of them, pinned, and for the manager all but torch."""
    everything = run(sys.executable, FOLDER / "requirements.py", ROOT / "pyproject.toml").stdout
    some = run(
        sys.executable, FOLDER / "requirements.py", ROOT / "pyproject.toml", "--without", "torch"
    ).stdout
    gone = set(everything.splitlines()) - set(some.splitlines())
    assert [line.split("==")[0] for line in gone] == ["torch"]
    buys = (
        code_of(FOLDER / "manager.Dockerfile").partition("python requirements.py")[2].split(">")[0]
    )
    words = (FOLDER / "requirements.py", ROOT / buys.split()[0], *buys.split()[1:])
    manager = run(sys.executable, *words).stdout
    more = {line.split("==")[0] for line in set(manager.splitlines()) - set(some.splitlines())}
    assert more == {"boto3", "azure-identity", "azure-mgmt-compute"}
    assert all(re.fullmatch(r"[\w.\[\]-]+==[\w.]+", line) for line in everything.splitlines())
    readme = (FOLDER / "README.md").read_text()
    assert "python docker/requirements.py pyproject.toml > requirements.txt" in readme


def test_a_requirement_that_is_none_is_refused():
    """A misspelt name would quietly make a large image."""
    words = (FOLDER / "requirements.py", ROOT / "pyproject.toml", "--without", "troch")
    refused = run(sys.executable, *words)
    assert refused.returncode == 1
    assert "does not depend on troch" in refused.stderr


def test_an_instance_without_a_door_says_so():
    """What is missing, and the exit code of wrong use."""
    refused = run("sh", "-c", code_of(FOLDER / "instance.sh"))
    assert refused.returncode == 2
    assert "--door" in refused.stderr


def code_of(script: Path) -> str:
    """The script, with the Python that has the project here."""
    return script.read_text().replace("/opt/spot/bin/python", sys.executable)


KNOWN = {
    "SPOT_MACHINE_ID": "i-1",
    "SPOT_HEAD": "127.0.40.1:1",
    "SPOT_CLUSTER": f"0a/session/{versions()}",
    "SPOT_ADDRESS": "127.0.0.1",
    "SPOT_SLOTS": "1",
    "RAY_AUTH_TOKEN_PATH": "/no/token",
}


def test_a_first_boot_without_a_setting_names_it():
    """One that has all, but another Ray than its manager, names both; `refusal` is what the script runs."""
    assert refusal(KNOWN) == (0, "")
    for missing in KNOWN:
        status, why = refusal({name: value for name, value in KNOWN.items() if name != missing})
        assert (status, why.partition(" is not set")[0]) == (64, missing)
    status, why = refusal({**KNOWN, "SPOT_CLUSTER": "0a/session/Ray 1.0 on Python 3.8"})
    assert (status, why.count(versions()), why.count("Ray 1.0 on Python 3.8")) == (65, 1, 1)
    status, why = refusal({**KNOWN, "SPOT_IDLE_CARDS": "1"})
    assert (status, "no driver serves the NVIDIA cards of this machine (1)" in why) == (65, True)
    refused = run("sh", ROOT / "cloud" / "boot.sh")
    assert refused.returncode == 64
    assert refused.stderr.startswith("boot: SPOT_MACHINE_ID is not set; ")


@pytest.mark.processes
@pytest.mark.timeout(240)
def test_the_manager_runs_in_the_folder_it_is_started_in(tmp_path):
    """Settings are written if there are none, the house comes up, and SIGTERM ends all of it."""
    log = tmp_path / "log"
    environment = {
        "PATH": PATH,
        "HOME": str(tmp_path),
        "SPOT_ADDRESS": "127.0.40.1",
    }
    with log.open("ab") as console:
        house = subprocess.Popen(
            ["sh", str(FOLDER / "manager.sh")],
            cwd=tmp_path,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        ready = tmp_path / ".orchestrator" / "house.json"
        until("the house to be up", lambda: ready.exists() or house.poll() is not None, 120)
        assert house.poll() is None, log.read_text()
        assert (tmp_path / "orchestrator.toml").exists()
        assert "127.0.40.1" in ready.read_text()
    finally:
        house.send_signal(signal.SIGTERM)
        house.wait(60)
        shutil.rmtree(root_of(tmp_path / ".orchestrator" / "checkpoints"), ignore_errors=True)
    assert not ready.exists()
