"""The command `export`: the money as a table that cost tools read."""

import csv
import io
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.text import Text

from orchestrator.cli.command import USAGE, Command, CommandError, write, write_file
from orchestrator.cli.money import mailed
from orchestrator.cli.money.comparison import remembered
from orchestrator.cli.money.times import Since, day_of, past, utc_day
from orchestrator.formatting import plural, usd
from orchestrator.history.outside import focus
from orchestrator.history.reader import History
from orchestrator.paths import Places


def export(
    command: Command,
    file: Annotated[
        Path | None, typer.Argument(help="Where to write it. Default: the standard output.")
    ] = None,
    *,
    job: Annotated[str | None, typer.Option(metavar="JOB", help="Only this job.")] = None,
    since: Since = None,
    format_: Annotated[
        Literal["focus", "parquet", "html"],
        typer.Option(
            "--format",
            help="CSV or Parquet with the columns of FOCUS 1.0, or the page as one file.",
        ),
    ] = "focus",
) -> None:
    """Write where the money went, by day, job, pool and cause, for cost tools.

    The columns are those of FOCUS 1.0; Parquet needs pyarrow and a file. With html it is the page
    instead, as one file without scripts that can be mailed; the manager has to run.
    """
    if format_ == "html":
        _html(command, file)
        return
    from_s = 0.0 if since is None else day_of(past("--since", since, time.time()))
    history = History.open(Places(command.config.state_dir))
    job = None if job is None else remembered(history, job).id
    deployment = command.config.manager.deployment
    rows = list(focus.rows(history.daily(from_s, job=job), deployment))
    if command.json:
        command.answer({"columns": focus.COLUMNS, "rows": rows})
        return
    if format_ == "parquet":
        _parquet(rows, file)
    elif file is None:
        write(_csv(rows))
        return
    else:
        write_file(file, _csv(rows), "export")
    total = sum(float(str(row["BilledCost"])) for row in rows)
    begins = "" if since is None else f" from {utc_day(from_s)} on"
    command.answer({}, Text(f"{plural(len(rows), 'line')}, {usd(total)} in all{begins}, in {file}"))


def _html(command: Command, file: Path | None) -> None:
    view = command.client().view()
    if view is None:
        raise CommandError("the manager has shown nothing yet; try again in a moment")
    text = mailed.page_of(view, History.open(Places(command.config.state_dir)))
    if file is None:
        write(text)
        return
    write_file(file, text, "export")
    command.answer({"file": str(file)}, Text(f"{len(text):,} characters, in {file}"))


def _csv(rows: list[dict[str, object]]) -> str:
    table = io.StringIO()
    made = csv.DictWriter(table, focus.COLUMNS, lineterminator="\n")
    made.writeheader()
    made.writerows(rows)
    return table.getvalue()


def _parquet(rows: list[dict[str, object]], file: Path | None) -> None:
    if file is None:
        raise CommandError("--format parquet: name the file to write", USAGE)
    try:
        from pyarrow import Table, parquet  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        raise CommandError(
            "--format parquet needs pyarrow, which is not installed: pip install pyarrow, or leave "
            "the option out for CSV"
        ) from None
    columns: dict[str, Any] = {name: [row[name] for row in rows] for name in focus.COLUMNS}
    try:
        parquet.write_table(Table.from_pydict(columns), file)
    except OSError as error:
        raise CommandError(f"{file}: {error.strerror or error}", USAGE) from None
