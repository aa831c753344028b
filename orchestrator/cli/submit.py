"""Submitting a script as a job, and watching the job until it ends."""

import io
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import unquote

import msgspec
import typer
from rich.console import Console
from rich.text import Text

from agent.keys import JOURNAL
from agent.messages import WorkerFailed
from orchestrator.cli.command import (
    INTERRUPTED,
    JOB_CANCELLED,
    JOB_FAILED,
    SCRIPT_FAILED,
    USAGE,
    Command,
    CommandError,
)
from orchestrator.cli.jobs import AMOUNT_MAX, LOOK_S, TAKEN_S_MAX, all_jobs
from orchestrator.cli.money.times import to_come
from orchestrator.cli.pack import AsModule, Packed, With, pack, start_of
from orchestrator.cli.rehearse import command_line, was_rehearsed
from orchestrator.cli.watch import deadline, ended, follow
from orchestrator.client import Client
from orchestrator.config import STORAGES, UNSET, Config, in_force, stale
from orchestrator.events import AnyEvent, JobSpec, JobSubmitted
from orchestrator.formatting import as_path
from orchestrator.redis_client import connect
from orchestrator.view import JobView
from orchestrator.wishes import DEADLINE_DAYS_MAX, ENDED, job_id, latest_s

STARTING_S_MAX = 120.0
PATIENCE_S = 1.0  # until a line says that the manager is starting
TRACEBACK_LINES = 60
JOURNAL_LOOKED_AT = 5_000


def submit(  # noqa: PLR0913 - a parameter per option
    command: Command,
    script: Annotated[Path, typer.Argument(help="The training script.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[-- ARGS]", help="The script's own arguments.")
    ] = None,
    *,
    as_module: AsModule = False,
    with_: With = None,
    follow_it: Annotated[
        bool, typer.Option("--follow", "-f", help="Watch it until it ends.")
    ] = False,
    budget: Annotated[
        float | None, typer.Option(metavar="USD", help="The most that it may cost.")
    ] = None,
    slots_min: Annotated[int | None, typer.Option(help="Fewest workers to train with.")] = None,
    slots_max: Annotated[int | None, typer.Option(help="Most workers to train with.")] = None,
    depth: Annotated[
        str | None,
        typer.Option(metavar="N", help="Stages of the pipeline; auto: the planner chooses."),
    ] = None,
    deadline: Annotated[
        str | None, typer.Option(metavar="TIME", help="When it must be done: 90m, 2h, or a date.")
    ] = None,
    haste: Annotated[
        float | None,
        typer.Option(
            help="How much dearer work may be, to end sooner; 0: never. 1000: whatever the budget allows."
        ),
    ] = None,
    max_failures: Annotated[
        int | None, typer.Option(help="How many failures of the script are tried again.")
    ] = None,
    max_preemptions: Annotated[
        int | None, typer.Option(help="How many machines may be taken away.")
    ] = None,
    exact: Annotated[
        bool | None,
        typer.Option(help="Only machines that round alike in a layout, so that its bits stay."),
    ] = None,
    nan: Annotated[
        Literal["fail", "skip"] | None,
        typer.Option(help="What to do when the loss is not a number."),
    ] = None,
    from_url: Annotated[
        str | None,
        typer.Option(
            "--from", metavar="PLACE", help="Go on from what an earlier job stored: .../JOB."
        ),
    ] = None,
) -> None:
    """Train a script on spot machines.

    Exit code with --follow: 0 succeeded, 100 the script failed. Modules of yours that it imports
    are sent along automatically if they lie below this folder; data and settings that it reads need
    --with. On the workers all files have the same places as here, and the script runs as `python
    SCRIPT` would in this folder, or with -m as `python -m SCRIPT`.
    """
    options = {
        "slots_min": slots_min,
        "slots_max": slots_max,
        "max_failures": max_failures,
        "max_preemptions": max_preemptions,
        "exact": None if exact is None else str(exact).lower(),
        "nan": nan,
        "depth": depth,
        "haste": haste,
    }
    command.options = {
        f"job.{key}": str(value) for key, value in options.items() if value is not None
    }
    argv = tuple(arguments or ())
    start = start_of(script, as_module=as_module)
    packed = pack(start, command.config, with_ or (), argv)
    spec = order_of(command.config, start.script, argv, (budget, deadline), from_url)
    words = command_line(start, with_ or (), argv)
    _hand_in(command, words, packed, spec, follow_it=follow_it)


def _hand_in(
    command: Command, words: str, packed: Packed, spec: JobSpec, *, follow_it: bool
) -> None:
    client = command.client()
    for text in packed.shown():
        command.say(text)
    spec = with_script(client, packed, spec)
    hints = list(_hints(command, client, words, spec))
    with _handed_in(command, client, spec):
        job = _until_taken(command, client, spec.job)
        if job is not None and _was_refused(job):
            _refused(command, job)
        command.say(Text.assemble(("submitted ", "green"), (spec.job, "bold"), f"  {spec.script}"))
        for hint in hints:
            command.say(Text(hint, style="dim"))
        if follow_it:
            command.say(Text(f"prints: orchestrator logs -f {spec.job}", style="dim"))
            _follow(command, client, spec.job)
            return
    command.answer(
        {"job": job, "id": spec.job, "along": packed.value()},
        *(() if job else (Text("the manager is away; it takes the job up when it is back"),)),
        then=(f"orchestrator logs -f {spec.job}", f"orchestrator cancel {spec.job}"),
    )


def _hints(command: Command, client: Client, words: str, spec: JobSpec) -> Iterator[str]:
    """Yield what a person may not know about a job that is about to cost money."""
    same = [job for job in all_jobs(client) if job.script_sha == spec.script_sha]
    if not (
        any(job.step for job in same) or was_rehearsed(command.config.state_dir, spec.script_sha)
    ):
        yield f"hint: orchestrator rehearse {words} tries it first"
    for job in same:
        if job.status not in ENDED and job.argv == spec.argv:
            yield f"hint: {job.id} is the same script with the same arguments, and is {job.status}"
    running = client.house().settings
    for key, said in stale(running, in_force(command.config)).items():
        if key.startswith("budget."):
            yield said
    if spec.budget_usd is None and running.get("budget.total_usd", UNSET) == UNSET:
        yield "hint: nothing bounds what it may spend: --budget USD does, or budget.total_usd for all jobs"


@contextmanager
def _handed_in(command: Command, client: Client, spec: JobSpec) -> Iterator[None]:
    """Send the order to the manager; after that Ctrl-C ends only the watching, and says so."""
    posted = False
    try:
        with ctrl_c_waits():
            client.post(JobSubmitted(at_s=time.time(), spec=spec))
            posted = True
        yield
    except KeyboardInterrupt:
        if not posted:
            raise
        command.answer(
            {"job": None, "id": spec.job},
            Text(f"{spec.job} was handed in and goes on without you"),
            then=(f"orchestrator logs -f {spec.job}", f"orchestrator cancel {spec.job}"),
        )
        raise typer.Exit(INTERRUPTED) from None


@contextmanager
def ctrl_c_waits() -> Iterator[None]:
    """Delay a Ctrl-C until the block has ended, so that a person knows whether it was done."""
    pressed: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _frame: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        raise KeyboardInterrupt


def job_spec(config: Config, script: Path, argv: tuple[str, ...]) -> JobSpec:
    """Return the order for a job, without the hash of the script, which is set later."""
    job = config.job
    return JobSpec(
        job=job_id(script),
        script=str(script),
        script_sha="",
        argv=argv,
        slots_min=job.slots_min,
        slots_max=job.slots_max,
        depth=job.stages,
        haste=job.haste,
        max_failures=job.max_failures,
        max_preemptions=job.max_preemptions,
        exact=job.exact,
        nan=job.nan,
        backup_every_steps=job.backup_every_steps,
        sums=job.sums,
        checkpoint_every_s=job.checkpoint_every_s,
        max_replay_s=job.max_replay_s,
        tail_s=job.tail_s,
        checkpoints_kept=job.checkpoints_kept,
        output_files=job.output_files,
        output_bytes=job.output_bytes,
        transport=job.transport,
    )


def order_of(
    config: Config,
    script: Path,
    argv: tuple[str, ...],
    limits: tuple[float | None, str | float | None],
    from_url: str | None,
) -> JobSpec:
    """Return a checked order; `limits` are the budget, and the deadline as typed or as a moment."""
    spec = with_limits(job_spec(config, script, argv), *limits)
    return msgspec.structs.replace(spec, from_url=stored_at(from_url))


def with_script(client: Client, packed: Packed, spec: JobSpec) -> JobSpec:
    """Store the script with the manager; return the order for it, by the manager's clock."""
    ends_at_s = None if spec.deadline_s is None else spec.deadline_s + client.ahead_s()
    sha = client.put_script(packed.payload)
    return msgspec.structs.replace(spec, deadline_s=ends_at_s, script_sha=sha)


def check_budget(budget: float | None) -> None:
    if budget is not None and not 0 <= budget <= AMOUNT_MAX:
        raise CommandError(
            f"--budget {budget}: an amount in US dollars from 0 to {AMOUNT_MAX:,.0f}", USAGE
        )


def with_limits(spec: JobSpec, budget: float | None, deadline: str | float | None) -> JobSpec:
    check_budget(budget)
    ends_at_s = None if deadline is None else deadline_s(deadline, time.time())
    return msgspec.structs.replace(spec, budget_usd=budget, deadline_s=ends_at_s)


def stored_at(url: str | None) -> str:
    """Check where an earlier job's states lie, before anything is bought; return the address.

    The address is a folder or store with the job's id at the end.
    """
    if url is None:
        return ""
    url = _one_address(url)
    as_written = f"write the folder, or {', '.join(STORAGES)}... with the job's id at the end"
    if not url.startswith(STORAGES):
        raise CommandError(f"--from {url}: {as_written}", USAGE)
    from agent.errors import CheckpointError
    from agent.keeper.storage.offsite import earlier, step_in

    try:
        step, archive = step_in(url), earlier(url)
        newest = archive.newest(step)
    except (CheckpointError, OSError) as error:
        raise CommandError(f"--from {url} cannot be read: {str(error).splitlines()[0]}") from error
    if newest is None:
        raise CommandError(f"--from {url}: nothing sound is stored there; {as_written}")
    if step not in (None, newest.version):
        there = ", ".join(f"{mark.version:,}" for mark in archive.marks())
        raise CommandError(f"--from {url}: that step is not stored there; there are: {there}")
    return url


def _one_address(typed: str) -> str:
    """Return the address of a folder that the keeper knows it by, however it is typed."""
    place, marked, step = typed.partition("#")
    if typed.startswith("file:///"):
        folder = Path(unquote(place.removeprefix("file://")))
    elif Path(place).is_dir():
        folder = Path(place)
    else:
        return typed
    return folder.resolve().as_uri() + marked + step


def deadline_s(given: str | float, now_s: float) -> float:
    """Return the moment that is given as a number, or as a person types it; refuse a far one."""
    at_s = to_come("--deadline", given, now_s) if isinstance(given, str) else given
    if not at_s <= latest_s(now_s):  # nor for not-a-number
        raise CommandError(
            f"--deadline {given}: at most {DEADLINE_DAYS_MAX:,} days from now; leave it out to have none",
            USAGE,
        )
    return at_s


def _until_taken(command: Command, client: Client, job_id: str) -> JobView | None:
    """Return the job as the manager has it, or None if the manager does not answer in time.

    The order is safe either way. A manager that has said nothing since its house was set up is
    still starting, so the wait is longer then.
    """
    began, starting = time.monotonic(), False
    while (waited_s := time.monotonic() - began) < (STARTING_S_MAX if starting else TAKEN_S_MAX):
        view = client.view()
        job = next((one for one in view.jobs if one.id == job_id), None) if view else None
        if job is not None:
            return job
        silent = view is None or view.at_s < client.house().started_at_s
        if silent and not starting and waited_s > PATIENCE_S:
            starting = True
            command.say("the manager is starting, and takes the job up as soon as it is there")
        time.sleep(LOOK_S)
    return None


def _follow(command: Command, client: Client, job_id: str) -> None:
    """Show the job until it ends."""
    console = Console(file=io.StringIO()) if command.json else command.out
    job = follow(client, job_id, ended, console)
    _say_end(command, client, job)


def _say_end(command: Command, client: Client, job: JobView) -> None:
    """Say how the job ended, and exit with its code.

    If the script failed, its own traceback comes first.
    """
    code, texts = exit_code(job), [Text(f"{job.id} {job.status}: {job.because}")]
    traceback = last_traceback(client, job.id) if code == SCRIPT_FAILED else ""
    if traceback:
        texts.insert(0, Text(traceback))
    if job.deadline_s is not None:
        texts.append(Text(f"deadline {deadline(job, time.time())}"))
    if job.export_uri:
        texts.append(Text(f"the trained model is in {as_path(job.export_uri)}"))
    then = {0: "orchestrator cost", SCRIPT_FAILED: f"orchestrator logs {job.id}"}.get(
        code, f"orchestrator resume {job.id}"
    )
    command.answer(
        {"job": job, "id": job.id, "exit_code": code, "traceback": traceback}, *texts, then=(then,)
    )
    raise typer.Exit(code)


def exit_code(job: JobView) -> int:
    """Return the exit code for how a job ended.

    0 succeeded, 100 the script itself failed, 101 it failed for another reason, 102 cancelled.
    """
    if job.status == "SUCCEEDED":
        return 0
    if job.status == "CANCELLED":
        return JOB_CANCELLED
    others = ("budget", "preempted", "its deadline")  # these end a job even if its script failed
    own_fault = job.failures > 0 and not job.because.startswith(others)
    return SCRIPT_FAILED if own_fault else JOB_FAILED


def last_traceback(client: Client, job_id: str) -> str:
    """Return the traceback of the script's last failure, as the manager's journal has it."""
    rows: Any = connect(client.house().redis_url).xrevrange(JOURNAL, count=JOURNAL_LOOKED_AT)
    for _, row in rows:
        if b"WorkerFailed" in row[b"e"]:
            event = msgspec.json.decode(row[b"e"], type=AnyEvent)
            if isinstance(event, WorkerFailed) and event.job == job_id:
                return "\n".join(event.detail.strip().splitlines()[-TRACEBACK_LINES:])
    return ""


def _was_refused(job: JobView) -> bool:
    """Return whether the manager did not take the job; a quick one may have ended in other ways."""
    return job.status == "FAILED" and not (job.step or job.failures or job.spent_usd)


def _refused(command: Command, job: JobView) -> None:
    command.answer(
        {"job": job, "id": job.id, "exit_code": JOB_FAILED},
        Text(f"refused: {job.because}", style="red"),
    )
    raise typer.Exit(JOB_FAILED)
