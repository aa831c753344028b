"""The real clouds that the settings enable, as a person's commands call them.

No SDK is imported here or at the start of a command: the clouds import theirs with their first call,
in a thread.
"""

import asyncio
import ipaddress
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

from cloud.errors import CloudError
from cloud.findings import Finding, bad, good
from cloud.provider import Provider, all_machines
from orchestrator.config import Config
from orchestrator.formatting import plural

HEAD = "ray head"
NAMESAKES_S = 60.0
NOWHERE = ("192.0.2.1", 9)  # an address that is nobody's: only the way to it is looked up


def enabled(config: Config) -> list[str]:
    """Return the names of the real clouds that the settings enable."""
    on = {"aws": config.aws.enabled, "azure": config.azure.subscription is not None}
    return [name for name, is_on in on.items() if is_on]


def provider(config: Config, name: str) -> Provider:
    """Return a cloud that lists, ends and shows its offers; machines that it launched could not boot."""
    deployment = config.manager.deployment
    if name == "aws":
        from cloud.aws.provider import AwsProvider

        return AwsProvider(config.aws.settings(), deployment)
    from cloud.azure.provider import AzureProvider

    settings = config.azure.settings("")
    assert settings is not None
    return AzureProvider(settings, deployment)


@asynccontextmanager
async def opened(config: Config) -> AsyncIterator[Sequence[Provider]]:
    """Open every real cloud that the settings enable."""
    clouds = [provider(config, name) for name in enabled(config)]
    try:
        yield clouds
    finally:
        for cloud in clouds:
            await cloud.close()


def examined(config: Config, *, running: bool) -> list[Finding]:
    """Return what all enabled clouds lack, with all places looked at together.

    `running` says whether our manager runs: it has machines then, as it should.
    """
    names = enabled(config)
    if not names:
        return []
    return [head(config, names), *asyncio.run(_examined(config, names, running))]


async def _examined(config: Config, names: Sequence[str], running: bool) -> list[Finding]:
    looks = [_looked_at(config, name) for name in names]
    if not running:
        looks += [_namesakes(config, name) for name in names]
    found = await asyncio.gather(*looks)
    return [line for lines in found for line in lines]


async def _namesakes(config: Config, name: str) -> Sequence[Finding]:
    """Look for machines of a manager that has our deployment's name and is not ours.

    Nothing on a machine tells two managers of one name apart, and each would end the other's.
    """
    title, deployment = f"{name} deployment", config.manager.deployment
    cloud = provider(config, name)
    try:
        machines = await asyncio.wait_for(all_machines(cloud), NAMESAKES_S)
    except (CloudError, TimeoutError):
        return []  # the examination says what does not answer
    finally:
        await cloud.close()
    alive = [machine.id for machine in machines if not machine.gone]
    if not alive:
        return [good(title, f"nobody holds machines as {deployment}")]
    said = (
        f"found {plural(len(alive), 'machine')} with our tag {deployment} while our manager does not "
        "run: if another manager has this name, each would end the other's machines"
    )
    remedy = "are they ours? orchestrator up takes them up; if not, set manager.deployment"
    return [bad(title, said, remedy)]


async def _looked_at(config: Config, name: str) -> Sequence[Finding]:
    deployment = config.manager.deployment
    if name == "aws":
        from cloud.aws.examine import examine as look_at_aws

        return await look_at_aws(config.aws.settings(), deployment)
    from cloud.azure.examine import examine as look_at_azure

    settings = config.azure.settings("")
    assert settings is not None
    return await look_at_azure(settings)


def head(config: Config, names: Sequence[str]) -> Finding:
    """Look whether the machines of a cloud can reach the Ray head.

    A cloud that is called at this machine itself has its machines here, too.
    """
    head = config.ray.head_address
    away = [name for name in names if not _is_loopback(urlsplit(_door(config, name)).hostname)]
    if not _is_loopback(head) or not away:
        return good(HEAD, f"{head} can be reached by machines of {', '.join(names)}")
    said = f"{head} is reached by this machine only, so no machine of {', '.join(away)} could join"
    mine = _private_address()
    hint = f", which is probably {mine}" if mine else ""
    remedy = f"set ray.head_address to this machine's address in the network of its machines{hint}"
    return bad(HEAD, said, remedy)


def _door(config: Config, name: str) -> str:
    return (config.aws.endpoint_url or "") if name == "aws" else config.azure.endpoint


def _is_loopback(host: str | None) -> bool:
    try:
        return ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return host == "localhost"


def _private_address() -> str:
    """Return the address that this machine sends from; nothing is sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(NOWHERE)
            mine = str(probe.getsockname()[0])
    except OSError:
        return ""
    address = ipaddress.ip_address(mine)
    return mine if address.is_private and not address.is_loopback else ""
