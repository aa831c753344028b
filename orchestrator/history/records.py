"""The values of the history: what the manager publishes for it, and what it answers.

A `Reading` is everything that costs, at one moment, with what each machine is doing. Two readings
make charges (`books`); a history keeps them, with series of numbers and with events (`store`), and
answers from them (`reader`).
"""

from typing import Literal, get_args

import msgspec

from orchestrator.kinds import Kind

Cause = Literal[
    "useful",
    "redone",
    "proving",
    "saving",
    "restoring",
    "morphing",
    "waiting",
    "idle",
    "manager",
    "traffic",
    "disk",
    "billing",
    "other",
]
CAUSES: tuple[Cause, ...] = get_args(Cause)
MEANING: dict[Cause, str] = {
    "useful": "machines computed steps for the first time",
    "redone": "machines computed steps again that were lost",
    "proving": "joining workers proved that they compute the same",
    "saving": "all steps were done, or the job ended: its state was put away, its script went on",
    "restoring": "a job went on after the loss of a worker",
    "morphing": "a job changed its layout",
    "waiting": "machines booted, or scripts were loading",
    "idle": "machines had no work, or were being given back",
    "manager": "the manager's own machine",
    "traffic": "between zones, and to bring a state to a machine",
    "disk": "the disks of machines",
    "billing": "what the rule of the cloud adds at the end of a machine, or refunds",
    "other": "what no machine explains: a job that was set aside, or time without this history",
}

By = Literal["cause", "job", "pool", "day", "machine"]
BYS: tuple[By, ...] = get_args(By)


# --- what the manager publishes -----------------------------------------------------------------


class LeaseReading(msgspec.Struct, frozen=True, array_like=True):
    """A machine that costs or has cost: the money so far, and what its slots are doing.

    `causes` are shares of the machine that add up to one.
    """

    token: str
    machine: str
    job: str
    pool: str
    market: str
    from_s: float
    ended_at_s: float | None  # since when it costs nothing
    cost_usd: float
    disk_usd: float
    egress_usd: float
    usd_per_h: float  # disk included
    on_demand_usd_per_h: float  # without its disk, which is a cause of its own
    causes: tuple[tuple[Cause, float], ...]
    why: str  # it was bought, or, once it has ended, why that was


class JobReading(msgspec.Struct, frozen=True, array_like=True):
    job: str
    spent_usd: float
    traffic_usd: float


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """The ledger at one moment: every machine that costs, or has ended a moment ago."""

    at_s: float
    ledger: str  # another name is another journal, whose sums begin at zero
    spent_usd: float
    manager_usd: float
    leases: tuple[LeaseReading, ...]
    jobs: tuple[JobReading, ...]


# --- what the history answers -------------------------------------------------------------------


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """A number over the time that begins at `at_s`: its mean, its range, and its last value."""

    at_s: float
    mean: float
    least: float
    most: float
    last: float


class Happening(msgspec.Struct, frozen=True, kw_only=True):
    """A sentence of the past, with its job and its kind."""

    id: str  # its place in the order of all, and a link to it
    at_s: float
    kind: Kind
    job: str  # empty if it is about no job
    who: str
    what: str
    because: str


class Spent(msgspec.Struct, frozen=True, kw_only=True):
    """One line of where the money went; the lines add up to the ledger."""

    key: str
    usd: float
    hours: float  # of machines; 0 where no machine was
    causes: dict[Cause, float]  # in dollars


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """What one machine cost one job for one cause; `token` names its line in the ledger."""

    token: str  # empty where no machine was, or the history has forgotten it
    machine: str
    pool: str
    market: str
    from_s: float | None  # when the machine was bought
    to_s: float | None  # empty while it is held
    job: str
    cause: Cause
    usd: float
    hours: float


class Daily(msgspec.Struct, frozen=True, kw_only=True):
    """What one cause cost a job in one pool on one day (UTC)."""

    day: int  # since 1970-01-01
    job: str
    pool: str  # empty where no machine was
    market: str
    cause: Cause
    usd: float
    hours: float
    on_demand_usd: float  # of the same hours


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """One machine of the past, from its start to its end, and its money by cause."""

    token: str
    machine: str
    job: str
    pool: str
    market: str
    from_s: float
    to_s: float | None
    usd: float
    on_demand_usd_per_h: float
    why: str
    causes: dict[Cause, float]


class Remembered(msgspec.Struct, frozen=True, kw_only=True):
    """A job of the past; `view` is what the manager showed of it last, as JSON."""

    id: str
    status: str
    submitted_at_s: float
    ended_at_s: float | None
    view: msgspec.Raw
