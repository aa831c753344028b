"""The tool `gc`: removes what a dead manager has left, and machines that no lease claims."""

import asyncio
import shutil
import time
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import redis.asyncio
import typer
from rich.text import Text

from cloud.provider import all_machines
from orchestrator.cli import tables
from orchestrator.cli.command import Command
from orchestrator.client import NotRunning, local_cloud
from orchestrator.formatting import plural
from orchestrator.journal import RedisJournal
from orchestrator.loop import resume
from orchestrator.paths import Places, dangling_links
from orchestrator.redis_client import retry_policy
from orchestrator.supervisor import processes
from orchestrator.supervisor.supervisor import HouseError, only_one

RUN_DIRS = ("run", "cloud/machines")


class Leftover(msgspec.Struct, frozen=True, kw_only=True):
    """Something that is not needed any more."""

    kind: Literal["machine", "process", "link", "folder"]
    id: str
    why: str


def gc(
    command: Command,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list them.")] = False,
) -> None:
    """End leftovers: machines of ours that no lease claims, and what dead managers left."""
    places = Places(command.config.state_dir)
    found = asyncio.run(_machines(command, end=not dry_run))
    found += _of_a_dead_house(places, end=not dry_run)
    found += _dangling_links(end=not dry_run)
    made = tables.table("what", "which", "why")
    for one in found:
        made.add_row(one.kind, one.id, Text(one.why))
    done = "would be removed" if dry_run else "removed"
    line = f"{plural(len(found), 'thing')} {done}" if found else "nothing is left over"
    command.answer(
        {"dry_run": dry_run, "leftovers": found},
        *((made, Text(line)) if found else (Text(line),)),
        then=("orchestrator tools gc",) if found and dry_run else (),
    )


async def _machines(command: Command, *, end: bool) -> list[Leftover]:
    """Return, and end if asked, machines with our tag that no lease of the manager claims.

    Without a running manager no machine is touched, because the next manager may adopt them.
    """
    try:
        client = command.client()
    except NotRunning:
        return []
    if not client.house().local_cloud:
        return []

    async with local_cloud(client.house()) as cloud:
        grace_s = command.config.limits.launch_grace_s
        listed = [one for one in await all_machines(cloud) if not one.gone]
        # Read after the list, so that an intent written meanwhile counts.
        claimed = await claimed_tokens(client.house().redis_url)
        strange = [
            one for one in listed
            if one.token not in claimed and time.time() - one.launched_at_s > grace_s
        ]  # fmt: skip
        if end and strange:
            await cloud.end([one.ref for one in strange])
        why = f"carries our tag {client.house().deployment}, and no lease claims it"
        return [Leftover(kind="machine", id=one.id, why=why) for one in strange]


async def claimed_tokens(redis_url: str) -> set[str]:
    """Return the tokens of every lease in the journal, which is only read."""
    store = redis.asyncio.Redis.from_url(redis_url, **retry_policy(asynchronous=True))
    try:
        state = await resume(RedisJournal(store))
    finally:
        await store.aclose()
    return set(state.leases)


def _of_a_dead_house(places: Places, *, end: bool) -> list[Leftover]:
    """Return processes and folders of a killed house, and end them if asked.

    There are none if a house lives in the state directory.
    """
    if not places.state_dir.exists():
        return []
    had_link = places.run.is_symlink()
    try:
        with only_one(places):
            pids = processes.marked(places.identity)
            found = [
                Leftover(kind="process", id=str(pid), why=f"its manager is dead: {_command(pid)}")
                for pid in pids
            ]
            if end and pids:
                processes.sweep(places.identity)
            found += _run_dirs(places, end=end)
            if had_link:
                why = "the short way to a folder that no manager runs in"
                found.append(Leftover(kind="link", id=str(places.run), why=why))
            if end or not had_link:
                places.remove_link()  # `only_one` has made it
            return found
    except HouseError:
        return []


def _run_dirs(places: Places, *, end: bool) -> list[Leftover]:
    """Return what only a running house needs: sockets, and the disks of its local machines."""
    found = []
    for name in RUN_DIRS:
        for path in sorted((places.state_dir / name).glob("*")):
            found.append(Leftover(kind="folder", id=str(path), why="no manager runs here"))
            if end:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    return found


def _command(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return "it has just ended"
    return b" ".join(words)[:60].decode(errors="replace")


def _dangling_links(*, end: bool) -> list[Leftover]:
    """Return, and remove if asked, our short links to deleted state directories."""
    found = []
    for link in dangling_links():
        why = f"leads to {link.readlink()}, which is gone"
        found.append(Leftover(kind="link", id=str(link), why=why))
        if end:
            link.unlink(missing_ok=True)
    return found
