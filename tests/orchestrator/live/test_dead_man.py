"""A machine becomes a node of a real Ray cluster, and without a manager it ends its own bill, on every cloud."""

import asyncio
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cloudfake.account.running import running
from cloudfake.arm import SUBSCRIPTION
from door_scene import Scene
from ray_head import RayHead
from running_cloud import POOLS, RunningCloud, alive_on, request, until

from agent.keys import INBOX
from agent.machine.join.dead_man import ANSWER_S_MAX, LastWord
from cloud import private
from cloud.aws.identity import AwsIdentity
from cloud.azure.identity import AzureIdentity
from cloud.first_boot import user_data
from cloud.identity.signed_message import read_certificates
from cloud.local.identity import LocalIdentity
from cloud.local.processes import MARKER
from cloud.model import Machine, Pool
from cloud.provider import Provider, all_machines
from orchestrator.clouds import providers
from orchestrator.config import load
from orchestrator.door.guests import Guest

BOOT = Path(__file__).parents[3] / "cloud" / "boot.sh"
SILENT_S = 15.0  # longer than a busy computer lets a machine or its door wait
END_S_MAX = 120.0
BOUGHT_IN = {
    "local": POOLS["azure"],
    "aws": Pool("aws", "us-east-1", "us-east-1a", "g5.xlarge"),
    "azure": Pool("azure", "eastus", "eastus-1", "Standard_NC4as_T4_v3"),
}


def test_only_the_managers_own_life_is_a_word():
    """The age of its last sign counts, not the moment of the answer; nothing goes back in time."""
    word = LastWord(600.0, 0.0)
    assert word.left_s(100.0) == 500.0
    word.hear(20.0, 100.0)
    assert word.left_s(100.0) == 580.0
    word.hear(90.0, 110.0)
    word.hear(1e9, 120.0)
    assert word.left_s(120.0) == 560.0
    word.hear(-50.0, 130.0)
    assert word.left_s(130.0) == 600.0
    assert word.left_s(731.0) < 0


def test_a_manager_that_restarts_in_time_costs_nobody_anything():
    """Several words have to fail, and no time-out is late for the end."""
    word = LastWord(60.0, 0.0)
    for asked in range(1, 9):  # the manager is away for eight words out of ten
        word.hear(asked * word.every_s, asked * word.every_s)
        assert word.left_s(asked * word.every_s) > 0
    word.hear(0.1, 9 * word.every_s)
    assert word.left_s(9 * word.every_s) == pytest.approx(59.9)
    assert word.patience_s(0.0) == ANSWER_S_MAX
    assert word.patience_s(9 * word.every_s + 59.0) <= 1.0


class Account:
    """One cloud with the machines of one deployment, as its provider and its books show them."""

    def __init__(
        self, provider: Callable[[], Provider], bill: Callable[[], Any], folder: Path
    ) -> None:
        self._provider, self.ended_s, self.folder = provider, bill, folder

    def buy(self, pool: Pool) -> Machine:
        async def bought() -> Machine:
            provider = self._provider()
            try:
                await provider.places()
                await provider.sold(pool.place)
                (machine,) = await provider.launch(request("t-1", pool))
                return machine
            finally:
                await provider.close()

        return asyncio.run(bought())

    def console(self, machine: Machine) -> str:
        return (self.disk(machine) / "console.log").read_text()

    def disk(self, machine: Machine) -> Path:
        return self.folder / "machines" / machine.id


@contextmanager
def local_account(
    folder: Path, boot: Callable[[], str], told: str = f"SPOT_PYTHON={sys.executable}\n"
) -> Iterator[Account]:
    image = folder.parent / "image.env"
    image.write_text(told)
    image.chmod(0o600)
    cloud = RunningCloud(folder, boot()).start("--boot-env", str(image))

    def ended_s() -> float | None:
        async def listed() -> float | None:
            provider = cloud.provider()
            (machine,) = await all_machines(provider)
            await provider.close()
            return machine.ended_at_s

        return asyncio.run(listed())

    try:
        yield Account(cloud.provider, ended_s, folder)
    finally:
        cloud.stop()


@contextmanager
def rented_account(cloud: str, folder: Path, boot: Callable[[], str]) -> Iterator[Account]:
    with (
        running(cloud, folder, "--startup-s", "0.3", "--owner", "ours") as account,
        ExitStack() as env,
    ):
        for name, value in account.environment().items():
            env.callback(os.environ.pop, name, None)
            os.environ[name] = value
        settings = folder.parent / f"{cloud}.toml"
        settings.write_text(
            '[manager]\ndeployment = "ours"\n[local]\nenabled = false\n' + account.settings()
        )
        config = load(settings, {})

        def provider() -> Provider:
            (found,) = providers(config, folder, lambda _: boot()).values()
            return found

        def ended_s() -> float | None:
            (line,) = account.books()["lines"]
            return line["ended_s"]

        yield Account(provider, ended_s, folder)
        until("disk and interface to go with it", lambda: not account.books()["left"], END_S_MAX)


class Manager:
    """The part of a manager that machines hear of: it says whom it expects, as long as it lives."""

    def __init__(self, scene: Scene, guest: Guest) -> None:
        self._scene, self._guest = scene, guest
        self._over = threading.Event()
        self.last_s = 0.0
        self._thread = threading.Thread(target=self._live)
        self._thread.start()

    def _live(self) -> None:
        while not self._over.is_set():
            self.last_s = time.time()
            self._scene.expect(self._guest)
            self._over.wait(0.2)

    def die(self) -> None:
        self._over.set()
        self._thread.join()


@pytest.fixture(scope="module")
def head() -> Iterator[RayHead]:
    """In a short directory: the path of a Unix socket has at most 107 characters."""
    with tempfile.TemporaryDirectory(prefix="rh-", ignore_cleanup_errors=True) as folder:
        directory = Path(folder) / "r"
        directory.mkdir()
        head = RayHead(directory)
        try:
            yield head.start()
        finally:
            head.stop()


@pytest.mark.processes
@pytest.mark.timeout(590)
def test_a_machine_whose_manager_is_gone_ends_its_own_bill(head, server, tmp_path):
    """On all three clouds it joins and becomes a node; then its raylet hangs, and nobody speaks.

    On EC2 only the manager is dead, on the others the whole house is.
    """
    for cloud in BOUGHT_IN:
        folder = tmp_path / cloud
        (folder / "door").mkdir(parents=True)
        private.write(folder / "door" / "boot.token", head.handed_out().encode())
        with ExitStack() as stack:
            machine_id = left_alone(cloud, folder, Scene(folder / "door", server.url), head, stack)
            assert head.sees(machine_id, "gone")


@pytest.mark.processes
def test_a_machine_with_a_wrong_token_does_not_join(head, tmp_path):
    """Ray refuses its raylet; the script ends, and the machine with it, instead of costing money."""
    told = head.boot_environment(tmp_path / "ray.token", "0" * 32)
    with local_account(tmp_path / "account", BOOT.read_text, told) as account:
        machine = account.buy(BOUGHT_IN["local"])
        until("the machine to be switched off", account.ended_s, END_S_MAX)
        assert not alive_on({machine.id})
        assert head.sees(machine.id, "gone")


def left_alone(cloud: str, folder: Path, scene: Scene, head: RayHead, stack: ExitStack) -> str:
    """Play the life of one machine, from its launch to the end of its bill."""
    house = stack.enter_context(ExitStack())
    house.enter_context(scene.open())

    def boot() -> str:
        return user_data(scene.address, scene.fingerprint, "ours", cloud, SILENT_S)

    home = folder / "account"
    rented = local_account if cloud == "local" else partial(rented_account, cloud)
    account = stack.enter_context(rented(home, boot))
    scene.verifiers[cloud] = verifier(cloud, home)
    scene.redis.delete(INBOX)
    machine = account.buy(BOUGHT_IN[cloud])
    guest = Guest(cloud, machine.identity or machine.id, machine.id, machine.address)
    manager = Manager(scene, guest)
    stack.callback(manager.die)
    until("the node", lambda: "node" in phases(scene), END_S_MAX)
    assert account.ended_s() is None
    assert head.sees(machine.id, "alive"), account.console(machine)
    assert scene.token not in environments(account.disk(machine))
    raylet = raylet_of(account.disk(machine))
    assert raylet is not None, account.console(machine)
    os.kill(raylet, signal.SIGSTOP)
    manager.die()
    if cloud != "aws":
        house.close()
    ended_s = until("the end of its bill", account.ended_s, END_S_MAX)
    assert ended_s >= manager.last_s + SILENT_S - 1.0, account.console(machine)
    why = f"no word from a manager for {SILENT_S:.0f} s: this machine ends"
    assert why in account.console(machine)
    after = f"{cloud}: its bill ended {ended_s - manager.last_s:.1f} s after the last word"
    sys.stdout.write(f"{after}, {SILENT_S:g} s were allowed\n")
    return machine.id


def verifier(cloud: str, folder: Path) -> Any:
    if cloud == "local":
        return LocalIdentity(folder)
    certificates = read_certificates(folder / "certificates.pem")
    return (
        AwsIdentity(certificates) if cloud == "aws" else AzureIdentity(certificates, SUBSCRIPTION)
    )


def phases(scene: Scene) -> list[str]:
    rows = scene.redis.xrange(INBOX)
    return [msgspec.json.decode(fields[b"e"])["phase"] for _, fields in rows]


def processes_of(disk: Path) -> Iterator[tuple[Path, bytes]]:
    """Every process of a machine, with its environment."""
    mark = f"{MARKER}={disk.resolve()}".encode()
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            environment = (place / "environ").read_bytes()
            if mark in environment.split(b"\0"):
                yield place, environment


def environments(disk: Path) -> str:
    return "\n".join(text.decode(errors="replace") for _, text in processes_of(disk))


def raylet_of(disk: Path) -> int | None:
    for place, _ in processes_of(disk):
        if (place / "comm").read_text().strip() == "raylet":
            return int(place.name)
    return None
