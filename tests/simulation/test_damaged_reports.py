"""Hours of deployments in which reports of workers and agents come with wrong values in them."""

import math
import os
from random import Random
from typing import Any

import msgspec
import pytest

from agent.messages import (
    AgentJoined,
    AgentLost,
    AnyReport,
    JobProfiled,
    Logged,
    NoticeSeen,
    Paced,
    WorkerLost,
    WorkerProving,
    WorkerReady,
)
from orchestrator.events import AnyEvent, EventSetAside
from orchestrator.simulated import timeline
from orchestrator.simulated.restarts import live
from orchestrator.simulated.scenario import wild
from orchestrator.validity import conflict_in
from tests.simulation.fuzzed import FLOATS, INTS, WORDS

SAID_BY_INSTANCES = (
    AgentJoined
    | AgentLost
    | JobProfiled
    | Logged
    | NoticeSeen
    | Paced
    | WorkerLost
    | WorkerProving
    | WorkerReady
)
DAMAGED = 0.1  # of these reports
SEEDS, BLOCK = int(os.environ.get("SPOT_SEEDS", "24")), 12
# What a job comes to may be wrong, because what its workers said was.
OF_THE_JOB = ("failed without need", "succeeded at step", ", generation ")


def leaves(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The places of all plain values in a document."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return [place for key, one in items for place in leaves(one, (*at, key))]
    return [at]


def damaged(report: AnyReport, dice: Random) -> AnyEvent:
    """The report with one other value in it, as it comes out of the inbox."""
    document = msgspec.json.decode(msgspec.json.encode(report))
    *way, last = dice.choice([at for at in leaves(document) if at[-1] != "type"])
    part = document
    for key in way:
        part = part[key]
    value = part[last]
    if isinstance(value, str):
        part[last] = dice.choice(WORDS)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        wrong = [
            *INTS,
            *filter(math.isfinite, FLOATS),
            value * 1000,
            value / 1000,
        ]
        part[last] = dice.choice(wrong)
    else:
        part[last] = dice.choice([None, True, False])
    try:
        found: AnyEvent = msgspec.convert(document, AnyEvent)
        flaw = conflict_in(found)
    except (msgspec.ValidationError, OverflowError) as error:
        flaw = str(error)
    if flaw:
        return EventSetAside(at_s=report.at_s, kind=type(report).__name__, entry="1-1", why=flaw)
    return found


@pytest.mark.parametrize("first", range(0, SEEDS, BLOCK))
def test_wrong_values_of_instances_cost_no_more_than_their_job(first, monkeypatch):
    """The manager lives, no machine is without an owner, no cap is passed, and all comes to an end."""
    dice, told = Random(first), timeline.Inbox.report
    asides, taken = 0, 0

    def report(self: timeline.Inbox, event: AnyReport, delay_s: float, **more: Any) -> None:
        nonlocal asides, taken
        if isinstance(event, SAID_BY_INSTANCES) and dice.random() < DAMAGED:
            event = damaged(event, dice)  # type: ignore[assignment]
            asides, taken = asides + isinstance(event, EventSetAside), taken + 1
        told(self, event, delay_s, **more)

    monkeypatch.setattr(timeline.Inbox, "report", report)
    stories = [live(wild(seed)) for seed in range(first, first + BLOCK)]
    failed = [
        f"seed {story.seed}: {story.breach}\n  " + "\n  ".join(story.last_sentences[-8:])
        for story in stories
        if story.breach and not any(part in story.breach for part in OF_THE_JOB)
    ]
    assert not failed, "\n".join(failed)
    assert min(asides, taken - asides) > 10
