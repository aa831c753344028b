"""The tool `drill`: takes machines away on purpose, to see what happens."""

import asyncio
from typing import Annotated, Literal

import typer
from rich.text import Text

from orchestrator.cli.command import USAGE, Command, CommandError
from orchestrator.client import local_cloud
from orchestrator.formatting import plural

NODES_MAX = 10_000


def drill(
    command: Command,
    warning: Annotated[
        float,
        typer.Option(metavar="SECONDS", help="Notice given: 120 as EC2, 30 as Azure, 0 none."),
    ] = 120.0,
    nodes: Annotated[str, typer.Option(metavar="N|all", help="How many machines to take.")] = "1",
) -> None:
    """Take machines of the local cloud away, as a market would, to see what happens."""
    if not 0 <= warning <= 86_400:
        raise CommandError(f"--warning {warning:g}: seconds from 0 to 86400", USAGE)
    count = _nodes(nodes)
    client = command.client()
    if not client.house().local_cloud:
        raise CommandError(
            "drills take machines of the local cloud only, and it is off (local.enabled); "
            "a real cloud's machines are never taken on purpose"
        )

    async def take() -> list[str]:
        async with local_cloud(client.house()) as cloud:
            return await cloud.drill(warning_s=warning, nodes=count)

    taken = asyncio.run(take())
    if not taken:
        raise CommandError(
            "no spot machine is running, so none was taken; see: orchestrator status"
        )
    notice = f"with {warning:g} s of notice" if warning else "without notice"
    line = f"{plural(len(taken), 'machine')} taken {notice}: {', '.join(taken)}"
    command.answer(
        {"warning_s": warning, "machines": taken},
        Text(line),
        then=("orchestrator events", "orchestrator status --watch"),
    )


def _nodes(text: str) -> int | Literal["all"]:
    if text == "all":
        return "all"
    if text.isascii() and text.isdigit() and 1 <= int(text) <= NODES_MAX:
        return int(text)
    raise CommandError(f"--nodes {text}: a number from 1 to {NODES_MAX}, or all", USAGE)
