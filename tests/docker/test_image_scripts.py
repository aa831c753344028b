"""The scripts of the images are run, as far as they can be without the images."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ray_head import RayHead
from running_cloud import POOLS, RunningCloud, request, until

from agent.boot.node import refusal, versions
from agent.keeper.storage.memory_log import root_of
from cloud.model import Machine

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


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[Callable[[str], RunningCloud]]:
    """A local cloud whose machines boot with this script."""
    clouds: list[RunningCloud] = []

    def make(boot: str = "#!/bin/sh\nexec sleep 600\n") -> RunningCloud:
        clouds.append(RunningCloud(tmp_path / "cloud", boot))
        return clouds[-1]

    yield make
    for running in clouds:
        running.stop()


def buy(running: RunningCloud, dialect: str) -> Machine:
    async def bought() -> Machine:
        provider = running.provider()
        (machine,) = await provider.launch(request("t-1", POOLS[dialect]))
        await provider.close()
        return machine

    return asyncio.run(bought())


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_is_understood_by_a_plain_shell(script: Path):
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
    assert all("==" in line for line in everything.splitlines())


def test_a_requirement_that_is_none_is_refused():
    """A misspelt name would quietly make a large image."""
    words = (FOLDER / "requirements.py", ROOT / "pyproject.toml", "--without", "troch")
    refused = run(sys.executable, *words)
    assert refused.returncode == 1
    assert "does not depend on troch" in refused.stderr


@pytest.mark.processes
@pytest.mark.parametrize("dialect", ["ec2", "azure"])
def test_a_machine_learns_its_name(cloud: Callable[[], RunningCloud], dialect: str):
    """From the metadata service of either cloud, as the provider calls it."""
    running = cloud().start()
    machine = buy(running, dialect)
    url = running.metadata_url(machine)
    told = run(sys.executable, FOLDER / "identity.py", "machine", SPOT_METADATA_URL=url)
    assert (told.stdout, told.stderr) == (f"{machine.id}\n", "")


def test_a_machine_learns_its_address():
    """The one from which it reaches the head; a head that is none is one line."""
    told = run(sys.executable, FOLDER / "identity.py", "address", "127.0.40.1:6379")
    assert told.stdout.startswith("127.")
    for wrong in ("nowhere", "127.0.0.1:port"):
        refused = run(sys.executable, FOLDER / "identity.py", "address", wrong)
        assert refused.returncode == 1
        assert refused.stderr.startswith("identity: ")
        assert refused.stderr.count("\n") == 1


def test_an_instance_without_a_head_says_so():
    """What is missing and who has to give it, and the exit code of wrong use."""
    refused = run("sh", FOLDER / "instance.sh")
    assert refused.returncode == 64
    assert "SPOT_HEAD is not set" in refused.stderr


def test_an_instance_that_cannot_tell_who_it_is_does_not_join():
    """A failed question ends the script; nothing is started under an empty name."""
    refused = run("sh", FOLDER / "instance.sh", SPOT_HEAD="127.0.40.1:1", SPOT_IDENTITY="/no/file")
    assert refused.returncode not in (0, 64)
    assert "ray" not in refused.stdout.lower()


KNOWN = {
    "SPOT_MACHINE_ID": "i-1",
    "SPOT_HEAD": "127.0.40.1:1",
    "SPOT_CLUSTER": f"0a/session/{versions()}",
    "SPOT_ADDRESS": "127.0.0.1",
    "SPOT_SLOTS": "1",
    "RAY_AUTH_TOKEN": "0" * 32,
}


def test_a_first_boot_without_a_setting_names_it():
    """One that has all, but another Ray than its manager, names both; `refusal` is what the script runs."""
    assert refusal(KNOWN) == (0, "")
    for missing in KNOWN:
        status, why = refusal({name: value for name, value in KNOWN.items() if name != missing})
        assert (status, why.partition(" is not set")[0]) == (64, missing)
    status, why = refusal({**KNOWN, "SPOT_CLUSTER": "0a/session/Ray 1.0 on Python 3.8"})
    assert (status, why.count(versions()), why.count("Ray 1.0 on Python 3.8")) == (65, 1, 1)
    refused = run("sh", ROOT / "cloud" / "boot.sh")
    assert refused.returncode == 64
    assert refused.stderr.startswith("boot: SPOT_MACHINE_ID is not set; ")


@pytest.mark.processes
@pytest.mark.timeout(240)
def test_an_instance_joins_a_real_head(cloud: Callable[[str], RunningCloud], tmp_path: Path):
    """Told only where the head is, it finds out the rest and becomes a node under its own name."""
    forgetful = (
        "#!/bin/sh\nexec env -u SPOT_MACHINE_ID -u SPOT_ADDRESS -u SPOT_SLOTS "
        f"SPOT_IDENTITY={FOLDER}/identity.py {FOLDER}/instance.sh\n"
    )
    with tempfile.TemporaryDirectory(prefix="rh-", ignore_cleanup_errors=True) as folder:
        directory = Path(folder) / "r"
        directory.mkdir()
        head = RayHead(directory)
        try:
            head.start()
            boot_env = tmp_path / "env"
            boot_env.write_text(head.boot_environment())
            boot_env.chmod(0o600)
            running = cloud(forgetful).start("--boot-env", str(boot_env))
            machine = buy(running, "azure")
            console = running.directory / "machines" / machine.id / "console.log"
            assert head.sees(machine.id, "alive"), console.read_text()
            running.stop()
        finally:
            head.stop()


@pytest.mark.processes
@pytest.mark.timeout(240)
def test_the_manager_runs_in_the_folder_it_is_started_in(tmp_path: Path):
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
