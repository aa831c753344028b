"""Finding a job by what a person typed, and the commands `cancel`, `resume` and `change`."""

import sys
import time
from collections.abc import Callable, Sequence
from typing import Annotated

import typer
from rich.text import Text

from orchestrator import wishes
from orchestrator.cli.command import USAGE, Command, CommandError
from orchestrator.client import Client
from orchestrator.view import JobView
from orchestrator.wishes import ENDED, HOUR_S, RESUMABLE

TAKEN_S_MAX = 10.0
LOOK_S = 0.1
BY = "the command line"
AMOUNT_MAX = 1e9

Job = Annotated[
    str | None, typer.Argument(help="Id of the job, or how it begins. Default: the newest.")
]
OnlyJob = Annotated[str | None, typer.Argument(help="Only this job: its id, or how that begins.")]


def all_jobs(client: Client) -> Sequence[JobView]:
    view = client.view()
    return view.jobs if view is not None else ()


def find(client: Client, name: str | None, first: tuple[str, ...] = ()) -> JobView:
    """Find a job by its id, by the beginning of its id, or the newest job if `name` is None.

    The newest job with a status in `first` is preferred. If several ids begin with `name`, the only
    one that runs, or that has such a status, is taken, and stderr says so.
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
    live = [one for one in all_jobs(client) if one.status not in ENDED]
    one = find(client, job or _only(live, "cancel; running now"))
    client.post(wishes.cancel(one, _asker()).event)
    _answer_change(command, client, one.id, lambda now: now.status in {*ENDED, "DRAINING"})


def resume(command: Command, job: Job = None) -> None:
    """Go on with a failed or cancelled job, from its last step, with the submitted script.

    If the script has changed since, submit it again, with what this job stored: submit SCRIPT
    --from file://.../checkpoints/JOB.
    """
    client = command.client()
    ended = [one for one in all_jobs(client) if one.status in RESUMABLE]
    one = find(client, job or _only(ended, "resume; failed or cancelled"), RESUMABLE)
    has_script = one.status in RESUMABLE and client.has_script(one.script_sha)
    client.post(wishes.resume(one, has_script, _asker()).event)
    _answer_change(command, client, one.id, lambda now: now.status not in RESUMABLE)


def change(
    command: Command,
    job: Job = None,
    budget: Annotated[
        str | None, typer.Option(metavar="USD", help="What it may spend in all, or none.")
    ] = None,
    deadline: Annotated[
        str | None, typer.Option(metavar="HOURS", help="Until when, from now, or none.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Give a job another budget or deadline; what would come of it is said first."""
    if budget is None and deadline is None:
        raise CommandError("nothing to change: give --budget, --deadline or both", USAGE)
    client = command.client()
    asker = wishes.Asker(by=BY, at_s=time.time() + client.ahead_s())
    one = find(client, job)
    budget_usd: wishes.Bound = "kept" if budget is None else _amount("--budget", budget)
    hours: wishes.Bound = "kept" if deadline is None else _amount("--deadline", deadline)
    until_s = asker.at_s + hours * HOUR_S if isinstance(hours, float) else hours
    wish = wishes.change(one, budget_usd, until_s, asker)
    command.say(Text(wish.would))
    if not (yes or command.json) and sys.stdin.isatty() and not typer.confirm("Change it?"):
        raise CommandError("nothing was changed")
    client.post(wish.event)
    _answer_change(
        command,
        client,
        one.id,
        lambda now: budget_usd in ("kept", now.budget_usd) and until_s in ("kept", now.deadline_s),
    )


def _amount(option: str, text: str) -> float | None:
    if text == "none":
        return None
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 < value < AMOUNT_MAX:
        raise CommandError(f"{option} {text}: a number above 0, or none", USAGE)
    return value


def _asker() -> wishes.Asker:
    return wishes.Asker(by=BY, at_s=time.time())


def _answer_change(
    command: Command, client: Client, job_id: str, changed: Callable[[JobView], bool]
) -> None:
    """Wait a little for the manager to act, and answer with the state of the job."""
    deadline = time.monotonic() + TAKEN_S_MAX
    now = find(client, job_id)
    while not changed(now) and time.monotonic() < deadline:
        time.sleep(LOOK_S)
        now = find(client, job_id)
    command.answer(
        {"job": now, "id": now.id},
        Text(f"{now.id} {now.status}: {now.because}"),
        then=("orchestrator status", "orchestrator events"),
    )
