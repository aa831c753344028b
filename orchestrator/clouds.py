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

from cloud.findings import Finding, bad, good
from cloud.provider import Provider
from orchestrator.config import Config

HEAD = "ray head"
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


def examined(config: Config) -> list[Finding]:
    """Return what all enabled clouds lack, with all places looked at together."""
    names = enabled(config)
    if not names:
        return []
    return [head(config, names), *asyncio.run(_examined(config, names))]


async def _examined(config: Config, names: Sequence[str]) -> list[Finding]:
    found = await asyncio.gather(*(_looked_at(config, name) for name in names))
    return [line for lines in found for line in lines]


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
