"""What the manager knows, and the few ways in which a part of it may change.

The state encodes to JSON and back without loss; insertion order of the dicts is part of it. Sets are
dicts to None, because the order of a set differs from process to process.
"""

from heapq import heappush
from typing import Literal

import msgspec

from agent.layout import Layout
from agent.messages import UNRECORDED, OutputFile, Unbuilt
from agent.profile import Network, Profile
from bidding.observed import PoolRecord, Times
from cloud.model import InstanceType, LaunchRequest, Pool, Quote
from orchestrator.actions import AnyAction, Note
from orchestrator.events import JobSpec, Odds
from orchestrator.morph.drift import Watch
from orchestrator.morph.plans import Plan
from orchestrator.settings import Settings
from orchestrator.view import JobStatus, Sentence

LeaseState = Literal[
    "intended", "pending", "booting", "ready", "working", "noticed", "ending", "ended"
]
Alarm = Literal[
    "control",
    "boot",
    "worker",
    "staff",
    "settle",
    "pace",
    "probe",
    "notice",
    "ending",
    "dry",
    "drain",
    "stall",
]

HISTORY_MAX = 32
SENTENCES_MAX = 200

LEASE_MOVES: dict[LeaseState, tuple[LeaseState, ...]] = {
    "intended": ("pending", "ended"),
    "pending": ("booting", "ready", "noticed", "ending", "ended"),
    "booting": ("ready", "noticed", "ending", "ended"),
    "ready": ("working", "booting", "noticed", "ending", "ended"),
    "working": ("ready", "booting", "noticed", "ending", "ended"),
    "noticed": ("booting", "ready", "ending", "ended"),
    "ending": ("ended",),
    "ended": (),
}
JOB_MOVES: dict[JobStatus, tuple[JobStatus, ...]] = {
    "PENDING": ("PROVISIONING", "FAILED", "CANCELLED", "SUCCEEDED"),
    "PROVISIONING": ("RUNNING", "DRAINING", "SUCCEEDED", "FAILED", "CANCELLED"),
    "RUNNING": ("RECOVERING", "DRAINING", "SUCCEEDED", "FAILED", "CANCELLED"),
    "RECOVERING": ("RUNNING", "DRAINING", "SUCCEEDED", "FAILED", "CANCELLED"),
    "DRAINING": ("SUCCEEDED", "FAILED", "CANCELLED"),
    "SUCCEEDED": (),
    "FAILED": ("PENDING",),
    "CANCELLED": ("PENDING",),
}


class IllegalTransition(Exception):  # noqa: N818 - it names what happened
    """The brain tried to move something in a way that makes no sense; the history says how it came."""


class Moved(msgspec.Struct, frozen=True):
    at_s: float
    to: str
    because: str


class Account(msgspec.Struct, kw_only=True):
    """Money as straight lines: an amount at `at_s` and how fast it grows. See `ledger.py`."""

    cap_usd: float | None = None
    at_s: float = 0.0
    spent_usd: float = 0.0
    usd_per_h: float = 0.0
    on_demand_usd: float = 0.0
    on_demand_usd_per_h: float = 0.0
    committed_usd: float = 0.0
    draining_usd_per_h: float = 0.0
    intended_usd_per_h: float = 0.0  # of launches that no machine is known of yet
    manager_usd: float = 0.0
    manager_usd_per_h: float = 0.0
    leases: int = 0


class Lease(msgspec.Struct, kw_only=True):
    """A machine that we intend to hold, hold, or held. The token is its name from the first thought."""

    token: str
    provider: str
    request: LaunchRequest
    type: InstanceType
    job: str
    state: LeaseState
    history: list[Moved]
    intended_at_s: float
    price_usd_per_h: float
    ceiling_usd_per_h: float  # disk included
    why_bought: str
    why_ended: str = ""
    machine_id: str = ""
    known_at_s: float = 0.0
    joined: bool = False
    leaving: str = ""  # why it shall be given back as soon as the job can do without it
    doomed: bool = False  # its workers are kept out of layouts
    deadline_s: float | None = None
    worked_at_s: float | None = None
    lost_at_s: float | None = None
    workers: dict[int, str] = {}
    slot_free_at_s: dict[int, float] = {}
    deaths: int = 0  # of all its workers at once, without a step between them
    crashes: int = 0  # of them: the processes went, as far as is known by themselves
    died_at_s: float = -1.0  # the last of them
    died_step: int = -1  # how far the job was then
    terminations: int = 0
    prices: list[tuple[float, float]] = []
    accrued_usd: float = 0.0
    accrued_at_s: float = 0.0
    reserve_usd: float = 0.0  # for giving it back, when that began
    draining_since_s: float | None = None
    draining_usd_per_h: float = 0.0
    drained: bool = False  # what was reserved for giving it back is used up
    ended_at_s: float | None = None
    cost_usd: float = 0.0
    disk_usd_per_h: float = 0.0
    disk_usd: float = 0.0  # part of what it has cost, when it has ended
    egress_usd: float = 0.0  # owed once, when it is a machine
    billing: str | None = None  # the rule that was in force when it was asked for

    @property
    def usd_per_h(self) -> float:
        """What it costs now, disk included."""
        return self.price_usd_per_h + self.disk_usd_per_h

    @property
    def on_demand_usd_per_h(self) -> float:
        """What the same would cost on demand."""
        return self.type.on_demand_usd_per_h + self.disk_usd_per_h

    @property
    def pool(self) -> Pool:
        return self.request.pool

    @property
    def stays(self) -> bool:
        """Nothing is known that would end it."""
        return not (self.leaving or self.doomed) and self.state not in ("noticed", "ending")

    @property
    def usable(self) -> bool:
        """Its slots may get workers and its workers may be in layouts."""
        return self.joined and not self.doomed and self.state in ("ready", "working", "noticed")


class Worker(msgspec.Struct, kw_only=True):
    id: str
    job: str
    token: str
    slot: int
    started_at_s: float
    ready: bool = False
    proving: bool = False  # its script is in its loop, and it is not in a layout yet
    microbatch_s: float = 0.0  # what one took lately; 0 as long as nobody said
    slow: float = 1.0  # how many times longer than on its peers it takes, as layouts reckon with it
    doubted_at_s: float | None = None  # since when it has not been what layouts reckon with
    eased: int = 0  # the generation in which it got fewer microbatches for being slow
    benched_at_s: float | None = None  # since when it is left out for being slow
    probed_at_s: float | None = None
    probes: int = 0


class PoolState(msgspec.Struct, kw_only=True):
    pool: Pool
    spot_usd_per_h: float | None = None
    quoted_at_s: float = 0.0
    odds: tuple[Odds, ...] = ()  # of bids, where the market takes them and enough is known
    sold: bool = True  # it is in the newest catalogue
    blocked_until_s: float = 0.0
    blocked_because: str = ""
    strikes: int = 0
    leases: dict[str, None] = {}
    record: PoolRecord = PoolRecord()  # how long it held spot machines for us, and how they ended


class ProviderState(msgspec.Struct, kw_only=True):
    name: str
    listed_at_s: float = 0.0
    quoted_at_s: float | None = None  # when it last said what things cost, be it nothing new
    stale: bool = False  # that was too long ago, and has been said
    listing_asked_at_s: float = 0.0
    listing_wanted: bool = True
    listing_out: bool = False
    clean_at_s: float = -1.0  # when a list without any machine of ours was asked for
    slow_until_s: float = 0.0
    slow_because: str = ""
    failures: int = 0
    orphans: dict[str, float] = {}


class Job(msgspec.Struct, kw_only=True):
    spec: JobSpec
    status: JobStatus
    because: str
    history: list[Moved]
    submitted_at_s: float
    account: Account
    ended_at_s: float | None = None
    lain_s: float = 0.0  # how long it had ended, until it was resumed
    leases: dict[str, None] = {}
    workers: dict[str, None] = {}
    generation: int = 0
    begun_at_s: float | None = None  # since when it has a layout
    layout: Layout | None = None  # the one asked for last
    acknowledged: int = 0  # the newest generation that committed a step
    mending: list[
        int
    ] = []  # generations that were asked for because of a loss, and have committed nothing yet
    serving: dict[str, None] = {}  # workers whose loss stops the step that is being computed
    urgent: bool = False  # who was serving is gone, and no layout without them was asked for
    settle_at_s: float | None = None
    microbatches: int = 0
    steps_total: int = 0
    state_bytes: int = 0
    unbuilt: Unbuilt | None = None  # it is built where it is kept
    uncuttable: str = UNRECORDED  # why its model cannot be cut into stages; empty if it can
    stages_max: int = 1
    taken_back: bool = False  # it was cut, and a step came that was not as recorded
    profile: Profile | None = None
    told: Network | None = None  # the network as it was measured, whatever it is scaled to since
    plan: Plan | None = None  # what the newest layout is predicted to take
    chosen: str = ""  # why it is that layout, and what the next best would be
    watch: Watch = Watch()
    refitted_at_s: float = 0.0
    unfit: str = ""  # what is missing as long as no layout fits
    trained_from_s: float | None = None
    morphs: int = 0  # that nobody forced
    morph_pauses_s: list[float] = []
    refused: str = ""  # the layout that would be better, but not by enough
    step: int = 0
    loss: float | None = None
    step_s: float = 0.0
    slot_step_s: float = 0.0  # the same on one slot; known after the end too
    progress_at_s: float = 0.0
    heard_at_s: float = -1.0  # by the keeper's clock: its newest report of a commit
    fence_generation: int = -1  # reports of generations up to this one are from before a rewind
    rewound: list[tuple[float, int, int]] = []
    preemptions: int = 0
    forgiven: int = 0  # of these: what `max_preemptions` counts begins anew with a resume
    failures: int = 0
    failed_at_s: float = -1.0
    failed_step: int = -1
    crash_step: int = -1  # near which its process crashed last
    crashes: dict[str, int] = {}  # how often it did there, by machine
    stalls: int = 0  # without a step between them
    unread: str = ""  # what is stored and cannot be read, as long as it is waited for
    worn: int = 0  # machines on which workers kept dying, without a step between them
    worn_at_s: float = 0.0  # the first of them
    unstored_at_s: float | None = None  # since when the trained model has nowhere to go
    refreshed: int = 0  # how often all of its workers were started afresh
    ready_s: float = 0.0  # what a worker gets to be ready, once that was not enough
    steps_lost: int = 0
    recoveries_s: list[float] = []
    times: Times = Times()  # what changes really took
    backup_step: int = 0
    sums_kept: bool = True  # on the manager's machine: they lead on from the backup
    checkpoint_step: int = 0
    export_uri: str = ""
    logged: dict[str, float | None] = {}  # what its script has logged last; None is not finite
    logged_step: int = -1
    output: tuple[OutputFile, ...] = ()  # the newest files that it has written, the newest first
    output_files: int = 0
    output_bytes: int = 0
    waiting: str = ""  # what it waits for, while it holds too little to run
    think_at_s: float = 0.0  # when the bidder is asked again, whatever happens until then
    short_since_s: float | None = (
        None  # since when it holds too little, and more is refused for now
    )
    ending: tuple[JobStatus, str] | None = None  # what it becomes when it has drained
    drained_from: int = 0  # its step then: a checkpoint of an earlier one was on its way before

    @property
    def id(self) -> str:
        return self.spec.job

    @property
    def active(self) -> bool:
        """It may hold machines."""
        return self.status in ("PROVISIONING", "RUNNING", "RECOVERING")

    @property
    def ended(self) -> bool:
        return self.status in ("SUCCEEDED", "FAILED", "CANCELLED")

    @property
    def workers_max(self) -> int:
        """More workers than microbatches would have nothing to do."""
        most = self.spec.slots_max
        if not self.microbatches:
            return most
        depth = self.stages_max if self.profile is not None else 1
        if self.spec.depth is not None:
            depth = min(self.spec.depth, self.stages_max)
        return min(most, self.microbatches * depth)

    @property
    def workers_min(self) -> int:
        """As many as a person wants at least; but no job waits for workers that could not compute."""
        return min(self.spec.slots_min, self.workers_max)


class State(msgspec.Struct, kw_only=True):
    """Everything that decisions rest on. Only `decide` changes it."""

    settings: Settings = Settings()
    epoch: int = 0
    now_s: float = 0.0
    skew_s: float = 0.0  # how far the manager's clock is behind `now_s`, which never goes back
    wake_at_s: float = 0.0
    house: str = ""
    stopping: bool = False
    stopped: bool = False
    serial: int = 0
    alarms: list[tuple[float, Alarm, str]] = []
    providers: dict[str, ProviderState] = {}
    types: dict[str, InstanceType] = {}
    pools: dict[str, PoolState] = {}
    leases: dict[str, Lease] = {}
    machines: dict[str, str] = {}  # machine id -> token, of live leases
    strangers: dict[str, tuple[str, int]] = {}  # joined before we knew the machine: address, slots
    ended_leases: list[Lease] = []
    jobs: dict[str, Job] = {}
    live_jobs: dict[str, None] = {}
    unsettled: dict[
        str, None
    ] = {}  # jobs whose layout is thought about when the event has been seen
    # Jobs for which the bidder is asked when the event has been seen.
    considered: dict[str, None] = {}
    workers: dict[str, Worker] = {}
    account: Account = msgspec.field(default_factory=Account)
    unkept: list[Quote] = []  # prices that are not in the history yet
    kept_at_s: float | None = None  # when some were last sent there
    sentences: list[Sentence] = []


def next_serial(state: State) -> int:
    state.serial += 1
    return state.serial


def set_alarm(state: State, at_s: float, alarm: Alarm, key: str = "") -> None:
    heappush(state.alarms, (max(at_s, state.now_s), alarm, key))


def note(out: list[AnyAction], who: str, because: str) -> None:
    out.append(Note(who=who, because=because))


def move_lease(lease: Lease, to: LeaseState, at_s: float, because: str) -> None:
    if to not in LEASE_MOVES[lease.state]:
        raise IllegalTransition(
            f"lease {lease.token}: {lease.state} -> {to} ({because}); history: {lease.history}"
        )
    lease.state = to
    lease.history.append(Moved(at_s, to, because))
    del lease.history[:-HISTORY_MAX]


def leases_of(state: State, job: Job) -> list[Lease]:
    """The machines that it pays for."""
    return [state.leases[token] for token in job.leases]


def move_job(state: State, out: list[AnyAction], job: Job, to: JobStatus, because: str) -> None:
    """Every change of a job's status is a sentence that a person can read."""
    if to not in JOB_MOVES[job.status]:
        raise IllegalTransition(
            f"job {job.id}: {job.status} -> {to} ({because}); history: {job.history}"
        )
    job.status, job.because = to, because
    job.history.append(Moved(state.now_s, to, because))
    del job.history[:-HISTORY_MAX]
    note(out, job.id, f"{to}: {because}")


def want_layout(state: State, job: Job) -> None:
    """Something has changed. The layout is thought about once, when all that an event brings has been seen."""
    state.unsettled[job.id] = None


def consider(state: State, job: Job) -> None:
    """The event may call for a purchase: the bidder is asked when all that the event brings has been seen."""
    state.considered[job.id] = None


def newcomer(state: State, job: Job) -> None:
    """Wait a moment for others, so that one layout takes them all in."""
    soon_s = state.now_s + state.settings.settle_s
    if job.settle_at_s is None or job.settle_at_s > soon_s:
        job.settle_at_s = soon_s
        set_alarm(state, job.settle_at_s, "settle", job.id)
