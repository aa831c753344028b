"""Actions as sentences: when, who, what, and why.

Asking for a list and keeping prices are routine, so they get no sentence.
"""

from typing import assert_never

from orchestrator.actions import (
    AnyAction,
    CloseJob,
    KeepQuotes,
    Launch,
    ListMachines,
    Note,
    OpenJob,
    Regroup,
    StartWorker,
    Stop,
    StopWorker,
    Terminate,
    WriteCheckpoint,
)
from orchestrator.state import SENTENCES_MAX, State
from orchestrator.view import Sentence


def sentence(action: AnyAction, at_s: float) -> Sentence | None:
    """Return the action as a person reads it; `None` for a routine action."""
    job = ""
    match action:
        case ListMachines() | KeepQuotes():
            return None
        case Launch():
            request = action.request
            pool, market = request.pool, request.market.replace("_", "-")
            many = f"{request.count} x " if request.count > 1 else ""
            job = request.tags.get("job", "")
            who, what = request.token, f"buy {many}{pool.type} in {pool.zone} ({market})"
        case Terminate():
            who, what = action.machine_id, "give back"
        case OpenJob():
            who, what = action.order.job, "open"
        case StartWorker():
            who, what = action.job, f"start {action.worker} on {action.machine_id}"
        case StopWorker():
            who, what = action.job, f"stop {action.worker}"
        case Regroup():
            layout = action.layout
            who = action.job
            what = f"layout {layout.describe()} as generation {layout.generation}, {action.when}"
        case WriteCheckpoint():
            who, what = action.job, "write a checkpoint"
        case CloseJob():
            who, what = action.job, "close"
        case Note():
            who, what = action.who, "note"
        case Stop():
            who, what = "manager", "stop"
        case _:
            assert_never(action)
    return Sentence(at_s=at_s, who=who, what=what, because=action.because, job=job)


def remember(state: State, actions: list[AnyAction]) -> None:
    """Keep the newest sentences for the view."""
    for action in actions:
        said = sentence(action, state.now_s)
        if said is not None:
            state.sentences.append(said)
    if len(state.sentences) > 2 * SENTENCES_MAX:
        del state.sentences[:-SENTENCES_MAX]
