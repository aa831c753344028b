"""Finding a job by what a person typed, and the commands `cancel`, `resume` and `change`."""

import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from typing import Annotated

import redis
import typer
from rich.text import Text

from cloud.clock import HOUR_S, ticks
from orchestrator import wishes
from orchestrator.cli.command import JOB_FAILED, USAGE, Command, CommandError
from orchestrator.cli.money.times import to_come
from orchestrator.client import Client
from orchestrator.config import load
from orchestrator.errors import OrchestratorError
from orchestrator.events import JobBranched
from orchestrator.view import JobView
from orchestrator.wishes import ENDED, LIVE, RESUMABLE

TAKEN_S_MAX = 10.0
LOOK_S = 0.1
BY = "the command line"
AMOUNT_MAX = 1e9
NUMBER = re.compile(r"-?[0-9]+(\.[0-9]*)?")
AWAY = "the manager is away, so nothing has changed yet; it does what was asked when it is back"


def ids(incomplete: str) -> list[str]:
    """Return the ids that a word may become, for a shell; none if no manager answers."""
    try:
        client = Client.connect(load(None, os.environ).state_dir)
        return [job.id for job in all_jobs(client) if job.id.startswith(incomplete)]
    except (OrchestratorError, redis.RedisError, OSError, ValueError):
        return []


Job = Annotated[
    str | None,
    typer.Argument(
        help="Id of the job, or how it begins. Default: the newest.", autocompletion=ids
    ),
]
OnlyJob = Annotated[
    str | None,
    typer.Argument(help="Only this job: its id, or how that begins.", autocompletion=ids),
]


def all_jobs(client: Client) -> Sequence[JobView]:
    view = client.view()
    return view.jobs if view is not None else ()


def shown_jobs(client: Client) -> Sequence[JobView]:
    """Return all jobs; before the manager has shown any, say that rather than that there are none.

    After an upgrade, what the manager of before has shown cannot be read.
    """
    view = client.view()
    if view is None:
        raise CommandError("the manager has not said anything yet; look again in a moment")
    return view.jobs


def find(client: Client, name: str | None, first: tuple[str, ...] = ()) -> JobView:
    """Find a job by its id, by the beginning of its id, or the newest job if `name` is None.

    The newest job with a status in `first` is preferred. If several ids begin with `name`, the only
    one that runs, or that has such a status, is taken, and stderr says so.
    """
    known = sorted(shown_jobs(client), key=lambda job: job.submitted_at_s)
    if not known:
        raise CommandError("there is no job yet; submit one: orchestrator submit SCRIPT")
    if name == "":
        raise CommandError("a job's name is empty; leave it out, or name one", USAGE)
    if name is None:
        return ([job for job in known if job.status in first] or known)[-1]
    exact = [job for job in known if job.id == name]
    found = exact or [job for job in known if job.id.startswith(name)]
    if len(found) == 1:
        return found[0]
    likely = [job for job in found if (job.status in first if first else job.status not in ENDED)]
    if len(likely) == 1:
        (one,) = likely
        rest = ", ".join(f"{job.id} ({job.status})" for job in found[-10:] if job is not one)
        sys.stderr.write(f"{name} is taken for {one.id} ({one.status}), not for {rest}\n")
        return one
    names = ", ".join(job.id for job in (found or known)[-10:])
    if found:
        raise CommandError(f"{name} may be any of: {names}", USAGE)
    raise CommandError(f"there is no job {name}; there are: {names}", USAGE)


def _only(jobs: Sequence[JobView], to: str) -> str:
    """Return the id of the only job that can be meant; it has to be named if there are others."""
    if len(jobs) != 1:
        names = ", ".join(one.id for one in jobs[-10:]) or "none"
        raise CommandError(f"name the job to {to}: {names}", USAGE)
    return jobs[0].id


def cancel(command: Command, job: Job = None) -> None:
    """Stop a job: a checkpoint is written and its machines are given back."""
    client = command.client()
    live = [one for one in shown_jobs(client) if one.status not in ENDED]
    one = find(client, _only(live, "cancel; running now") if job is None else job)
    client.post(wishes.cancel(one, _asker()).event)
    _answer_change(command, client, one, lambda now: now.status in {*ENDED, "DRAINING"})


def resume(
    command: Command,
    job: Job = None,
    step: Annotated[
        int | None,
        typer.Option(
            "--from", metavar="STEP", help="Begin a new job like it from this stored step."
        ),
    ] = None,
) -> None:
    """Go on with a failed or cancelled job, from its last step, with the submitted script.

    With --from STEP, a new job goes on from an earlier step whose checkpoint is stored, and this one
    stays unchanged; a step that is not stored is refused with those that are. If the script has changed since, submit it again,
    with what this job stored: submit SCRIPT --from .orchestrator/checkpoints/JOB.
    """
    client = command.client()
    if step is not None:
        _branch(command, client, find(client, job), step)
        return
    ended = [one for one in shown_jobs(client) if one.status in RESUMABLE]
    one = find(
        client, _only(ended, "resume; failed or cancelled") if job is None else job, RESUMABLE
    )
    has_script = one.status in RESUMABLE and client.has_script(one.script_sha)
    client.post(wishes.resume(one, has_script, _asker()).event)
    now = _answer_change(
        command,
        client,
        one,
        lambda now: now.status not in RESUMABLE or now.ended_at_s != one.ended_at_s,
    )
    if now.status == "FAILED" and now.ended_at_s != one.ended_at_s:  # refused, as a new job is
        raise typer.Exit(JOB_FAILED)


def _branch(command: Command, client: Client, one: JobView, step: int) -> None:
    has_script = client.has_script(one.script_sha)
    wish = wishes.branch(one, client.checkpoints(one.id), step, has_script, _asker())
    client.post(wish.event)
    command.say(Text(wish.would))
    assert isinstance(wish.event, JobBranched)
    name, deadline = wish.event.name, time.monotonic() + TAKEN_S_MAX
    while not (begun := [now for now in all_jobs(client) if now.id == name]):
        if time.monotonic() > deadline:
            break
        time.sleep(LOOK_S)
    command.answer(
        {"job": begun[0] if begun else None, "id": name, "from": one.id, "step": step},
        *(Text(f"{now.id} {now.status}: {now.because}") for now in begun),
        *(() if begun else (Text(AWAY, style="yellow"),)),
        then=(f"orchestrator logs -f {name}", f"orchestrator compare {one.id} {name}"),
    )


def change(
    command: Command,
    job: Job = None,
    budget: Annotated[
        str | None, typer.Option(metavar="USD", help="What it may spend in all, or none.")
    ] = None,
    deadline: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Until when: 90m, 2h, a date, hours from now, or none."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Give a job another budget or deadline; what would come of it is said first."""
    if budget is None and deadline is None:
        raise CommandError("nothing to change: give --budget, --deadline or both", USAGE)
    client = command.client()
    ahead_s = client.ahead_s()
    asker = wishes.Asker(by=BY, at_s=time.time() + ahead_s)
    one = find(client, job, LIVE)
    budget_usd: wishes.Bound = "kept" if budget is None else _amount("--budget", budget)
    until_s: wishes.Bound = "kept" if deadline is None else _until_s(deadline, asker.at_s, ahead_s)
    wish = wishes.change(one, budget_usd, until_s, asker)
    command.say(Text(f"{one.id}: {wish.would}"))
    if not (yes or command.json) and sys.stdin.isatty() and not typer.confirm("Change it?"):
        raise CommandError("nothing was changed")
    client.post(wish.event)
    _answer_change(
        command,
        client,
        one,
        lambda now: budget_usd in ("kept", now.budget_usd) and until_s in ("kept", now.deadline_s),
    )


def _amount(option: str, text: str) -> float | None:
    if text == "none":
        return None
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 < value <= AMOUNT_MAX:
        raise CommandError(
            f"{option} {text}: a number above 0, to {AMOUNT_MAX:,.0f}, or none", USAGE
        )
    return value


def _until_s(text: str, now_s: float, ahead_s: float) -> float | None:
    """Return the moment by the manager's clock, which is ahead of ours; a bare number is hours."""
    if text != "none" and not NUMBER.fullmatch(text):
        return to_come("--deadline", text, now_s - ahead_s) + ahead_s
    hours = _amount("--deadline", text)
    return None if hours is None else now_s + hours * HOUR_S


def _asker() -> wishes.Asker:
    return wishes.Asker(by=BY, at_s=time.time())


def _answer_change(
    command: Command, client: Client, one: JobView, changed: Callable[[JobView], bool]
) -> JobView:
    """Wait a little for the manager to act, and answer with the state of the job, which comes back.

    If the manager has looked and does not do it, the error is what it has said of the job last.
    """
    asked, deadline = ticks(), time.monotonic() + TAKEN_S_MAX
    now = find(client, one.id)
    while not changed(now) and time.monotonic() < deadline:
        time.sleep(LOOK_S)
        now = find(client, one.id)
    view = client.view()
    away = not changed(now) and (view is None or view.tick_s < asked)
    if view is not None and not (away or changed(now)):
        said = [each.because for each in view.events if each.who == one.id]
        raise CommandError(f"{one.id}: {said[-1] if said else now.because}")
    command.answer(
        {"job": now, "id": now.id},
        Text(f"{now.id} {now.status}: {now.because}"),
        *((Text(AWAY, style="yellow"),) if away else ()),
        then=("orchestrator status", "orchestrator events"),
    )
    return now
