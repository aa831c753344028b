"""The commands `output` and `metrics`: the files and numbers that a job's script wrote."""

import csv
import io
import math
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from agent.messages import OutputFile
from orchestrator.cli import tables
from orchestrator.cli.command import USAGE, Command, CommandError, write, write_json
from orchestrator.cli.jobs import Job, find
from orchestrator.client import NotRunning
from orchestrator.formatting import memory, plural
from orchestrator.paths import Places
from orchestrator.wishes import ENDED

STEPS_SHOWN = 20
SHOWN = 5
UNCOPIED = "{}: changes while it is copied, or is damaged or gone; try again in a moment. All else is in {}"
TRIES = 3  # a file may be rewritten while it is copied

To = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Copy them into this folder; files of the same names there are replaced.",
    ),
]


def output(command: Command, job: Job = None, to: To = None) -> None:
    """List the files that a job's script has written to session.output; --to copies them."""
    from agent.output.catalog import listed

    checkpoints = Places(command.config.state_dir).checkpoints
    name = _name(command, job, checkpoints)
    files = sorted(listed(checkpoints / name), key=lambda file: file.path)
    shown = [{"path": one.path, "size_bytes": one.size, "step": one.step} for one in files]
    value = {"job": name, "files": shown}
    if not files:
        command.answer(value, Text(f"{name} has written nothing to session.output"))
        return
    if to is not None:
        uncopied = [one.path for one in files if not _copy(checkpoints / name, one.path, to)]
        if uncopied:
            raise CommandError(UNCOPIED.format(", ".join(uncopied[:SHOWN]), to))
        total = sum(file.size for file in files)
        text = Text(f"{plural(len(files), 'file')} of {name}, {memory(total)}, copied to {to}")
        command.answer({**value, "copied_to": str(to)}, text)
        return
    table = tables.table("file", "size#", "step#")
    for file in files:
        table.add_row(Text(file.path), memory(file.size), _step(file.step))
    command.answer(value, table, then=(f"orchestrator output {name} --to DIR",))


def _name(command: Command, job: str | None, checkpoints: Path) -> str:
    """Return the id of the job; without a running house it must be the full id."""
    try:
        return find(command.client(), job).id
    except NotRunning:
        lies_here = job is not None and (checkpoints / job).parent == checkpoints
        if job is not None and lies_here and (checkpoints / job).is_dir():
            return job
        raise


def _step(step: int) -> str:
    return "before" if step < 0 else f"{step:,}"


def _copy(home: Path, path: str, to: Path) -> bool:
    """Copy a file as it is listed, after a few tries if it changes meanwhile; say if it is there."""
    from agent.output.catalog import listed

    for _ in range(TRIES):
        file = next((one for one in listed(home) if one.path == path), None)
        if file is None or _copied(home, file, to / path):
            return True  # copied, or deleted by the script
    return False


def _copied(home: Path, file: OutputFile, target: Path) -> bool:
    from agent.output.catalog import FOLDER
    from agent.output.files import checksum_of, draft_of, open_file, pieces

    source = open_file(home / FOLDER / file.path)
    if source is None:
        return False
    with source:
        if checksum_of(source, file.size) != file.checksum:
            return False
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with draft_of(target) as draft:
                with draft.open("xb") as into:
                    for piece in pieces(source, 0, file.size):
                        into.write(piece)
                draft.replace(target)
        except OSError as error:
            raise CommandError(f"--to: {target} cannot be written: {error.strerror}") from error
    return True


def metrics(
    command: Command,
    job: Job = None,
    *,
    as_csv: Annotated[
        bool, typer.Option("--csv", help="All steps, as a table for other programs.")
    ] = False,
) -> None:
    """Show the numbers that a job's script has logged, by step.

    They are those of session.log and of session.backward.
    """
    if as_csv and command.json:
        raise CommandError("--csv and --json: choose one of them", USAGE)
    client = command.client()
    one = find(client, job)
    name, steps = one.id, client.metrics(one.id)
    names = list(dict.fromkeys(each for numbers in steps.values() for each in numbers))
    if as_csv:
        table = io.StringIO()
        rows = csv.writer(table, lineterminator="\n")
        rows.writerow(["step", *("step (logged)" if each == "step" else each for each in names)])
        for step, numbers in steps.items():
            cells = (repr(numbers[each]) if each in numbers else "" for each in names)
            rows.writerow([step, *cells])
        write(table.getvalue())
        return
    if command.json:
        write_json({"job": name, "steps": [_told(*each) for each in steps.items()]})
        return
    if not steps:
        nothing = "no number of it is kept" if one.status in ENDED else "has logged nothing yet"
        command.answer({}, Text(f"{name} is {one.status}, and {nothing}"))
        return
    made = tables.table("step#", *(f"{each}#" for each in names))
    for step, numbers in list(steps.items())[-STEPS_SHOWN:]:
        cells = (f"{numbers[each]:.6g}" if each in numbers else "" for each in names)
        made.add_row(f"{step:,}", *cells)
    command.answer({}, made, then=(f"orchestrator metrics {name} --csv",))


def _told(step: int, numbers: dict[str, float]) -> dict[str, object]:
    finite = {each: n if math.isfinite(n) else None for each, n in numbers.items()}
    return {"step": step, "numbers": finite}
