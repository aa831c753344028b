"""Events: what happened. Every event carries its time; the manager never reads a clock.

Reports from instances (`agent.messages`) are used unchanged. The other events are defined here.
"""

import msgspec

from agent.messages import AnyReport, NanPolicy, Sums
from cloud.model import (
    Closed,
    Listing,
    Machine,
    Pace,
    Place,
    Quote,
    Ref,
    Refusal,
    Sold,
    Traits,
)
from orchestrator.settings import Settings


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag=True):
    at_s: float


class ManagerStarted(Event, frozen=True, kw_only=True):
    """A manager took over under a new epoch; an earlier manager started all that it finds."""

    epoch: int
    settings: Settings = Settings()
    house: str = ""  # which life of the house; a new one means that a person started it again
    salt: str = ""  # random, and part of every launch token: see `brain.leases.new_token`


class Tick(Event, frozen=True, kw_only=True):
    """The time that the manager asked to be woken at has come."""


class CatalogueSeen(Event, frozen=True, kw_only=True):
    """What a place sells, and how machines are made there from now on."""

    place: Place
    sold: Sold
    traits: Traits | None = None
    pace: Pace | None = None


class PlaceClosed(Event, frozen=True, kw_only=True):
    """A place that the settings name cannot be used; no region means the whole cloud."""

    closed: Closed


class QuotesSeen(Event, frozen=True, kw_only=True):
    place: Place
    quotes: tuple[Quote, ...]


class Odds(msgspec.Struct, frozen=True, kw_only=True):
    """The share of machines evicted within the hour, if the bid is so much above the price.

    It is taken from times in which the market was in the same mood as now.
    """

    above_usd_per_h: float
    evicted_in_1h: float


class QuotesKept(Event, frozen=True, kw_only=True):
    """Prices were added to the history; `odds` by pool key, if they were asked for."""

    odds: dict[str, tuple[Odds, ...]] = {}
    error: str = ""


class Listed(Event, frozen=True, kw_only=True):
    """The provider's own list of what is ours in one place, asked for at `asked_at_s`."""

    asked_at_s: float
    listing: Listing


class ListFailed(Event, frozen=True, kw_only=True):
    place: Place
    error: str


class Launched(Event, frozen=True, kw_only=True):
    token: str
    machine: Machine


class LaunchFailed(Event, frozen=True, kw_only=True):
    """No machine was started, as the refusal says; without one, only the list can tell."""

    token: str
    code: str
    error: str
    refusal: Refusal | None = None


class Terminated(Event, frozen=True, kw_only=True):
    """The provider says that this costs nothing any more."""

    ref: Ref


class JobSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a person asked for."""

    job: str
    script: str
    script_sha: str
    argv: tuple[str, ...] = ()
    slots_min: int = 1
    slots_max: int = 4
    depth: int | None = None  # stages of a pipeline; None: the planner chooses
    budget_usd: float | None = None
    deadline_s: float | None = None
    haste: float = 0.5  # how much more a machine's work may cost than the cheapest
    max_failures: int = 3
    max_preemptions: int | None = None
    nan: NanPolicy = "fail"
    backup_every_steps: int = 10
    sums: Sums = "always"
    checkpoint_every_s: float = 60.0
    from_url: str = ""
    output_files: int = 1000  # the most files of session.output that are kept
    output_bytes: int = 1 << 30


class JobSubmitted(Event, frozen=True, kw_only=True):
    spec: JobSpec


class JobCancelled(Event, frozen=True, kw_only=True):
    job: str
    by: str


class JobResumed(Event, frozen=True, kw_only=True):
    job: str
    by: str


class ShutdownAsked(Event, frozen=True, kw_only=True):
    """Give back every machine and end."""

    by: str


AnyEvent = (
    AnyReport
    | ManagerStarted
    | Tick
    | CatalogueSeen
    | PlaceClosed
    | QuotesSeen
    | QuotesKept
    | Listed
    | ListFailed
    | Launched
    | LaunchFailed
    | Terminated
    | JobSubmitted
    | JobCancelled
    | JobResumed
    | ShutdownAsked
)
