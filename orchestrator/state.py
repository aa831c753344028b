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
from orchestrator.errors import OrchestratorError
from orchestrator.events import JobSpec, Odds
from orchestrator.morph.drift import Watch
from orchestrator.morph.plans import Plan
from orchestrator.settings import Settings
from orchestrator.view import JobStatus, Sentence

LeaseState = Literal[
    "intended", "pending", "booting", "ready", "working", "noticed", "leaving", "ending", "ended"
]
# Of a machine's agent, as the machine is held: it has yet to join, it is there, or it has fallen silent.
AgentState = Literal["awaited", "there", "silent"]
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

# Of the form in which a state is stored; higher with every change that an older one cannot be read as.
STATE_VERSION = 2
HISTORY_MAX = 32
SENTENCES_MAX = 200

LEASE_MOVES: dict[LeaseState, tuple[LeaseState, ...]] = {
    "intended": ("pending", "ended"),
    "pending": ("booting", "ready", "noticed", "ending", "ended"),
    "booting": ("ready", "noticed", "ending", "ended"),
    "ready": ("working", "booting", "noticed", "ending", "ended"),
    "working": ("ready", "booting", "noticed", "leaving", "ending", "ended"),
    "noticed": ("booting", "ready", "leaving", "ending", "ended"),
    "leaving": ("working", "booting", "ready", "ending", "ended"),
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


class IllegalTransition(OrchestratorError):  # noqa: N818 - it names what happened
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
    """A machine that we intend to hold, hold, or held. The token is its name from the first thought.

    It is `noticed` when the cloud has said that it goes, and works on; `leaving` when its workers are kept out of
    layouts, since it goes soon or is released and can be done without; `ending` when it is given back.
    """

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
    agent: AgentState = "awaited"
    # Why it shall be given back as soon as the job can do without it.
    released: str = ""
    # When it goes, as far as is known: by the cloud's notice, or since its agent is silent.
    goes_at_s: float | None = None
    worked_at_s: float | None = None
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
        return not self.released and self.state not in ("noticed", "leaving", "ending")

    @property
    def joined(self) -> bool:
        """Its agent is there."""
        return self.agent == "there"

    @property
    def announced(self) -> bool:
        """The cloud has said when it takes it."""
        return self.state in ("noticed", "leaving") and self.goes_at_s is not None

    @property
    def usable(self) -> bool:
        """Its slots may get workers and its workers may be in layouts."""
        return self.joined and self.state in ("ready", "working", "noticed")


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


class Progress(msgspec.Struct, kw_only=True):
    """How far a job is, as its keeper says, and what is kept of that."""

    step: int = 0
    steps_total: int = 0
    loss: float | None = None
    step_s: float = 0.0
    # The same on one slot; known after the end too.
    slot_step_s: float = 0.0
    # When a step was committed last.
    at_s: float = 0.0
    trained_from_s: float | None = None
    # By the keeper's clock: its newest report of a commit.
    heard_at_s: float = -1.0
    # Reports of generations up to this one are from before a rewind.
    fence_generation: int = -1
    rewound: list[tuple[float, int, int]] = []
    steps_lost: int = 0
    backup_step: int = 0
    checkpoint_step: int = 0
    # The step when it began to drain: a checkpoint of an earlier one was on its way before.
    drained_from: int = 0
    # Gradients are on the manager's machine: they lead on from the backup.
    sums_kept: bool = True
    export_uri: str = ""
    # What its script has logged last; None is not finite.
    logged: dict[str, float | None] = {}
    logged_step: int = -1
    # The newest files that it has written, the newest first.
    output: tuple[OutputFile, ...] = ()
    output_files: int = 0
    output_bytes: int = 0


class Market(msgspec.Struct, kw_only=True):
    """What a job wants of the market, and what it has met there."""

    # When the bidder is asked again, whatever happens until then.
    think_at_s: float = 0.0
    # Since when it holds too little, and more is refused for now.
    short_since_s: float | None = None
    # What it waits for, while it holds too little to run.
    waiting: str = ""
    preemptions: int = 0
    # Of these, those before the last resume: `max_preemptions` does not count them.
    forgiven: int = 0
    # What changes really took.
    times: Times = Times()


class LayoutState(msgspec.Struct, kw_only=True):
    """The layout of a job, what is known of its model, and what a change of layout costs."""

    generation: int = 0
    # The one asked for last, and since when there is one.
    current: Layout | None = None
    begun_at_s: float | None = None
    # The newest generation that committed a step.
    acknowledged: int = 0
    # Generations that were asked for because of a loss, and have committed nothing yet.
    mending: list[int] = []
    # Workers whose loss stops the step that is being computed.
    serving: dict[str, None] = {}
    # A worker that was serving is gone, and no layout without it was asked for.
    urgent: bool = False
    settle_at_s: float | None = None
    microbatches: int = 0
    state_bytes: int = 0
    # What a model takes that is built where its layers are kept.
    unbuilt: Unbuilt | None = None
    # Why the model cannot be cut into stages; empty if it can.
    uncuttable: str = UNRECORDED
    stages_max: int = 1
    # It was cut, and a step came that was not as recorded.
    taken_back: bool = False
    profile: Profile | None = None
    # The network as it was measured, whatever it is scaled to since.
    told: Network | None = None
    # What the newest layout is predicted to take, and why it was chosen.
    plan: Plan | None = None
    chosen: str = ""
    watch: Watch = Watch()
    refitted_at_s: float = 0.0
    # What is missing as long as no layout fits.
    unfit: str = ""
    # Changes that nobody forced, what they took, and the one that was not worth it.
    morphs: int = 0
    morph_pauses_s: list[float] = []
    refused: str = ""
    recoveries_s: list[float] = []


class Trouble(msgspec.Struct, kw_only=True):
    """What has gone wrong in a job, as far as it decides whether it is tried again."""

    failures: int = 0
    failed_at_s: float = -1.0
    failed_step: int = -1
    # Near which step its process crashed last, and how often there, by machine.
    crash_step: int = -1
    crashes: dict[str, int] = {}
    # Times without a commit, without a step between them, and how often all workers were started afresh.
    stalls: int = 0
    refreshed: int = 0
    # What a worker gets to be ready, once the usual was not enough.
    ready_s: float = 0.0
    # Machines on which workers kept dying, without a step between them, and the first of them.
    worn: int = 0
    worn_at_s: float = 0.0
    # What is stored and cannot be read, as long as it is waited for.
    unread: str = ""
    # Since when the trained model has nowhere to go.
    unstored_at_s: float | None = None


class Job(msgspec.Struct, kw_only=True):
    """What a person asked for, what became of it, and what it holds."""

    spec: JobSpec
    status: JobStatus
    because: str
    history: list[Moved]
    submitted_at_s: float
    ended_at_s: float | None = None
    # How long it had ended, until it was resumed.
    lain_s: float = 0.0
    # What it becomes when it has drained.
    ending: tuple[JobStatus, str] | None = None
    account: Account
    leases: dict[str, None] = {}
    workers: dict[str, None] = {}
    progress: Progress = msgspec.field(default_factory=Progress)
    market: Market = msgspec.field(default_factory=Market)
    layouts: LayoutState = msgspec.field(default_factory=LayoutState)
    trouble: Trouble = msgspec.field(default_factory=Trouble)

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
        known = self.layouts
        if not known.microbatches:
            return most
        depth = known.stages_max if known.profile is not None else 1
        if self.spec.depth is not None:
            depth = min(self.spec.depth, known.stages_max)
        return min(most, known.microbatches * depth)

    @property
    def workers_min(self) -> int:
        """As many as a person wants at least; but no job waits for workers that could not compute."""
        return min(self.spec.slots_min, self.workers_max)


class State(msgspec.Struct, kw_only=True, tag_field="version", tag=STATE_VERSION):
    """Everything that decisions rest on. Only `decide` changes it."""

    settings: Settings = Settings()
    epoch: int = 0
    salt: str = ""  # of this life of the manager
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
    if job.layouts.settle_at_s is None or job.layouts.settle_at_s > soon_s:
        job.layouts.settle_at_s = soon_s
        set_alarm(state, soon_s, "settle", job.id)
