"""Events: what happened. Every event carries its time; the manager never reads a clock.

Reports from instances (`agent.messages`) are used unchanged. The other events are defined here.
"""

from typing import Literal

import msgspec

from agent.messages import AnyReport, NanPolicy, Sums, TransportKind
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
from cloud.ranges import (
    Amount,
    Count,
    Haste,
    JobName,
    Name,
    Period,
    Portion,
    Positive,
    Slots,
    Text,
    Time,
    Usd,
)
from orchestrator.settings import Settings


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag=True):
    at_s: Time


class ManagerStarted(Event, frozen=True, kw_only=True):
    """A manager took over under a new epoch; an earlier manager started all that it finds."""

    epoch: Count
    settings: Settings = Settings()
    house: Name = ""  # which life of the house; a new one means that a person started it again
    salt: Name = ""  # random, and part of every launch token: see `brain.leases.new_token`


class Tick(Event, frozen=True, kw_only=True):
    """The time that the manager asked to be woken at has come."""


class EventSetAside(Event, frozen=True, kw_only=True):
    """An event that no decision could be made about: nothing of it is used.

    It lies under `agent.keys.INBOX_ASIDE`. `entry` is its id in the inbox, "" if it came from a
    cloud.
    """

    kind: Name
    entry: Name
    why: Text


class PartSetAside(Event, frozen=True, kw_only=True):
    """A job or a pool on which a turn fails that cannot be left out: nothing of it is used."""

    part: Literal["job", "pool"]
    name: Name
    why: Text


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

    above_usd_per_h: Usd
    evicted_in_1h: Portion


class QuotesKept(Event, frozen=True, kw_only=True):
    """Prices were added to the history; `odds` by pool key, if they were asked for."""

    odds: dict[Name, tuple[Odds, ...]] = {}
    error: Text = ""


class Listed(Event, frozen=True, kw_only=True):
    """The provider's own list of what is ours in one place, asked for at `asked_at_s`."""

    asked_at_s: Time
    listing: Listing


class ListFailed(Event, frozen=True, kw_only=True):
    place: Place
    error: Text
    left_out: bool = False  # of the settings: nobody can ask it before they change


class Launched(Event, frozen=True, kw_only=True):
    token: Name
    machine: Machine


class LaunchFailed(Event, frozen=True, kw_only=True):
    """No machine was started, as the refusal says; without one, only the list can tell."""

    token: Name
    code: Name
    error: Text
    refusal: Refusal | None = None


class Terminated(Event, frozen=True, kw_only=True):
    """The provider says that this costs nothing any more."""

    ref: Ref


class EndFailed(Event, frozen=True, kw_only=True):
    """The provider did not end this; it refused to for good if `refused`, else nothing is known."""

    ref: Ref
    error: Text
    refused: bool


class BootSeen(Event, frozen=True, kw_only=True):
    """A machine said at the join door how far its first boot is, `took_s` after it began.

    `admitted`: it has proved who it is; `node`: it is a node of our cluster, and its agent may start;
    `unlike`: it can be none, and ends, and `why` says what its image lacks.
    """

    machine_id: Name
    phase: Literal["admitted", "node", "unlike"]
    took_s: Amount
    why: Name = ""


class JobSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a person asked for."""

    job: JobName
    script: Name
    script_sha: Name
    argv: tuple[Text, ...] = ()
    slots_min: Slots = 1
    slots_max: Slots = 4
    depth: Slots | None = None  # stages of a pipeline; None: the planner chooses
    budget_usd: Usd | None = None
    deadline_s: Time | None = None
    haste: Haste = 0.5  # how much more a machine's work may cost than the cheapest
    max_failures: Count = 3
    max_preemptions: Count | None = None
    exact: bool = True  # only machines that round alike are in a layout
    nan: NanPolicy = "fail"
    backup_every_steps: Positive = 10
    sums: Sums = "always"
    checkpoint_every_s: Period = 60.0
    max_replay_s: Period = 60.0
    tail_s: Period = 600.0  # what the script may take after its loop
    checkpoints_kept: Positive = 2
    from_url: Text = ""
    output_files: Count = 1000  # the most files of session.output that are kept
    output_bytes: Count = 1 << 30
    transport: TransportKind = "sockets"


class JobSubmitted(Event, frozen=True, kw_only=True):
    spec: JobSpec


class JobCancelled(Event, frozen=True, kw_only=True):
    job: Name
    by: Name


class JobResumed(Event, frozen=True, kw_only=True):
    job: Name
    by: Name


class JobBranched(Event, frozen=True, kw_only=True):
    """A new job of this name begins like an earlier one, from a state that this one has stored."""

    job: Name
    name: JobName
    step: Count
    from_url: Text
    by: Name


class JobChanged(Event, frozen=True, kw_only=True):
    """A person sets bounds of a job; None is no bound, and a kept one stays as it is."""

    job: JobName
    budget_usd: Usd | Literal["kept"] | None
    deadline_s: Time | Literal["kept"] | None
    by: Name


class ShutdownAsked(Event, frozen=True, kw_only=True):
    """Give back every machine and end."""

    by: Name
    house: Name = ""  # the life of the house that is asked; "" for any


AnyEvent = (
    AnyReport
    | ManagerStarted
    | Tick
    | EventSetAside
    | PartSetAside
    | CatalogueSeen
    | PlaceClosed
    | QuotesSeen
    | QuotesKept
    | Listed
    | ListFailed
    | Launched
    | LaunchFailed
    | Terminated
    | EndFailed
    | BootSeen
    | JobSubmitted
    | JobCancelled
    | JobResumed
    | JobBranched
    | JobChanged
    | ShutdownAsked
)
