"""The tool `drill`: takes machines away on purpose, to see what happens."""

import asyncio
from collections.abc import Sequence
from typing import Annotated, Literal

import typer
from rich.text import Text

from cloud.model import Machine, Place
from cloud.provider import Provider, Rehearses
from orchestrator import clouds
from orchestrator.cli.command import USAGE, Command, CommandError
from orchestrator.client import local_cloud
from orchestrator.formatting import plural

NODES_MAX = 10_000
WARNING_S = 120.0
NOBODY = "no spot machine is running, so none was taken; see: orchestrator status"


def drill(
    command: Command,
    warning: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", help="Local cloud: notice given, 120 as EC2, 30 as Azure, 0 none."
        ),
    ] = None,
    nodes: Annotated[str, typer.Option(metavar="N|all", help="How many machines to take.")] = "1",
    cloud: Annotated[
        Literal["local", "aws", "azure"],
        typer.Option(help="Whose machines: a real cloud interrupts them by its own rehearsal."),
    ] = "local",
) -> None:
    """Take machines away, as a market would, to see what happens.

    The local cloud takes its machines. AWS interrupts ours by its fault injection, and Azure by its
    simulated eviction: the notice is theirs, and each machine that goes has cost what it has cost.
    """
    if warning is not None and not 0 <= warning <= 86_400:
        raise CommandError(f"--warning {warning:g}: seconds from 0 to 86400", USAGE)
    if warning is not None and cloud != "local":
        raise CommandError(f"--warning {warning:g}: {cloud} gives its own notice", USAGE)
    count = _nodes(nodes)
    if cloud == "local":
        notice_s = WARNING_S if warning is None else warning
        taken = _take_locally(command, notice_s, count)
    else:
        taken, notice_s = asyncio.run(_rehearse(command, cloud, count))
    if not taken:
        raise CommandError(NOBODY)
    notice = f"with {notice_s:g} s of notice" if notice_s else "without notice"
    line = f"{plural(len(taken), 'machine')} taken {notice}: {', '.join(taken)}"
    command.answer(
        {"cloud": cloud, "warning_s": notice_s, "machines": taken},
        Text(line),
        then=("orchestrator events", "orchestrator status --watch"),
    )


def _take_locally(command: Command, notice_s: float, count: int | Literal["all"]) -> list[str]:
    client = command.client()
    if not client.house().local_cloud:
        raise CommandError(
            "the local cloud is off (local.enabled), so it has no machine to take; on a real cloud: "
            "orchestrator tools drill --cloud aws"
        )

    async def take() -> list[str]:
        async with local_cloud(client.house()) as cloud:
            return await cloud.drill(warning_s=notice_s, nodes=count)

    return asyncio.run(take())


async def _rehearse(
    command: Command, name: str, count: int | Literal["all"]
) -> tuple[list[str], float]:
    """Have a real cloud interrupt some of our running spot machines; return them and the notice."""
    if name not in clouds.real(command.config):
        raise CommandError(
            f"--cloud {name}: nothing is bought there; see: orchestrator init --cloud {name}"
        )
    provider = clouds.provider(command.config, name)
    try:
        spot = [x for x in await _running(provider) if x.market == "spot"]
        chosen = spot if count == "all" else spot[:count]
        if not chosen:
            return [], 0.0
        assert isinstance(provider, Rehearses)
        notice_s = await provider.rehearse([machine.ref for machine in chosen])
        return [machine.id for machine in chosen], notice_s
    finally:
        await provider.close()


async def _running(provider: Provider) -> Sequence[Machine]:
    """Return the running machines of all places that answer, the eldest first."""
    places = [place for place in await provider.places() if isinstance(place, Place)]
    listings = await asyncio.gather(*(provider.list(place) for place in places))
    found = [one for listing in listings for one in listing.machines if one.state == "running"]
    return sorted(found, key=lambda machine: (machine.launched_at_s, machine.id))


def _nodes(text: str) -> int | Literal["all"]:
    if text == "all":
        return "all"
    if text.isascii() and text.isdigit() and 1 <= int(text) <= NODES_MAX:
        return int(text)
    raise CommandError(f"--nodes {text}: a number from 1 to {NODES_MAX}, or all", USAGE)
