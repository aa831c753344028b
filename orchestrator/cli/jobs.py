"""Jobs: handing one in, watching it, reading what it says, stopping it and going on with it."""

import io
import re
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import typer
from rich.console import Console
from rich.text import Text

from agent.keys import JOURNAL
from agent.messages import WorkerFailed
from orchestrator.cli import tables
from orchestrator.cli.desk import (
    INTERRUPTED,
    JOB_CANCELLED,
    JOB_FAILED,
    SCRIPT_FAILED,
    USAGE,
    CommandError,
    Desk,
    command,
    write_json,
)
from orchestrator.cli.live_table import follow
from orchestrator.cli.looking import ENDED, ended
from orchestrator.cli.packing import Packed, pack
from orchestrator.cli.rehearse import was_rehearsed
from orchestrator.client import Client
from orchestrator.config import STORAGES, Config
from orchestrator.events import AnyEvent, JobCancelled, JobResumed, JobSpec, JobSubmitted
from orchestrator.redis_client import connect
from orchestrator.view import JobView, Sentence

TAKEN_S_MAX = 10.0
STARTING_S_MAX = 120.0
PATIENCE_S = 1.0  # without a word of what is waited for
LOOK_S = 0.1
EVENTS_S = 0.5
BLOCK_MS = 500
PAGE = 1000
TRACEBACK_LINES = 60
JOURNAL_LOOKED_AT = 5_000
DURATION = re.compile(r"(\d+(?:\.\d+)?)(s|m|h|d)")
DEADLINE_DAYS_MAX = 3650
UNIT_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
BY = "the command line"
RESUMABLE = ("FAILED", "CANCELLED")

Events = list[tuple[str, Sentence]]  # each with where it is in the stream

Job = Annotated[
    str | None, typer.Argument(help="Id of the job, or how it begins. Default: the newest.")
]

With = Annotated[
    list[str] | None,
    typer.Option(
        "--with",
        metavar="PATH",
        help="A file, a folder or a quoted pattern that goes along. More than once, if need be.",
    ),
]


def add(app: typer.Typer) -> None:
    for function in (submit, logs, events, cost, cancel, resume):
        command(app)(function)


# --- handing in ----------------------------------------------------------------------------------


def submit(  # noqa: PLR0913 - a parameter per option
    desk: Desk,
    script: Annotated[Path, typer.Argument(help="The training script.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[-- ARGS]", help="The script's own arguments.")
    ] = None,
    *,
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
    nan: Annotated[
        Literal["fail", "skip"] | None,
        typer.Option(help="What to do when the loss is not a number."),
    ] = None,
    from_url: Annotated[
        str | None,
        typer.Option(
            "--from", metavar="URL", help="Go on from what an earlier job stored: .../JOB."
        ),
    ] = None,
) -> None:
    """Train a script on spot machines. Exit code with --follow: 0 succeeded, 100 the script failed.

    Modules beside the script that it imports go along by themselves; data and settings that it reads by --with. On the
    workers all lies as it does here, and the script runs as `python SCRIPT` would in this folder.
    """
    options = {
        "slots_min": slots_min, "slots_max": slots_max, "max_failures": max_failures,
        "max_preemptions": max_preemptions, "nan": nan, "depth": depth,
        "haste": haste,
    }  # fmt: skip
    desk.options = {f"job.{key}": str(value) for key, value in options.items() if value is not None}
    argv = tuple(arguments or ())
    packed = pack(script, desk.config, with_ or (), argv)
    spec = with_limits(job_spec(desk.config, script, argv), budget, deadline)
    spec = msgspec.structs.replace(spec, from_url=stored_at(from_url))
    _hand_in(desk, script, packed, spec, follow_it=follow_it)


def _hand_in(desk: Desk, script: Path, packed: Packed, spec: JobSpec, *, follow_it: bool) -> None:
    client = desk.client()
    for text in packed.shown():
        desk.say(text)
    spec = msgspec.structs.replace(
        on_its_clock(spec, client.ahead_s()), script_sha=client.put_script(packed.payload)
    )
    hint = _hint(desk, client, script, spec.script_sha)
    with _handed_in(desk, client, spec):
        job = _until_taken(desk, client, spec.job)
        if job is not None and job.status in ENDED:
            _refused(desk, job)
        desk.say(Text.assemble(("submitted ", "green"), (spec.job, "bold"), f"  {script}"))
        if hint is not None:
            desk.say(hint)
        if follow_it:
            desk.say(Text(f"prints: orchestrator logs -f {spec.job}", style="dim"))
            _follow(desk, client, spec.job)
            return
    desk.answer(
        {"job": job, "id": spec.job, "along": packed.value()},
        *(() if job else (Text("the manager is away; it takes the job up when it is back"),)),
        then=(f"orchestrator logs -f {spec.job}", f"orchestrator cancel {spec.job}"),
    )


def _hint(desk: Desk, client: Client, script: Path, sha: str) -> Text | None:
    """Of a script that nobody has tried yet."""
    ran = any(job.script_sha == sha and job.step for job in all_jobs(client))
    if ran or was_rehearsed(desk.config.state_dir, sha):
        return None
    return Text(f"hint: orchestrator rehearse {script} tries it first", style="dim")


@contextmanager
def _handed_in(desk: Desk, client: Client, spec: JobSpec) -> Iterator[None]:
    """The order goes to the manager whole; from then on Ctrl-C only ends the looking, and says so."""
    posted = False
    try:
        with _ctrl_c_waits():
            client.post(JobSubmitted(at_s=time.time(), spec=spec))
            posted = True
        yield
    except KeyboardInterrupt:
        if not posted:
            raise
        desk.answer(
            {"job": None, "id": spec.job},
            Text(f"{spec.job} was handed in and goes on without you"),
            then=(f"orchestrator logs -f {spec.job}", f"orchestrator cancel {spec.job}"),
        )
        raise typer.Exit(INTERRUPTED) from None


@contextmanager
def _ctrl_c_waits() -> Iterator[None]:
    """A Ctrl-C that comes within is heard behind it: nobody is left not knowing what was done."""
    pressed: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _frame: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        raise KeyboardInterrupt


def job_spec(config: Config, script: Path, argv: tuple[str, ...]) -> JobSpec:
    """What is asked for, but for the script's own bytes."""
    job = config.job
    return JobSpec(
        job=job_id(script), script=str(script), script_sha="", argv=argv,
        slots_min=job.slots_min, slots_max=job.slots_max, depth=job.stages,
        haste=job.haste, max_failures=job.max_failures,
        max_preemptions=job.max_preemptions, nan=job.nan,
        backup_every_steps=job.backup_every_steps, sums=job.sums,
        checkpoint_every_s=job.checkpoint_every_s,
        output_files=job.output_files, output_bytes=job.output_bytes,
    )  # fmt: skip


def job_id(script: Path) -> str:
    """Short, readable, and no other job's."""
    name = re.sub(r"[^a-z0-9]+", "-", script.stem.lower()).strip("-")[:20] or "job"
    return f"{name}-{secrets.token_hex(4)}"


def with_limits(spec: JobSpec, budget: float | None, deadline: str | None) -> JobSpec:
    if budget is not None and not 0 <= budget <= 1e9:
        raise CommandError(f"--budget {budget}: an amount in US dollars, 0 or more", USAGE)
    ends_at_s = None if deadline is None else deadline_s(deadline, time.time())
    return msgspec.structs.replace(spec, budget_usd=budget, deadline_s=ends_at_s)


def on_its_clock(spec: JobSpec, ahead_s: float) -> JobSpec:
    """A deadline is a moment of the wall's clock here; the manager goes by its own."""
    if spec.deadline_s is None:
        return spec
    return msgspec.structs.replace(spec, deadline_s=spec.deadline_s + ahead_s)


def stored_at(url: str | None) -> str:
    """Where an earlier job's states lie: the folder or store, and the job's id behind it. It is looked at before
    anything is paid for."""
    if url is None:
        return ""
    as_written = f"write {', '.join(STORAGES)}... with the job's id at the end"
    if not url.startswith(STORAGES):
        raise CommandError(f"--from {url}: {as_written}", USAGE)
    from agent.errors import CheckpointError
    from agent.reliable.offsite import earlier

    try:
        newest = earlier(url).newest()
    except (CheckpointError, OSError) as error:
        raise CommandError(f"--from {url} cannot be read: {str(error).splitlines()[0]}") from error
    if newest is None:
        raise CommandError(f"--from {url}: nothing sound is stored there; {as_written}")
    return url


def deadline_s(text: str, now_s: float) -> float:
    """A length of time from now, or a date with a time (local unless it says otherwise)."""
    match = DURATION.fullmatch(text)
    try:
        if match:
            at_s = now_s + float(match[1]) * UNIT_S[match[2]]
        else:
            at_s = datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        raise CommandError(
            f"--deadline {text}: write 90m, 2h, 1d or a date such as 2030-01-31T18:00", USAGE
        ) from None
    if at_s > now_s + DEADLINE_DAYS_MAX * UNIT_S["d"]:
        raise CommandError(
            f"--deadline {text}: at most {DEADLINE_DAYS_MAX:,} days from now; leave it out to have none",
            USAGE,
        )
    return at_s


def _until_taken(desk: Desk, client: Client, job_id: str) -> JobView | None:
    """The job as the manager has it, or None while the manager is away; the order is safe anyway.

    One that has said nothing since its house was set up is starting, and is waited for longer.
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
            desk.say("the manager is starting, and takes the job up as soon as it is there")
        time.sleep(LOOK_S)
    return None


def _follow(desk: Desk, client: Client, job_id: str) -> None:
    """Until the job ends."""
    console = Console(file=io.StringIO()) if desk.json else desk.out
    job = follow(client, job_id, ended, console)
    _say_end(desk, client, job)


def _say_end(desk: Desk, client: Client, job: JobView) -> None:
    """How it ended, with the script's own traceback if that is why, as an exit code."""
    code, texts = exit_code(job), [Text(f"{job.id} {job.status}: {job.because}")]
    traceback = last_traceback(client, job.id) if code == SCRIPT_FAILED else ""
    if traceback:
        texts.insert(0, Text(traceback))
    if job.export_uri:
        texts.append(Text(f"the trained model is in {job.export_uri}"))
    then = {
        0: "orchestrator cost",
        SCRIPT_FAILED: f"orchestrator logs {job.id}",
    }.get(code, f"orchestrator resume {job.id}")
    desk.answer(
        {"job": job, "id": job.id, "exit_code": code, "traceback": traceback}, *texts, then=(then,)
    )
    raise typer.Exit(code)


def exit_code(job: JobView) -> int:
    """0 succeeded, 100 the script itself failed, 101 it failed for another reason, 102 cancelled."""
    if job.status == "SUCCEEDED":
        return 0
    if job.status == "CANCELLED":
        return JOB_CANCELLED
    others = ("budget", "preempted", "its deadline")  # what ended it, whatever failed before
    own_fault = job.failures > 0 and not job.because.startswith(others)
    return SCRIPT_FAILED if own_fault else JOB_FAILED


def last_traceback(client: Client, job_id: str) -> str:
    """What Python said when the script failed last, as the manager wrote it into its journal."""
    rows: Any = connect(client.house().redis_url).xrevrange(JOURNAL, count=JOURNAL_LOOKED_AT)
    for _, row in rows:
        if b"WorkerFailed" in row[b"e"]:
            event = msgspec.json.decode(row[b"e"], type=AnyEvent)
            if isinstance(event, WorkerFailed) and event.job == job_id:
                return "\n".join(event.detail.strip().splitlines()[-TRACEBACK_LINES:])
    return ""


def _refused(desk: Desk, job: JobView) -> None:
    desk.answer(
        {"job": job, "id": job.id, "exit_code": JOB_FAILED},
        Text(f"refused: {job.because}", style="red"),
    )
    raise typer.Exit(JOB_FAILED)


# --- finding one ---------------------------------------------------------------------------------


def all_jobs(client: Client) -> Sequence[JobView]:
    view = client.view()
    return view.jobs if view is not None else ()


def find(client: Client, name: str | None, first: tuple[str, ...] = ()) -> JobView:
    """The job that is meant: by id, by how its id begins, or the newest; of those with such a status, if there is any.

    Of several that begin so it is the one that runs, or has such a status, and that is said.
    """
    known = sorted(all_jobs(client), key=lambda job: job.submitted_at_s)
    if not known:
        raise CommandError("there is no job yet; submit one: orchestrator submit SCRIPT")
    if name is None:
        return ([job for job in known if job.status in first] or known)[-1]
    exact = [job for job in known if job.id == name]
    found = exact or [job for job in known if job.id.startswith(name)]
    if len(found) == 1:
        return found[0]
    likely = [job for job in found if (job.status in first if first else job.status not in ENDED)]
    if len(likely) == 1:
        _say_taken_for(str(name), likely[0], [job for job in found if job is not likely[0]])
        return likely[0]
    names = ", ".join(job.id for job in (found or known)[-10:])
    if found:
        raise CommandError(f"{name} may be any of: {names}", USAGE)
    raise CommandError(f"there is no job {name}; there are: {names}", USAGE)


def _say_taken_for(name: str, one: JobView, others: list[JobView]) -> None:
    """Beside the answer, which may be for a program."""
    rest = ", ".join(f"{job.id} ({job.status})" for job in others[-10:])
    sys.stderr.write(f"{name} is taken for {one.id} ({one.status}), not for {rest}\n")


# --- reading -------------------------------------------------------------------------------------


def read_logs(client: Client, job_id: str, after: str = "0") -> list[tuple[str, str, str]]:
    """All lines after `after`, page by page."""
    found: list[tuple[str, str, str]] = []
    while page := client.logs(job_id, after, count=PAGE):
        found += page
        after = page[-1][0]
    return found


def logs(
    desk: Desk,
    job: Job = None,
    go_on: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until the job ends.")
    ] = False,
) -> None:
    """What the job's workers print. With -f --json: one JSON document per line."""
    client = desk.client()
    one = find(client, job)
    after = "0"
    if desk.json and not go_on:
        lines = read_logs(client, one.id)
        write_json({"job": one.id, "lines": [{"worker": w, "line": text} for _, w, text in lines]})
        return
    while True:
        over = not go_on or find(client, one.id).status in ENDED
        page = client.logs(one.id, after, block_ms=None if over else BLOCK_MS, count=PAGE)
        for after, worker, line in page:  # noqa: B007 - the last one is where to go on
            _show_line(desk, worker, line)
        if over and not page:
            break


def _show_line(desk: Desk, worker: str, line: str) -> None:
    if desk.json:
        sys.stdout.write(msgspec.json.encode({"worker": worker, "line": line}).decode() + "\n")
    else:
        desk.out.print(Text.assemble((worker, "dim"), " ", line), soft_wrap=True)


def events(
    desk: Desk,
    job: Annotated[
        str | None, typer.Argument(help="Only of this job: its id, or how that begins.")
    ] = None,
    *,
    go_on: Annotated[bool, typer.Option("--follow", "-f", help="Go on until Ctrl-C.")] = False,
    last: Annotated[int, typer.Option("--last", "-n", min=1, help="How many to begin with.")] = 50,
) -> None:
    """What was done, and why: time, who, one sentence. With -f --json: one document per line."""
    client = desk.client()
    one = find(client, job) if job is not None else None
    every = read_events(client)
    page = _of_job(client, one, every)[-last:]
    if not go_on:
        shown = [said for _, said in page]
        texts = [tables.sentence(said) for said in shown] or [Text("nothing has happened yet")]
        desk.answer({"events": shown}, *texts)
        return
    after = every[-1][0] if every else "0"
    while True:
        for _, said in page:
            if desk.json:
                sys.stdout.write(msgspec.json.encode(said).decode() + "\n")
            else:
                desk.out.print(tables.sentence(said), soft_wrap=True)
        sys.stdout.flush()
        time.sleep(EVENTS_S)
        every = client.sentences(after)
        after = every[-1][0] if every else after
        page = _of_job(client, one, every)


def _of_job(client: Client, job: JobView | None, found: Events) -> Events:
    """What is said of it, of its machines as far as they are known still, and what names it."""
    view = client.view() if job is not None and found else None
    if job is None or view is None:
        return found
    own = {job.id} | {n for m in view.machines if m.job == job.id for n in (m.id, m.token)}
    return [(at, said) for at, said in found if said.who in own or job.id in said.because]


def read_events(client: Client) -> Events:
    found: Events = []
    after = "0"
    while page := client.sentences(after, PAGE):
        found += page
        after = page[-1][0]
    return found


def cost(desk: Desk) -> None:
    """What was spent on what, next to the same machine time on demand."""
    view = desk.client().view()
    if view is None:
        raise CommandError("the manager has not said anything yet; look again in a moment")
    desk.answer(
        {
            "cost": view.cost,
            "jobs": [{"id": job.id, "spent_usd": job.spent_usd} for job in view.jobs],
            "machines": [
                {
                    "id": one.id,
                    "pool": one.pool,
                    "market": one.market,
                    "cost_usd": one.cost_usd,
                    "disk_usd": one.disk_usd,
                    "egress_usd": one.egress_usd,
                    "bid_usd_per_h": one.bid_usd_per_h,
                }
                for one in view.machines
            ],
        },
        tables.costs(view),
        then=("orchestrator events",),
    )


# --- stopping and going on -----------------------------------------------------------------------


def cancel(desk: Desk, job: Job = None) -> None:
    """Stop a job: a checkpoint is written and its machines are given back."""
    client = desk.client()
    live = [one for one in all_jobs(client) if one.status not in ENDED]
    if job is None and len(live) != 1:
        names = ", ".join(one.id for one in live[-10:]) or "none"
        raise CommandError(f"name the job to cancel; running now: {names}", USAGE)
    one = find(client, job or live[0].id)
    if one.status in ENDED:
        raise CommandError(f"{one.id} has ended already: {one.status}: {one.because}")
    client.post(JobCancelled(at_s=time.time(), job=one.id, by=BY))
    _answer_change(desk, client, one.id, lambda now: now.status in {*ENDED, "DRAINING"})


def resume(desk: Desk, job: Job = None) -> None:
    """Go on with a job that failed or was cancelled, from its last step, with the script as it was submitted.

    One that was changed since is handed in anew, with what this job stored: submit SCRIPT --from file://.../checkpoints/JOB.
    """
    client = desk.client()
    one = find(client, job, RESUMABLE if job else ())
    if one.status not in RESUMABLE:
        raise CommandError(
            f"{one.id} is {one.status}; only what failed or was cancelled is resumed"
        )
    if not client.has_script(one.script_sha):
        raise CommandError(
            f"the script of {one.id} is not kept any more, or is damaged; submit it anew: orchestrator submit {one.script} --from URL"
        )
    client.post(JobResumed(at_s=time.time(), job=one.id, by=BY))
    _answer_change(desk, client, one.id, lambda now: now.status not in RESUMABLE)


def _answer_change(
    desk: Desk, client: Client, job_id: str, changed: Callable[[JobView], bool]
) -> None:
    """Wait a little for the manager to act, and say how the job stands."""
    deadline = time.monotonic() + TAKEN_S_MAX
    now = find(client, job_id)
    while not changed(now) and time.monotonic() < deadline:
        time.sleep(LOOK_S)
        now = find(client, job_id)
    desk.answer(
        {"job": now, "id": now.id},
        Text(f"{now.id} {now.status}: {now.because}"),
        then=("orchestrator status", "orchestrator events"),
    )
