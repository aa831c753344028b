"""The clouds that the settings enable: as the manager buys there, and as a person's commands ask.

A cloud whose package, key or setting is missing is closed with one sentence, and the others go on.
No SDK is imported here or at the start of a command: the clouds import theirs with their first call,
in a thread.
"""

import asyncio
import ipaddress
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn
from urllib.parse import urlsplit

from msgspec.structs import replace

from cloud.errors import CloudError, Misconfigured
from cloud.findings import Finding, bad, good
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
from cloud.provider import Provider, Through, all_machines, no_notices
from orchestrator.config import Config
from orchestrator.errors import OrchestratorError
from orchestrator.formatting import plural

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

AGAIN_S = 600.0
HEAD = "ray head"
NAMES = {"aws": "AWS", "azure": "Azure"}
NAMESAKES_S = 60.0
NOWHERE = ("192.0.2.1", 9)  # an address that is nobody's: only the way to it is looked up
SOURCES = {
    "aws": 'copy those of your regions (RSA-2048) from "Verify the instance identity document" in '
    "AWS's documents into one file, and name it in aws.certificates",
    "azure": 'copy the authorities from "Azure Certificate Authority details" in Azure\'s documents '
    "into one PEM file, and name it in azure.certificates",
}

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


class BuysNothing(Through):
    """A cloud whose machines could not join: those held there are listed and ended, none is bought."""

    def __init__(self, cloud: Provider, because: str) -> None:
        super().__init__(cloud)
        self._because = because

    async def sold(self, place: Place) -> Sold:  # noqa: ARG002
        raise Misconfigured(self._because, "cloud")

    async def launch(self, request: LaunchRequest) -> Sequence[Machine]:  # noqa: ARG002
        raise Misconfigured(self._because, "cloud")


def enabled(config: Config) -> list[str]:
    """Return the names of the clouds that the settings enable."""
    return [*(["local"] if config.local.enabled else []), *real(config)]


def real(config: Config) -> list[str]:
    """Return the names of the enabled clouds that are not this machine's own."""
    on = {"aws": config.aws.enabled, "azure": config.azure.subscription is not None}
    return [name for name, is_on in on.items() if is_on]


def region_of_buckets(env: Mapping[str, str]) -> str:
    """Return where S3's library is told to look for a bucket; empty if it is not told."""
    return env.get("AWS_REGION") or env.get("AWS_DEFAULT_REGION") or ""


def providers(config: Config, local_dir: Path, user_data: UserData) -> dict[str, Provider]:
    """Return every cloud that the settings enable, by name; `local_dir` is the local cloud's."""
    return {name: _provider(name, config, local_dir, user_data) for name in enabled(config)}


def _provider(name: str, config: Config, local_dir: Path, user_data: UserData) -> Provider:
    if name == "local":
        from cloud.local.provider import LocalProvider

        return LocalProvider.at(local_dir, config.manager.deployment, billing=config.local.billing)
    because, script = obstacle(config, name), ""
    if because is None:
        try:
            script = user_data(name)
        except OrchestratorError as error:
            because = f"{NAMES[name]} is closed: {error}"
    try:
        found = provider(config, name, script)
    except ValueError as error:
        return Unusable(name, f"{NAMES[name]} is closed: {error}")
    return found if because is None else BuysNothing(found, because)


def provider(config: Config, name: str, user_data: str = "") -> Provider:
    """Return a real cloud; without a first-boot script, what it launched could not boot."""
    deployment = config.manager.deployment
    if name == "aws":
        from cloud.aws.provider import AwsProvider

        return AwsProvider(replace(config.aws.settings(), user_data=user_data), deployment)
    from cloud.azure.provider import AzureProvider

    settings = config.azure.settings(user_data)
    assert settings is not None
    return AzureProvider(settings, deployment)


@asynccontextmanager
async def opened(config: Config) -> AsyncIterator[Sequence[Provider]]:
    """Open every real cloud that the settings enable."""
    clouds = [provider(config, name) for name in real(config)]
    try:
        yield clouds
    finally:
        for cloud in clouds:
            await cloud.close()


# --- what machines need to join ------------------------------------------------------------------


def obstacle(config: Config, name: str) -> str | None:
    """Return why machines of a cloud could not join; None if they could, as far as settings show.

    They have to prove who they are, and reach the Ray head. A certificate that has expired is no
    obstacle: a manager that starts again has to list and end the machines that it holds there.
    """
    if name == "local":
        return None
    try:
        _certificates(config, name)
    except ValueError as error:
        return f"{error}; {SOURCES[name]}"
    way = head(config, [name])
    return None if way.ok else f"{way.found}; {way.remedy}"


def joining(config: Config, names: Sequence[str]) -> list[Finding]:
    """Return what machines of real clouds need to join: a way to the head, and certificates."""
    return [head(config, names), *(certificates(config, name, time.time()) for name in names)]


def certificates(config: Config, name: str, now_s: float) -> Finding:
    """Look at the file of certificates by which a cloud's machines prove who they are."""
    title = f"{name} certificates"
    try:
        found = _certificates(config, name)
    except ValueError as error:
        return bad(title, str(error), SOURCES[name])
    ends_s = [one.not_valid_after_utc.timestamp() for one in found]
    late = sum(end_s < now_s for end_s in ends_s)
    first = time.strftime("%F", time.gmtime(min(ends_s)))
    if late:
        said = (
            f"{name}.certificates: {late} of {plural(len(found), 'certificate')} expired, the first "
            f"on {first}, so {NAMES[name]} has others by now, and a machine that needs one of those "
            "could not prove who it is"
        )
        return bad(title, said, f"replace what expired: {SOURCES[name]}")
    return good(title, f"{plural(len(found), 'certificate')}, valid until {first} or longer")


def _certificates(config: Config, name: str) -> "list[Certificate]":
    """Return the certificates of a cloud; raise ValueError if there are none to be read."""
    from cloud.identity.signed_message import read_certificates

    path = config.aws.certificates if name == "aws" else config.azure.certificates
    lost = f"so no machine of {NAMES[name]} could prove who it is"
    if path is None:
        raise ValueError(f"{name}.certificates is not set, {lost}")
    try:
        return read_certificates(Path(path))
    except ValueError as error:
        raise ValueError(f"{name}.certificates: {error}, {lost}") from error


def head(config: Config, names: Sequence[str]) -> Finding:
    """Look whether the machines of a cloud can reach the Ray head.

    A cloud that is called at this machine itself has its machines here, too.
    """
    head = config.ray.head_address
    away = [NAMES[name] for name in names if not _is_loopback(_door(config, name))]
    if not _is_loopback(head) or not away:
        said = " and ".join(NAMES[name] for name in names)
        return good(HEAD, f"machines of {said} can reach {head}")
    found = (
        f"ray.head_address is {head}, which only this machine reaches, so machines of "
        f"{' and '.join(away)} could not join"
    )
    mine = _private_address()
    hint = f" (this one has {mine})" if mine else ""
    return bad(HEAD, found, f"set it to the private address of the manager's machine{hint}")


def _door(config: Config, name: str) -> str:
    """Return the host at which a cloud is called."""
    url = (config.aws.endpoint_url or "") if name == "aws" else config.azure.endpoint
    return urlsplit(url).hostname or ""


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
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


# --- what `check` looks at -----------------------------------------------------------------------


def examined(config: Config, *, running: bool) -> list[Finding]:
    """Return what all enabled clouds lack, with all places looked at together.

    `running` says whether our manager runs: it has machines then, as it should.
    """
    names = real(config)
    if not names:
        return []
    return [*joining(config, names), *asyncio.run(_examined(config, names, running))]


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
