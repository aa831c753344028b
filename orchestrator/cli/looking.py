"""Looking at a job again and again: what there is to see, how old it is, and what is waited for."""

import time
from collections.abc import Iterator
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import NamedTuple, Protocol

import redis

from cloud.clock import ticks
from orchestrator.client import House, NoRoom, NotRunning
from orchestrator.places import Places
from orchestrator.view import JobView, View
from orchestrator.wording import duration, plural

LOOK_S = 0.25
UNKNOWN_S_MAX = 30.0
AWAY_S_MAX = 60.0
SILENT_S = 1.0
OLD_S = 15.0
STILL_S, STILL_STEPS = 15.0, 5
ENDED = frozenset({"SUCCEEDED", "FAILED", "CANCELLED"})


class Source(Protocol):
    """The part of `orchestrator.client.Client` that watching needs."""

    def view(self) -> View | None: ...

    def house(self) -> House: ...


def ended(job: JobView) -> bool:
    return job.status in ENDED


class Look(NamedTuple):
    """The notes say what is waited for, and how old all of it is where it is not of now."""

    view: View
    job: JobView
    notes: tuple[str, ...]


def looks(client: Source, job_id: str) -> Iterator[Look]:
    """The view and the job in it, again and again; waits out a Redis that is coming back."""
    last: Look | None = None
    answered_s = known_s = time.monotonic()
    silence, step, stepped_s = "", -1, 0.0
    asked = _reading(client)
    while True:
        try:
            view = _answer(asked)
        except (Empty, redis.RedisError) as error:
            if not isinstance(error, Empty):
                _give_up(client, job_id, error, time.monotonic() - answered_s)
                silence, asked = str(error), _reading(client)
            known_s = time.monotonic()
            if last is not None:
                age = f"as of {duration(time.monotonic() - answered_s)} ago"
                yield last._replace(notes=(f"{age}: {silence or 'Redis does not answer'}",))
            continue
        answered_s, silence = time.monotonic(), ""
        job = next((one for one in view.jobs if one.id == job_id), None) if view else None
        if view is not None and job is not None:
            known_s = answered_s
            if job.step != step:
                step, stepped_s = job.step, answered_s
            last = Look(view, job, tuple(_notes(view, job, answered_s - stepped_s)))
            yield last
        elif answered_s - known_s > UNKNOWN_S_MAX:
            raise TimeoutError(
                f"the manager has said nothing of {job_id} for {UNKNOWN_S_MAX:.0f} s; "
                "look with: orchestrator status"
            )
        time.sleep(LOOK_S)
        asked = _reading(client)


def _reading(client: Source) -> "SimpleQueue[View | Exception | None]":
    """The view, or why there is none, when there is an answer; that may take longer than a person is left alone."""
    answer: SimpleQueue[View | Exception | None] = SimpleQueue()

    def read() -> None:
        try:
            answer.put(client.view())
        except Exception as error:  # it is raised where it is waited for
            answer.put(error)

    Thread(target=read, name="look", daemon=True).start()
    return answer


def _answer(asked: "SimpleQueue[View | Exception | None]") -> View | None:
    found = asked.get(timeout=SILENT_S)
    if isinstance(found, Exception):
        raise found
    return found


def _give_up(client: Source, job_id: str, error: Exception, away_s: float) -> None:
    """A house that lives may be waited for, as long as it has nothing but room to wait for itself."""
    lives = Path(f"/proc/{client.house().pid}").exists()
    if not lives or (away_s > AWAY_S_MAX and not isinstance(error, NoRoom)):
        raise NotRunning(
            f"the manager went away while {job_id} was watched; `orchestrator up` brings "
            "it back, and the job goes on from its last step"
        ) from None
    time.sleep(LOOK_S)


def _notes(view: View, job: JobView, still_s: float) -> Iterator[str]:
    """What a person would else take for hanging."""
    if ended(job):
        return
    if old := age(view):
        yield old
    mine = [one for one in view.machines if one.job == job.id]
    if booting := [one for one in mine if one.state in ("intended", "pending", "booting")]:
        first_s = view.at_s - min(one.launched_at_s for one in booting)
        yield f"{plural(len(booting), 'machine')} booting for {duration(first_s)}"
    if not job.workers and any(one.state == "ready" for one in mine):
        yield "its workers start"
    if job.workers and still_s > max(STILL_S, STILL_STEPS * job.step_s):
        yield f"no step for {duration(still_s)}"


def why_silent(view: View | None, places: Places) -> str:
    """Why the newest manager has said nothing yet, if it has ended by itself: Ray starts one after the other."""
    try:
        why = places.broke_off.read_text()
    except OSError:
        return ""
    if view is not None and not age(view):
        return ""  # the one after it did better
    return f"it ended by itself, again and again: {why}. More is in {places.log('loop')}"


def age(view: View) -> str:
    """How old the view is, if a person should know that: the manager renews it all the time."""
    old_s = ticks() - view.tick_s
    return (
        f"as of {duration(old_s)} ago: the manager has said nothing since" if old_s > OLD_S else ""
    )
