"""Which values an event may carry: numbers that decisions can use, and valid names.

An event may be wrong because of a damaged inbox, a different version or a faulty worker. An event
with a value outside of these bounds is refused as a whole: when it is posted, if it comes from a
client, and in `decide` in any case. Otherwise a number that is not finite or absurdly large would
stay in the state and make every later decision fail.
"""

import math
import re
from collections.abc import Iterator
from functools import cache
from typing import Any, get_type_hints

import msgspec

from agent.messages import JobProfiled, NoticeSeen, WorkerReady
from cloud.model import InstanceType, Machine
from orchestrator.events import (
    AnyEvent,
    CatalogueSeen,
    JobSpec,
    JobSubmitted,
    Launched,
    LaunchFailed,
    Listed,
    QuotesKept,
)

TIME_S_MAX = 1e10  # the year 2286; with far larger times, adding a period would round to nothing
COUNT_MAX = 1 << 53
AMOUNT_MAX = 1e18
USD_MAX = 1e9
SLOTS_MAX = 100_000
MICROBATCHES_MAX = 1_000_000
HASTE_MAX = 1000.0
SHOWN_MAX = 60
JOB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def flaw_of(event: AnyEvent) -> str:
    """Return what is wrong with an event, or "" if nothing is."""
    for name, counts in _numbers_of(type(event)):
        value = getattr(event, name)
        if value is not None and not _is_count_or_time(value, name, counts=counts):
            return f"{name} is {_shown(value)}"
    return _deeper_flaw_of(event)


def _deeper_flaw_of(event: AnyEvent) -> str:  # noqa: PLR0911
    """Return what is wrong in an event's nested values, or "" if nothing is."""
    match event:
        case JobSubmitted():
            return _flaw_of_storing(event.spec)
        case WorkerReady():
            return _flaw_of_ready(event)
        case NoticeSeen():
            return _flaw_of_time("deadline_s", event.notice.deadline_s)
        case JobProfiled():
            absurd = next((x for x in _numbers_in(event.profile) if not abs(x) <= AMOUNT_MAX), None)
            return "" if absurd is None else f"a number of the profile is {_shown(absurd)}"
        case CatalogueSeen():
            return _flaw_of_numbers((event.traits, event.pace, event.sold.rooms)) or next(
                (flaw for kind in event.sold.types if (flaw := _flaw_of_type(kind))), ""
            )
        case LaunchFailed():
            return _flaw_of_numbers(event.refusal)
        case Launched():
            return _flaw_of_machine(event.machine)
        case Listed():
            return next(
                (flaw for machine in event.listing.machines if (flaw := _flaw_of_machine(machine))),
                "",
            )
        case QuotesKept():
            for odds in (each for many in event.odds.values() for each in many):
                if not (0 <= odds.above_usd_per_h <= USD_MAX and 0 <= odds.evicted_in_1h <= 1):
                    return f"the odds of a bid are {odds}"
    return ""


def flaw_of_spec(spec: JobSpec) -> str:
    """Return why no manager can run a job with this order, or "" if one can."""
    if not 1 <= spec.slots_min <= spec.slots_max:
        return (
            f"slots_min={_shown(spec.slots_min)} and slots_max={_shown(spec.slots_max)}: "
            "need 1 <= min <= max"
        )
    for name, least, most in (
        ("slots_max", 1, SLOTS_MAX),
        ("depth", 1, SLOTS_MAX),
        ("haste", 0, HASTE_MAX),
        ("budget_usd", 0, USD_MAX),
        ("deadline_s", -TIME_S_MAX, TIME_S_MAX),
        ("max_failures", 0, COUNT_MAX),
        ("max_preemptions", 0, COUNT_MAX),
        ("backup_every_steps", 1, COUNT_MAX),
        ("checkpoint_every_s", 1e-3, TIME_S_MAX),
        ("output_files", 0, COUNT_MAX),
        ("output_bytes", 0, COUNT_MAX),
    ):
        value = getattr(spec, name)
        if value is not None and not least <= value <= most:
            return f"{name}={_shown(value)}: need {least:g} <= {name} <= {most:g}"
    return ""


def _flaw_of_storing(spec: JobSpec) -> str:
    """Return why the job cannot even be stored as a failed one, or "" if it can."""
    if not JOB_NAME.fullmatch(spec.job):
        return f"the job's name is {_shown(spec.job)}: letters, digits, '.', '_', '-' are needed"
    for name in spec.__struct_fields__:
        value = getattr(spec, name)
        lost = isinstance(value, int) and abs(value) > COUNT_MAX
        if lost or (isinstance(value, float) and not math.isfinite(value)):
            return f"{name} is {_shown(value)}"
    return ""


def is_time(value: float) -> bool:
    """Return whether the value can be a time; a simulated clock may be below zero."""
    return -TIME_S_MAX <= value <= TIME_S_MAX


def _is_count_or_time(value: float, name: str, *, counts: bool) -> bool:
    if counts:
        return 0 <= value <= COUNT_MAX
    return is_time(value) if name.endswith("at_s") else -AMOUNT_MAX <= value <= AMOUNT_MAX


def _flaw_of_ready(event: WorkerReady) -> str:
    for name, most in (("microbatches", MICROBATCHES_MAX), ("stages_max", SLOTS_MAX)):
        value = getattr(event, name)
        if not 1 <= value <= most:
            return f"{name} is {_shown(value)}"
    absurd = [x for x in _numbers_in(event.unbuilt) if not 0 <= x <= COUNT_MAX]
    return f"the memory it speaks of is {_shown(absurd[0])}" if absurd else ""


def _flaw_of_type(kind: InstanceType) -> str:
    sound = kind.slots <= SLOTS_MAX and all(0 <= x <= COUNT_MAX for x in _numbers_in(kind))
    sound = sound and 0 < kind.on_demand_usd_per_h <= USD_MAX and 1e-9 <= kind.speed <= 1e9
    return "" if sound else f"the instance type is {kind}"


def _flaw_of_numbers(value: object) -> str:
    absurd = [x for x in _numbers_in(value) if not 0 <= x <= COUNT_MAX]
    return f"a number of it is {_shown(absurd[0])}" if absurd else ""


def _flaw_of_machine(machine: Machine) -> str:
    ended_at_s = machine.launched_at_s if machine.ended_at_s is None else machine.ended_at_s
    flaw = _flaw_of_time("launched_at_s", machine.launched_at_s)
    flaw = flaw or _flaw_of_time("ended_at_s", ended_at_s)
    flaw = flaw or _flaw_of_numbers(machine.refusal)
    return f"{machine.id}: {flaw}" if flaw else ""


def _flaw_of_time(name: str, value: float) -> str:
    return "" if is_time(value) else f"{name} is {_shown(value)}"


def _shown(value: object) -> str:
    """Return the value as a text of bounded length."""
    if isinstance(value, int) and value.bit_length() > 64:
        return f"a number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= SHOWN_MAX else f"{text[:SHOWN_MAX]}..."


@cache
def _numbers_of(kind: type[Any]) -> tuple[tuple[str, bool], ...]:
    """Return the number fields of a kind of event, and whether each is a count."""
    found = []
    for name, hint in get_type_hints(kind).items():
        if hint in (int, float, float | None, int | None):
            found.append((name, hint in (int, int | None)))
    return tuple(found)


def _numbers_in(value: object) -> Iterator[float]:
    """Yield every number in a struct, at any depth."""
    if isinstance(value, (int, float)):
        yield value
    elif isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            yield from _numbers_in(getattr(value, name))
    elif isinstance(value, tuple):
        for each in value:
            yield from _numbers_in(each)
