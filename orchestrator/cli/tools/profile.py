"""The tool `profile`: shows and saves what was measured of a model, for plans."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from agent.profile import Profile, render
from orchestrator.cli import tables
from orchestrator.cli.command import Command, CommandError, write_file
from orchestrator.cli.jobs import find
from orchestrator.cli.tools.trace import unmeasured
from orchestrator.formatting import memory, plural
from orchestrator.planner import profiles

SECTIONS_LISTED = 60


def profile(
    command: Command,
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="[JOB|FILE]", help="A measured job, or a file. Default: the newest job."
        ),
    ] = None,
    *,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write it there.")] = None,
) -> None:
    """Show what was measured of a model, section by section; --out writes it to a file."""
    found = _found(command, source)
    if out is not None:
        write_file(out, render(found), "--out")
    batch = 16 * found.microbatch_sizes[-1]
    command.answer(
        {"profile": found, "file": None if out is None else str(out)},
        Text(_head(found)),
        _sections(found),
        *(() if out is None else (Text(f"written: {out}"),)),
        then=() if out is None else (f"orchestrator plan {out} --on 4 --batch {batch}",),
    )


def _found(command: Command, source: str | None) -> Profile:
    path = None if source is None else Path(source)
    if path is not None and (path.suffix or path.exists()):
        return profiles.load(path)
    client = command.client()
    job = find(client, source)
    measured = client.profile(job.id)
    if measured is None:
        raise CommandError(f"{job.id}: {unmeasured(job)}")
    return measured


def _head(profile: Profile) -> str:
    sizes = ", ".join(map(str, profile.microbatch_sizes))
    link = profile.network.inter
    where = f" on {profile.instance_type}" if profile.instance_type else ""
    return (
        f"{profile.model}{where}: {plural(len(profile.sections), 'section')}, microbatches of {sizes}; "
        f"{memory(profile.memory_bytes)}; {link.bandwidth_bytes_per_s / 1e9:.3g} GB/s after "
        f"{link.latency_s * 1e6:.0f} us between machines ({profile.network_from})"
    )


def _sections(profile: Profile) -> Table:
    """Return the table of sections: times of the largest microbatch, sizes per sample."""
    made = tables.table(
        "#", "section", "forward#", "backward#", "sends#", "keeps#", "parameters#", "optimizer#"
    )
    for number, one in enumerate(profile.sections[:SECTIONS_LISTED]):
        times = (f"{seconds[-1] * 1e3:.3g} ms" for seconds in (one.forward_s, one.backward_s))
        sizes = (one.activation_bytes, one.stash_bytes, one.parameter_bytes, one.optimizer_bytes)
        made.add_row(str(number), one.name, *times, *(f"{size / 1e6:.3g} MB" for size in sizes))
    if len(profile.sections) > SECTIONS_LISTED:
        made.caption = f"and {len(profile.sections) - SECTIONS_LISTED} more: --json"
    return made
