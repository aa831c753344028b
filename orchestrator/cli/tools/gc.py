"""The tool `gc`: ends what nobody needs: machines that no lease claims, and what outlived others.

A list is made and shown; what is ended is that list. On real clouds a person is asked first.
"""

import asyncio
import shutil
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import redis.asyncio
import typer
from rich.table import Table
from rich.text import Text

from cloud.errors import CloudError
from cloud.model import Closed, Ref
from cloud.provider import Provider
from orchestrator import clouds
from orchestrator.brain.handlers.inventory import launched_by
from orchestrator.brain.holdings.leases import life_of
from orchestrator.cli import tables
from orchestrator.cli.command import ERROR, USAGE, Command, CommandError
from orchestrator.client import House, NotRunning, local_cloud
from orchestrator.formatting import plural
from orchestrator.journal import RedisJournal
from orchestrator.loop import resume
from orchestrator.paths import Places, dangling_links
from orchestrator.redis_client import retry_policy
from orchestrator.state import State, claimed
from orchestrator.supervisor import processes
from orchestrator.supervisor.supervisor import HouseError, only_one

RUN_DIRS = ("run", "cloud/machines")

Kind = Literal["machine", "disk", "nic", "address", "spot_request", "process", "link", "folder"]


class Leftover(msgspec.Struct, frozen=True, kw_only=True):
    """Something that is not needed any more; `place` is the cloud and region that it costs in."""

    kind: Kind
    id: str
    why: str
    place: str = ""

    @property
    def away(self) -> bool:
        """Return whether it is on a real cloud."""
        return bool(self.place) and not self.place.startswith("local/")


class Held(msgspec.Struct, frozen=True):
    """Something of ours on a cloud; `index` counts the machines of one launch."""

    ref: Ref
    token: str
    kind: Kind
    index: int = 0


class Found(msgspec.Struct):
    """What is on clouds: what to end, how much is only said, and who did not answer.

    `foreign` is how much another manager of our name holds. `held` says by whose launch each thing is there. After the end `things` holds what was ended,
    `not_ended` says what refused, and `claimed` how much a lease has claimed meanwhile.
    """

    things: dict[Ref, Leftover] = {}
    held: dict[Ref, Held] = {}
    unclaimed: int = 0
    foreign: int = 0
    silent: list[str] = []
    not_ended: list[str] = []
    claimed: int = 0


def gc(
    command: Command,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list them.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before ending them.")] = False,
    everything: Annotated[
        bool,
        typer.Option("--all", help="No manager will come back: end all that has our tag."),
    ] = False,
) -> None:
    """End leftovers: machines of ours that no lease claims, and what dead managers left."""
    places = Places(command.config.state_dir)
    on_clouds = asyncio.run(_on_clouds(command, everything=everything))
    here = [*_of_a_dead_house(places, end=False), *_dangling_links(end=False)]
    found = [*on_clouds.things.values(), *here]
    if found and not dry_run:
        _ask(command, found, yes=yes)
        asyncio.run(_end(command, on_clouds))
        _of_a_dead_house(places, end=True)
        _dangling_links(end=True)
        found = [*on_clouds.things.values(), *here]
    words = "orchestrator tools gc" + (" --all" if everything else "")
    again = on_clouds.not_ended or any(one.away for one in found)
    command.answer(
        {
            "dry_run": dry_run,
            "leftovers": found,
            "silent": on_clouds.silent,
            "not_ended": on_clouds.not_ended,
        },
        *([_table(found)] if found else []),
        *(Text(line) for line in _said(on_clouds, len(found), dry_run=dry_run)),
        then=(words,) if found and dry_run else (f"{words} --dry-run",) if again else (),
    )
    if on_clouds.silent or on_clouds.not_ended:
        raise typer.Exit(ERROR)


def _table(found: Sequence[Leftover]) -> Table:
    made = tables.table("what", "where", "which", "why")
    for one in found:
        made.add_row(one.kind.replace("_", " "), one.place or "here", one.id, Text(one.why))
    return made


def _said(on_clouds: Found, count: int, *, dry_run: bool) -> list[str]:
    lines = [f"{said}; what is there is not known" for said in on_clouds.silent]
    lines += [f"{said}; what is listed there could not be ended" for said in on_clouds.not_ended]
    if on_clouds.claimed:
        said = plural(on_clouds.claimed, "thing")
        lines.append(f"{said} of the list stayed, because a lease of the manager claims it now")
    if on_clouds.foreign:
        said = f"{plural(on_clouds.foreign, 'thing')} with our tag stayed"
        lines.append(f"{said}: another manager has our name; set another manager.deployment for it")
    if on_clouds.unclaimed:
        said = f"{plural(on_clouds.unclaimed, 'thing')} with our tag on real clouds"
        lines.append(
            f"{said}, and no manager runs here that could claim them: orchestrator up adopts or "
            "ends them; if no manager will come back: orchestrator tools gc --all"
        )
    if count:
        done = "would be removed" if dry_run else "removed"
        return [*lines, f"{plural(count, 'thing')} {done}"]
    return lines or ["nothing is left over"]


def _ask(command: Command, found: Sequence[Leftover], *, yes: bool) -> None:
    """Ask before something that costs money elsewhere is ended."""
    away = plural(sum(one.away for one in found), "thing")
    if yes or not any(one.away for one in found):
        return
    if command.json or not sys.stdin.isatty():
        raise CommandError(
            f"{away} on real clouds would be ended; look at them with orchestrator tools gc "
            "--dry-run, then add --yes",
            USAGE,
        )
    command.say(_table(found))
    if not typer.confirm(f"End {away} on real clouds?"):
        raise CommandError("nothing was ended")


@asynccontextmanager
async def _open(command: Command, house: House | None) -> AsyncIterator[list[Provider]]:
    """Open every cloud that may hold something of ours."""
    async with clouds.opened(command.config) as real:
        if house is None or not house.local_cloud:
            yield list(real)
            return
        async with local_cloud(house) as local:
            yield [local, *real]


async def _on_clouds(command: Command, *, everything: bool) -> Found:
    """Return what carries our tag and is claimed by no lease.

    Without a running manager nothing is, unless a person says that none comes back: the next
    manager may adopt machines, and the one that owns them may run elsewhere.
    """
    house = _house(command)
    async with _open(command, house) as opened:
        # A launch whose answer is awaited has no lease yet; no manager means no such launch.
        young = everything and house is None
        answers = await asyncio.gather(*(_listed(command, cloud, young=young) for cloud in opened))
        # Read after the lists, so that an intent written meanwhile counts.
        known = State() if house is None else await known_state(house.redis_url)
    found = Found(silent=[line for _, silent in answers for line in silent])
    held = [one for there, _ in answers for one in there]
    strange, found.foreign = unclaimed(held, known)
    if house is None and not everything:
        found.unclaimed = len(strange)
        return found
    tag = f"our tag {command.config.manager.deployment}"
    why = f"carries {tag}, and no lease claims it" if house else f"carries {tag}; --all"
    for one in strange:
        place = one.ref.place.key
        found.held[one.ref] = one
        found.things[one.ref] = Leftover(kind=one.kind, id=one.ref.id, why=why, place=place)
    return found


def unclaimed(held: Sequence[Held], known: State) -> tuple[list[Held], int]:
    """Return what no lease claims, and how much of the rest is a namesake's."""
    strange = [one for one in held if not _claims(known, one)]
    ours = [one for one in strange if life_of(one.token) not in known.namesakes]
    return ours, len(strange) - len(ours)


def _claims(known: State, one: Held) -> bool:
    """Return whether a lease claims it: a machine by its index, a leftover by its launch."""
    if one.kind == "machine":
        return claimed(known, one.token, one.index) is not None
    return bool(launched_by(known, one.token))


def _house(command: Command) -> House | None:
    try:
        return command.client().house()
    except NotRunning:
        return None


async def _listed(
    command: Command, cloud: Provider, *, young: bool
) -> tuple[list[Held], list[str]]:
    """Return what a cloud holds of ours, the young ones only if asked, and who is silent."""
    local = cloud.name == "local"
    grace_s = command.config.limits.launch_grace_s if local else cloud.pace.grace_s
    held, silent = list[Held](), list[str]()
    try:
        places = await cloud.places()
    except CloudError as error:
        return [], [f"{cloud.name}: {error}"]
    for place in places:
        if isinstance(place, Closed):
            silent.append(f"{place.place.key.rstrip('/')}: {place.because}")
            continue
        try:
            listing = await cloud.list(place)
        except CloudError as error:
            silent.append(f"{place.key}: {error}")
            continue
        late_s = time.time() - grace_s
        held += [
            Held(one.ref, one.token, "machine", one.index)
            for one in listing.machines
            if not one.gone and (young or one.launched_at_s < late_s)
        ]
        held += [Held(one.ref, one.token, one.kind) for one in listing.leftovers]
    return held, silent


async def _end(command: Command, found: Found) -> None:
    """End what was found, and keep in it what was ended.

    The leases are read again, because a manager may adopt a machine while a person reads the list.
    """
    house = _house(command)
    known = State() if house is None else await known_state(house.redis_url)
    for ref in [ref for ref in found.things if _claims(known, found.held[ref])]:
        del found.things[ref]
        found.claimed += 1
    async with _open(command, house) as opened:
        for cloud in opened:
            refs = [ref for ref in found.things if ref.place.cloud == cloud.name]
            for place in sorted({ref.place for ref in refs}):
                there = [ref for ref in refs if ref.place == place]
                try:
                    await cloud.end(there)
                except CloudError as error:
                    found.not_ended.append(f"{place.key}: {error}")
                    for ref in there:
                        del found.things[ref]


async def known_state(redis_url: str) -> State:
    """Return the state that the journal leads to; the journal is only read."""
    store = redis.asyncio.Redis.from_url(redis_url, **retry_policy(asynchronous=True))
    try:
        return await resume(RedisJournal(store))
    finally:
        await store.aclose()


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
                places.remove_links()  # `only_one` has made it
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
