"""A machine of the local cloud becomes a node of a real Ray cluster, by the script that the join client starts."""

import asyncio
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ray_head import RayHead
from running_cloud import RunningCloud, alive_on, request, until

from cloud.model import Machine
from cloud.provider import all_machines

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

BOOT = Path(__file__).parents[2] / "cloud" / "boot.sh"


@pytest.fixture
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


def buy(cloud: RunningCloud, token: str) -> Machine:
    async def bought() -> Machine:
        provider = cloud.provider()
        (machine,) = await provider.launch(request(token))
        await provider.close()
        return machine

    return asyncio.run(bought())


def take_all(cloud: RunningCloud) -> list[str]:
    async def taken() -> list[str]:
        provider = cloud.provider()
        ids = await provider.drill(warning_s=0, nodes="all")
        await provider.close()
        return ids

    return asyncio.run(taken())


def told(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o600)
    return path


def test_a_machine_joins_and_is_gone_when_it_is_taken(
    new_cloud: Callable[..., RunningCloud], head: RayHead, tmp_path: Path
):
    """The node carries the machine's own resource; SIGKILL without a notice leaves no process and no node."""
    boot_env = told(tmp_path / "env", head.boot_environment(tmp_path / "ray.token"))
    cloud = new_cloud(boot=BOOT.read_text()).start("--boot-env", str(boot_env))
    machine = buy(cloud, "t-1")
    assert head.sees(machine.id, "alive"), console(cloud, machine)
    assert alive_on({machine.id})
    assert take_all(cloud) == [machine.id]
    until("every process of the machine to be gone", lambda: not alive_on({machine.id}))
    assert head.sees(machine.id, "gone")


def test_a_machine_with_a_wrong_token_does_not_join(
    new_cloud: Callable[..., RunningCloud], head: RayHead, tmp_path: Path
):
    """Ray refuses its raylet; the script ends, and the machine with it, instead of costing money."""
    lines = head.boot_environment(tmp_path / "ray.token", "0" * 32)
    boot_env = told(tmp_path / "env", lines)
    cloud = new_cloud(boot=BOOT.read_text()).start("--boot-env", str(boot_env))
    machine = buy(cloud, "t-1")

    async def ended() -> bool:
        provider = cloud.provider()
        (listed,) = await all_machines(provider)
        await provider.close()
        return listed.state == "terminated"

    until("the machine to be switched off", lambda: asyncio.run(ended()), 120)
    assert not alive_on({machine.id})


def console(cloud: RunningCloud, machine: Machine) -> str:
    return (cloud.directory / "machines" / machine.id / "console.log").read_text()
