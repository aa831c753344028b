"""The clouds that the settings enable, as providers.

A cloud whose package, key or setting is missing is closed with one sentence, and the others go on.
No SDK is imported here: the providers import theirs with their first call, in a thread.
"""

import ipaddress
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit

from msgspec.structs import replace

from cloud.errors import Misconfigured
from cloud.identity.signed_message import read_certificates
from cloud.model import (
    Closed,
    LaunchRequest,
    Listing,
    Machine,
    Notice,
    Pace,
    Place,
    Quote,
    Ref,
    Sold,
    Traits,
)
from cloud.provider import Provider, no_notices
from orchestrator.config import Config
from orchestrator.errors import OrchestratorError

AGAIN_S = 600.0
NAMES = {"aws": "AWS", "azure": "Azure"}

UserData = Callable[[str], str]
"""The first-boot script of a cloud's machines, by the cloud's name."""


class Unusable:
    """A cloud that cannot be used as it is set up; it sells nothing, and says why."""

    def __init__(self, name: str, because: str) -> None:
        self._name = name
        self._because = because

    @property
    def name(self) -> str:
        return self._name

    @property
    def traits(self) -> Traits:
        return Traits(billing="local")

    @property
    def pace(self) -> Pace:
        return Pace(list_s=AGAIN_S, offers_s=AGAIN_S, sold_s=AGAIN_S, grace_s=0.0, boot_s=0.0)

    async def places(self) -> Sequence[Place | Closed]:
        return [Closed(Place(self._name, ""), self._because)]

    async def sold(self, place: Place) -> Sold:
        self._refuse(place)

    async def quotes(self, place: Place) -> Sequence[Quote]:
        self._refuse(place)

    async def launch(self, request: LaunchRequest) -> Sequence[Machine]:
        self._refuse(request)

    async def list(self, place: Place) -> Listing:
        self._refuse(place)

    async def end(self, refs: Sequence[Ref]) -> Sequence[Ref]:
        self._refuse(refs)

    def notices(self) -> AsyncIterator[Notice]:
        return no_notices()

    async def close(self) -> None:
        """Nothing is open."""

    def _refuse(self, *_: object) -> NoReturn:
        raise Misconfigured(self._because, "cloud")


def enabled(config: Config) -> list[str]:
    """Return the names of the clouds that the settings enable."""
    found = {
        "local": config.local.enabled,
        "aws": config.aws.enabled,
        "azure": config.azure.subscription is not None,
    }
    return [name for name, on in found.items() if on]


def providers(config: Config, local_dir: Path, user_data: UserData) -> dict[str, Provider]:
    """Return every cloud that the settings enable, by name; `local_dir` is the local cloud's."""
    return {name: _provider(name, config, local_dir, user_data) for name in enabled(config)}


def _provider(name: str, config: Config, local_dir: Path, user_data: UserData) -> Provider:
    if name == "local":
        from cloud.local.provider import LocalProvider

        return LocalProvider.at(local_dir, config.manager.deployment, billing=config.local.billing)
    if (because := obstacle(config, name)) is not None:
        return Unusable(name, because)
    try:
        return _aws(config, user_data) if name == "aws" else _azure(config, user_data)
    except (OrchestratorError, ValueError) as error:
        return Unusable(name, f"{NAMES[name]} is closed: {error}")


def _aws(config: Config, user_data: UserData) -> Provider:
    from cloud.aws.provider import AwsProvider

    settings = replace(config.aws.settings(), user_data=user_data("aws"))
    return AwsProvider(settings, config.manager.deployment)


def _azure(config: Config, user_data: UserData) -> Provider:
    from cloud.azure.provider import AzureProvider

    settings = config.azure.settings(user_data("azure"))
    assert settings is not None
    return AzureProvider(settings, config.manager.deployment)


def obstacle(config: Config, name: str) -> str | None:
    """Return why machines of a cloud could not join; None if they could, as far as settings show.

    They have to reach the Ray head, and prove who they are. A cloud whose calls go to this machine
    itself has its machines here, too.
    """
    if name == "local":
        return None
    head = config.ray.head_address
    certificates = config.aws.certificates if name == "aws" else config.azure.certificates
    if certificates is None:
        return (
            f"{name}.certificates is not set, so no machine of {NAMES[name]} could prove who it is; "
            "docs/operations.md says where they are"
        )
    try:
        read_certificates(Path(certificates))
    except ValueError as error:
        return f"{name}.certificates: {error}, so no machine of {NAMES[name]} could prove who it is"
    endpoint = config.aws.endpoint_url if name == "aws" else config.azure.endpoint
    if not _is_loopback(head) or _is_loopback(urlsplit(endpoint or "").hostname or ""):
        return None
    return (
        f"ray.head_address is {head}, which only this machine reaches, so machines of "
        f"{NAMES[name]} could not join; set it to the private address of this machine"
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
