"""The tool `drill`: takes machines away on purpose, to see what happens."""

import asyncio
import sys
from collections.abc import Sequence
from typing import Annotated, Literal

import typer
from rich.text import Text

from cloud.errors import CloudError
from cloud.model import Closed, Machine, Place
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
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before real ones go.")] = False,
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
        taken, notice_s = asyncio.run(_rehearse(command, cloud, count, yes=yes))
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
    command: Command, name: str, count: int | Literal["all"], *, yes: bool
) -> tuple[list[str], float]:
    """Have a real cloud interrupt some of our running spot machines; return them and the notice."""
    if name not in clouds.real(command.config):
        raise CommandError(
            f"--cloud {name}: nothing is bought there; see: orchestrator init --cloud {name}"
        )
    provider = clouds.provider(command.config, name)
    try:
        running, silent = await _running(provider)
        spot = [x for x in running if x.market == "spot"]
        chosen = spot if count == "all" else spot[:count]
        if not chosen and silent:
            raise CommandError(f"no spot machine is known: {'; '.join(silent)}")
        if not chosen:
            return [], 0.0
        for line in silent:
            command.say(Text(f"{line}; what runs there is not taken"))
        _ask(command, name, chosen, yes=yes)
        assert isinstance(provider, Rehearses)
        notice_s = await provider.rehearse([machine.ref for machine in chosen])
        return [machine.id for machine in chosen], notice_s
    finally:
        await provider.close()


def _ask(command: Command, name: str, chosen: Sequence[Machine], *, yes: bool) -> None:
    """Ask before machines that cost money go."""
    if yes:
        return
    what = f"{plural(len(chosen), 'machine')} of {name}"
    ids = ", ".join(machine.id for machine in chosen)
    if command.json or not sys.stdin.isatty():
        raise CommandError(f"{what} would be taken ({ids}); if they may go, add --yes", USAGE)
    command.say(Text(ids))
    if not typer.confirm(f"Take {what}?"):
        raise CommandError("nothing was taken")


async def _running(provider: Provider) -> tuple[Sequence[Machine], list[str]]:
    """Return the running machines of places that answer, the eldest first, and who is silent."""
    places = await provider.places()
    silent = [f"{x.place.key}: {x.because}" for x in places if isinstance(x, Closed)]
    there = [place for place in places if isinstance(place, Place)]
    answers = await asyncio.gather(*(provider.list(x) for x in there), return_exceptions=True)
    found = list[Machine]()
    for place, answer in zip(there, answers, strict=True):
        if isinstance(answer, CloudError):
            silent.append(f"{place.key}: {answer}")
        elif isinstance(answer, BaseException):
            raise answer
        else:
            found += [one for one in answer.machines if one.state == "running"]
    return sorted(found, key=lambda machine: (machine.launched_at_s, machine.id)), silent


def _nodes(text: str) -> int | Literal["all"]:
    if text == "all":
        return "all"
    if text.isascii() and text.isdigit() and 1 <= int(text) <= NODES_MAX:
        return int(text)
    raise CommandError(f"--nodes {text}: a number from 1 to {NODES_MAX}, or all", USAGE)
