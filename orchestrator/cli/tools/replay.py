"""The tool `replay`: makes the decisions of a journal again, and compares them."""

import asyncio
from pathlib import Path
from typing import Annotated

import redis.asyncio
import typer
from rich.text import Text

from orchestrator.cli.command import USAGE, Command, CommandError
from orchestrator.formatting import plural
from orchestrator.journal import RedisJournal
from orchestrator.redis_client import retry_policy
from orchestrator.replay import export, read_incident
from orchestrator.replay import replay as decide_again
from orchestrator.state import State
from orchestrator.world import Diverged, Entry

RUNNING = "the running manager"


def replay(
    command: Command,
    file: Annotated[
        Path | None, typer.Argument(help="A journal. Default: that of the running manager.")
    ] = None,
    save: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the journal there too.")
    ] = None,
) -> None:
    """Decide again what a journal says was decided; the first difference is shown."""
    if file is not None and not file.exists():
        raise CommandError(f"{file}: no such file", USAGE)
    try:
        if file is not None:
            state, entries = read_incident(file)
        else:
            state, entries = asyncio.run(_from_redis(command.client().house().redis_url, save))
    except OSError as error:
        raise CommandError(f"{file}: cannot be read: {error.strerror}", USAGE) from None
    except ValueError as error:
        raise CommandError(str(error), USAGE) from None
    try:
        decide_again(entries, state)
    except Diverged as error:
        raise CommandError(f"decided otherwise now: {error}") from None
    source = str(file) if file is not None else RUNNING
    saved = None if save is None or file is not None else str(save.absolute())
    line = f"{plural(len(entries), 'event')} of {source}: every decision is the same"
    command.answer(
        {"source": source, "events": len(entries), "saved": saved},
        Text(line),
        *((Text(f"saved in {saved}"),) if saved else ()),
    )


async def _from_redis(redis_url: str, save: Path | None) -> tuple[State | None, list[Entry]]:
    """Return the journal's last snapshot and the entries after it; reading changes nothing."""
    store = redis.asyncio.Redis.from_url(redis_url, **retry_policy(asynchronous=True))
    try:
        journal = RedisJournal(store)
        if save is not None:
            await export(journal, save)
        state, entries = await journal.load()
        return state, list(entries)
    finally:
        await store.aclose()
