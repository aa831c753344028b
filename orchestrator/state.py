"""What the manager knows, and the few ways in which a part of it may change.

The state encodes to JSON and back without loss, and the insertion order of dicts is part of it.
Sets are dicts to None, because the order of a set differs from process to process.
"""

from heapq import heappush
from typing import Literal

import msgspec

from agent.layout import Layout
from agent.messages import UNRECORDED, OutputFile, TablesNode, Unbuilt
from agent.profile import Network, Profile, SumFormat
from bidding.markets.observations import PoolRecord, Scaling, Speeds, Times
from cloud.model import (
    EndedBy,
    InstanceType,
    LaunchRequest,
    Pace,
    Place,
    Pool,
    Quote,
    Ref,
    Room,
    Traits,
)
from orchestrator.actions import AnyAction, Note
from orchestrator.errors import OrchestratorError
from orchestrator.events import JobSpec, Odds
from orchestrator.planner.drift import DriftWatch
from orchestrator.planner.plans import LayoutPlan
from orchestrator.settings import Settings
from orchestrator.view import JobStatus, Sentence

LeaseState = Literal[
    "intended", "pending", "booting", "ready", "working", "noticed", "leaving", "ending", "ended"
]
# The agent of a machine that we hold has yet to join, is there, or has fallen silent.
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
    "again",  # an alarm that was put off; its key begins with that alarm's name
]

# The version of the stored format; it goes up with every change after which older states cannot be
# read.
STATE_VERSION = 5
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
    """The brain tried a change of state that is not allowed; the message has the history."""


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
    intended_usd_per_h: float = 0.0  # of launches whose machine is not known yet
    manager_usd: float = 0.0
    manager_usd_per_h: float = 0.0
    traffic_usd: float = 0.0  # between zones: what its steps have cost, and are about to
    traffic_usd_per_h: float = 0.0
    leases: int = 0


class Lease(msgspec.Struct, kw_only=True):
    """A machine that we intend to hold, hold, or held. The token is its name from the start.

    It is `noticed` when the cloud has announced that it will take it; it still works. It is
    `leaving` when its workers are kept out of layouts, because it goes soon or because it is
    released and the job can do without it. It is `ending` when it is being given back.
    """

    token: str
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
    identity: str = ""  # what its cloud signs that it is, if that is not its id
    address: str = ""  # as its cloud lists it
    boot: dict[str, float] = {}  # when each phase of its first boot was over, since that began
    known_at_s: float = 0.0
    clock_ahead_s: float | None = None  # of our clock, at least, as its launch showed
    agent: AgentState = "awaited"
    # Why it is to be given back as soon as the job can do without it; empty if it is not.
    released: str = ""
    # When it is expected to go: the deadline of the cloud's notice, or because its agent is silent.
    goes_at_s: float | None = None
    silent_at_s: float | None = None  # since when its agent has been silent
    worked_at_s: float | None = None
    workers: dict[int, str] = {}
    slot_free_at_s: dict[int, float] = {}
    deaths: int = 0  # how often all its workers died at once, without a step in between
    crashes: int = 0  # how many of these deaths were crashes of the processes, as far as is known
    died_at_s: float = -1.0  # when the last death was
    died_step: int = -1  # the job's step at the last death
    terminations: int = 0
    prices: list[tuple[float, float]] = []
    accrued_usd: float = 0.0
    accrued_at_s: float = 0.0
    reserve_usd: float = 0.0  # for giving it back; set when that begins
    draining_since_s: float | None = None
    draining_usd_per_h: float = 0.0
    drained: bool = False  # the reserve for giving it back is used up
    ended_at_s: float | None = None  # when we took it for ended
    # Since when it has cost nothing, by whom, and whether its cloud says so itself.
    gone_at_s: float = 0.0
    ended_by: EndedBy | None = None
    dated: bool = False
    # What a list shows of it although we took it for ended: a machine that never ran has a disk.
    lingers: Literal["", "disk", "machine"] = ""
    cost_usd: float = 0.0
    # What its time costs on demand, as counted when it ended; None before, and of earlier versions.
    on_demand_usd: float | None = None
    disk_usd_per_h: float = 0.0
    disk_usd: float = 0.0  # the disk's part of `cost_usd`, when it has ended
    disk_from_s: float = 0.0  # it has a disk from its launch on, also while it is pending
    disk_gone_at_s: float = 0.0  # until when its disk was there, if that outlived it
    egress_usd: float = 0.0  # owed once, from when there is a machine
    paid_usd: dict[str, float] = {}  # by each job, when another one got it or its cost changed
    billing: str | None = None  # the rule that was in force when the machine was asked for
    # When it was known last to be pending, where that is free; None once it runs, or where it costs.
    pending_at_s: float | None = None
    seen_at_s: float | None = None  # when the newest list was asked for that has its machine
    missed_at_s: float | None = None  # when the first one after that was, which has it no more
    hardware: str = ""  # the hardware key that a worker on it told

    @property
    def usd_per_h(self) -> float:
        """Return what it costs now, disk included."""
        return self.price_usd_per_h + self.disk_usd_per_h

    @property
    def on_demand_usd_per_h(self) -> float:
        """Return what the same machine would cost on demand, disk included."""
        return self.type.on_demand_usd_per_h + self.disk_usd_per_h

    @property
    def pool(self) -> Pool:
        return self.request.pool

    @property
    def ref(self) -> Ref:
        """Return what the provider is asked to end, once there is a machine."""
        return Ref(self.pool.place, self.machine_id)

    @property
    def stays(self) -> bool:
        """Return whether no reason is known for which it would go."""
        return not self.released and self.state not in ("noticed", "leaving", "ending")

    @property
    def joined(self) -> bool:
        """Return whether its agent is there."""
        return self.agent == "there"

    @property
    def announced(self) -> bool:
        """Return whether the cloud has announced when it will take the machine."""
        return self.state in ("noticed", "leaving") and self.goes_at_s is not None

    @property
    def usable(self) -> bool:
        """Return whether its slots may get workers and its workers may be in layouts."""
        return self.joined and self.state in ("ready", "working", "noticed")


class Worker(msgspec.Struct, kw_only=True):
    id: str
    job: str
    token: str
    slot: int
    started_at_s: float
    ready: bool = False
    proving: bool = False  # its script has reached the loop, and it is in no layout yet
    hardware: str = ""  # the key of what it computes on; empty until it has told it
    microbatch_s: float = 0.0  # what a microbatch took lately; 0 until there is a report
    slow: float = 1.0  # how many times longer than its peers it takes, as layouts assume
    doubted_at_s: float | None = None  # since when its speed has differed from that assumption
    eased: int = 0  # the generation in which it got fewer microbatches because it was slow
    benched_at_s: float | None = None  # since when it is left out because it is slow
    probed_at_s: float | None = None
    probes: int = 0


class PoolState(msgspec.Struct, kw_only=True):
    pool: Pool
    kind: InstanceType  # as its place sells it: the newest quote of the on-demand price is in it
    spot_usd_per_h: float | None = None
    quoted_at_s: float = 0.0
    odds: tuple[Odds, ...] = ()  # of bids, if the market takes bids and enough is known
    sold: bool = True  # it is in the newest catalogue
    leases: dict[str, None] = {}
    record: PoolRecord = PoolRecord()  # how long it held spot machines for us, and how they ended


class Block(msgspec.Struct, kw_only=True):
    """What a refusal reaches is left alone until a time; `strikes` counts refusals in a row.

    With `room`, so many machines may be asked for meanwhile: only more were refused; `again` counts
    how often in a row more were asked for after that time, and refused.
    """

    until_s: float
    because: str
    strikes: int = 0
    room: int = 0
    again: int = 0


class PlaceState(msgspec.Struct, kw_only=True):
    place: Place
    traits: Traits | None = None
    pace: Pace | None = None
    recipe: str = ""  # the digest of how machines are made there now
    rooms: tuple[Room, ...] = ()
    rooms_at_s: float = 0.0  # when the quotas were read
    closed: str = ""  # why it cannot be used, as it was said
    listed_at_s: float = 0.0
    heard_at_s: float | None = None  # when the first list of this life was asked for
    quoted_at_s: float | None = None  # when it last sent prices, even if none had changed
    stale: bool = False  # its prices are too old, and a sentence has said so
    listing_asked_at_s: float = 0.0
    listing_wanted: bool = True
    listing_out: bool = False
    clean_at_s: float = -1.0  # when the last list was asked for that had no machine of ours
    failures: int = 0
    error: str = ""  # of the newest list, if that has failed
    left_out: bool = False  # of the settings, so nobody can ask for a list
    cannot_end: str = ""  # why something there could not be ended when it was tried last
    orphans: dict[str, float] = {}
    inherited: dict[
        str, None
    ] = {}  # lives of managers before this journal that had something there

    @property
    def key(self) -> str:
        return self.place.key

    @property
    def unsafe(self) -> str:
        """Return why nothing is to be bought there now: it could neither be found nor ended."""
        if self.cannot_end:
            return f"what costs money there cannot be ended: {self.cannot_end}"
        return "it does not say what is held there" if self.failures else ""

    @property
    def costly(self) -> str:
        """Return why what is held there may cost money that it should not."""
        if self.cannot_end:
            return f"{self.key}: what costs money there cannot be ended: {self.cannot_end}"
        return f"{self.key} does not answer: {self.error}" if self.error else ""


class Progress(msgspec.Struct, kw_only=True):
    """How far a job is, as its keeper reports, and which states and files are kept."""

    step: int = 0
    begun_step: int = 0  # the step of another job from which this one goes on
    steps_total: int = 0
    loss: float | None = None
    step_s: float = 0.0
    # Of the last parts of the work that were computed, those that slower workers gave to faster ones.
    given: int = 0
    computed: int = 0
    # What a step takes on one slot; it stays known after the job's end.
    slot_step_s: float = 0.0
    # When a step was committed last.
    at_s: float = 0.0
    trained_from_s: float | None = None
    # The time of the keeper's newest report of a commit, by the keeper's clock.
    heard_at_s: float = -1.0
    # Reports of generations up to this one are from before a rewind.
    fence_generation: int = -1
    rewound: list[tuple[float, int, int]] = []
    steps_lost: int = 0
    backup_step: int = 0
    checkpoint_step: int = 0
    # The step at which it began to drain. A checkpoint of an earlier step was on its way before, so
    # it does not end the draining.
    drained_from: int = 0
    # Whether the sums since the backup are on the manager's machine, too.
    sums_kept: bool = True
    # Up to which step they were not, before they were kept again.
    unkept_step: int = 0
    state_stored: bool = False  # it goes straight from workers to the store
    export_uri: str = ""
    # What its script has logged last; None stands for a number that is not finite.
    logged: dict[str, float | None] = {}
    logged_step: int = -1
    # What it keeps in `session.state`, in words, and behind which step; the count is all entries.
    state: tuple[tuple[str, str], ...] = ()
    state_count: int = 0
    state_step: int = -1
    # The files that it has written last, the newest first.
    output: tuple[OutputFile, ...] = ()
    output_files: int = 0
    output_bytes: int = 0


class Thought(msgspec.Struct, frozen=True, kw_only=True):
    """What the bidder said of a job last, for people; no decision rests on it."""

    job: str
    at_s: float
    because: str
    # What an hour of a slot's work is expected to cost, by market and pool; the cheapest of them.
    usd_per_slot_h: dict[str, dict[str, float]]


class Shut(msgspec.Struct, frozen=True):
    """A pool whose machines are of another kind than the job's: how often in a row, and since when."""

    times: int
    since_s: float


class Market(msgspec.Struct, kw_only=True):
    """What a job wants from the market, and what has happened to it there."""

    # When the bidder is asked again at the latest.
    think_at_s: float = 0.0
    # Since when it keeps what is left after a loss, while a replacement is refused.
    short_since_s: float | None = None
    # What it waits for while it holds too little to run.
    waiting: str = ""
    preemptions: int = 0
    # How many of the preemptions were before the last resume; `max_preemptions` ignores these.
    forgiven: int = 0
    # What changes really took.
    times: Times = Times()
    # What a step took at each size of the footprint.
    scaling: Scaling = Scaling()
    # How fast it has seen types of machines to be.
    speeds: Speeds = Speeds()
    # The hardware keys that the newest machines of a type have told, by pool.
    told: dict[str, dict[str, list[str]]] = {}
    # Since when an exact job has had too few machines of its kind to train, whether it was to buy
    # some more of them after long, and how many in a row of a type that had its kind came that are
    # of another one.
    lacks_since_s: float | None = None
    sought: bool = False
    strangers: int = 0
    # How often a pool has sold machines of another kind only, by pool.
    shut: dict[str, Shut] = {}


class Kind(msgspec.Struct, frozen=True):
    """Machines that round alike, as far as is known: see `brain.holdings.alike`."""

    accelerator: str
    hardware: str = ""  # their key; empty until one has told it


class Tables(msgspec.Struct, frozen=True, kw_only=True):
    """Who serves, copies and computes in a job of served tables, for people."""

    stage: int
    partitions: int
    nodes: tuple[TablesNode, ...]


class LayoutState(msgspec.Struct, kw_only=True):
    """The layout of a job, what is known of its model, and what a change of layout costs."""

    generation: int = 0
    # The layout asked for last, and when the first layout was asked for.
    current: Layout | None = None
    begun_at_s: float | None = None
    # The newest generation that committed a step.
    acknowledged: int = 0
    # The step at which it did.
    acknowledged_step: int = 0
    # Generations that were asked for because of a loss and have not committed a step yet.
    mending: list[int] = []
    tables: Tables | None = None
    # Workers whose loss stops the step that is being computed.
    serving: dict[str, None] = {}
    # A worker that was serving is gone, and no layout without it has been asked for yet.
    urgent: bool = False
    settle_at_s: float | None = None
    microbatches: int = 0
    state_bytes: int = 0
    exchange: SumFormat = "float32"
    # Whether the script wants sums in an order that does not depend on the layout.
    exact: bool = True
    # What an exact job keeps to, what its newest step was computed on, and the first step that
    # machines of another kind have computed.
    kind: Kind | None = None
    trained: Kind | None = None
    unlike_step: int | None = None
    # The sizes of an unbuilt model, whose weights are made on the workers that hold them.
    unbuilt: Unbuilt | None = None
    # Why the model cannot be cut into stages; empty if it can.
    uncuttable: str = UNRECORDED
    stages_max: int = 1
    # The model was cut, and then a step did not match the recording.
    taken_back: bool = False
    profile: Profile | None = None
    # The network as it was measured, before any scaling.
    told: Network | None = None
    # What a step sends between zones costs, by generation from the last one that committed a step on.
    steps_usd: dict[int, float] = {}
    # The last generation that committed a step, also if a newer layout had been asked for by then.
    worked: int = 0
    # What all steps so far have sent cost.
    sent_usd: float = 0.0
    # The plan of the newest layout, with its predicted times, and why it was chosen.
    plan: LayoutPlan | None = None
    chosen: str = ""
    watch: DriftWatch = DriftWatch()
    refitted_at_s: float = 0.0
    # What is missing while no layout fits.
    unfit: str = ""
    # How many morphs were voluntary, the pause of each, and the last one rejected as not worth it.
    morphs: int = 0
    morph_pauses_s: list[float] = []
    refused: str = ""
    recoveries_s: list[float] = []

    @property
    def step_usd(self) -> float:
        """Return what a step of the newest layout sends between zones."""
        return self.steps_usd.get(self.generation, 0.0)


class Trouble(msgspec.Struct, kw_only=True):
    """What has gone wrong in a job, as far as it matters for trying again."""

    failures: int = 0
    failed_at_s: float = -1.0
    failed_step: int = -1
    # The step near which its process crashed last, and how often it crashed there, by machine.
    crash_step: int = -1
    crashes: dict[str, int] = {}
    # Stalls in a row without a step in between, and how often all workers were restarted.
    stalls: int = 0
    refreshed: int = 0
    # How long a worker may take to be ready, once the usual time was not enough.
    ready_s: float = 0.0
    # How many machines in a row wore out, because workers kept dying on them without a step in
    # between, and when the first of them did.
    worn: int = 0
    worn_at_s: float = 0.0
    # What is stored and cannot be read, while the job waits for it.
    unread: str = ""
    # Since when the trained model could not be stored.
    unstored_at_s: float | None = None


class Job(msgspec.Struct, kw_only=True):
    """What a person asked for, what became of it, and what it holds."""

    spec: JobSpec
    status: JobStatus
    because: str
    history: list[Moved]
    submitted_at_s: float
    ended_at_s: float | None = None
    # How long it lay ended in total, before each resume.
    lain_s: float = 0.0
    # The status that it gets when it has drained, and why.
    ending: tuple[JobStatus, str] | None = None
    # When these alarms are due; one that rings earlier was set before the job was resumed.
    drain_due_s: float = 0.0
    stall_due_s: float = 0.0
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
    def exact(self) -> bool:
        """Return whether its bits may not depend on its machines."""
        return self.spec.exact and self.layouts.exact

    @property
    def active(self) -> bool:
        """Return whether it may hold machines."""
        return self.status in ("PROVISIONING", "RUNNING", "RECOVERING")

    @property
    def ended(self) -> bool:
        return self.status in ("SUCCEEDED", "FAILED", "CANCELLED")

    @property
    def workers_max(self) -> int:
        """Return the most workers that would have work.

        The microbatches bound the replicas, and the stages bound the workers of each.
        """
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
        """Return the fewest workers to train with, each stage of a depth that was asked for included.

        It is at most `workers_max`, so that no job waits for workers without work.
        """
        stages = min(self.spec.depth or 1, self.layouts.stages_max)
        return min(max(self.spec.slots_min, stages), self.workers_max)


class State(msgspec.Struct, kw_only=True, tag_field="version", tag=STATE_VERSION):
    """Everything that decisions rest on. Only `decide` changes it."""

    settings: Settings = Settings()
    epoch: int = 0
    salt: str = ""  # random for each life of the manager
    lives: dict[str, None] = {}  # of this journal, as launch tokens name them; the newest last
    namesakes: dict[str, None] = {}  # lives of other managers that use our deployment's name
    ledger: str = (
        ""  # the first salt of this journal: what is owed in another one is not in these sums
    )
    now_s: float = 0.0
    skew_s: float = 0.0  # how far the manager's clock is behind `now_s`, which never goes back
    wake_at_s: float = 0.0
    # The last time without a manager that was longer than machines live without one: from and to.
    away: tuple[float, float] | None = None
    hears_until_s: float = 0.0  # until then it may have to hear what waited while it stood still
    house: str = ""
    stopping: bool = False
    stopped: bool = False
    serial: int = 0
    alarms: list[tuple[float, Alarm, str]] = []
    places: dict[str, PlaceState] = {}
    blocks: dict[str, Block] = {}  # by what a refusal reaches: see `brain.leases.reach_of`
    types: dict[str, InstanceType] = {}
    pools: dict[str, PoolState] = {}
    leases: dict[str, Lease] = {}
    machines: dict[str, str] = {}  # machine id -> token, of live leases
    strangers: dict[str, tuple[str, int]] = {}  # joined before we knew the machine: address, slots
    ended_leases: dict[str, Lease] = {}  # by token; those that had a machine, the newest last
    dropped: dict[str, Lease] = {}  # by token; no list had a machine of theirs
    # Ended leases of which a list may still say that they cost something else.
    owing: dict[str, None] = {}
    jobs: dict[str, Job] = {}
    live_jobs: dict[str, None] = {}
    # Of the newest job that may hold machines; of that one only, so that this stays small.
    thought: Thought | None = None
    # Jobs whose layout is chosen once the whole event has been handled.
    unsettled: dict[str, None] = {}
    # Jobs for which the bidder is asked once the whole event has been handled.
    considered: dict[str, None] = {}
    workers: dict[str, Worker] = {}
    account: Account = msgspec.field(default_factory=Account)
    unkept: list[Quote] = []  # prices that have not been sent to the history yet
    kept_at_s: float | None = None  # when prices were last sent there
    sentences: list[Sentence] = []


def next_serial(state: State) -> int:
    state.serial += 1
    return state.serial


def set_alarm(state: State, at_s: float, alarm: Alarm, key: str = "") -> None:
    heappush(state.alarms, (max(at_s, state.now_s), alarm, key))


def set_stall_alarm(state: State, job: Job, at_s: float) -> None:
    """Set the job's alarm of silence; an earlier one does not count any more."""
    job.stall_due_s = max(at_s, state.now_s)
    set_alarm(state, job.stall_due_s, "stall", job.id)


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


def keys_of(request: LaunchRequest) -> tuple[str, ...]:
    """Return the names of the leases of a launch: its token, or a name for each of its machines."""
    if request.count == 1:
        return (request.token,)
    return tuple(f"{request.token}/{index}" for index in range(request.count))


def claimed(state: State, token: str, index: int) -> Lease | None:
    """Return the lease that claims this machine of a launch."""
    return state.leases.get(token) or state.leases.get(f"{token}/{index}")


def settled(state: State, token: str, index: int) -> Lease | None:
    """Return the lease of this machine of a launch, if it has ended."""
    for key in (token, f"{token}/{index}"):
        found = state.ended_leases.get(key) or state.dropped.get(key)
        if found is not None:
            return found
    return None


def leases_of(state: State, job: Job) -> list[Lease]:
    """Return the leases that the job pays for."""
    return [state.leases[token] for token in job.leases]


def move_job(state: State, out: list[AnyAction], job: Job, to: JobStatus, because: str) -> None:
    """Change a job's status, and note a sentence about it for a person."""
    if to not in JOB_MOVES[job.status]:
        raise IllegalTransition(
            f"job {job.id}: {job.status} -> {to} ({because}); history: {job.history}"
        )
    job.status, job.because = to, because
    job.history.append(Moved(state.now_s, to, because))
    del job.history[:-HISTORY_MAX]
    note(out, job.id, f"{to}: {because}")


def want_layout(state: State, job: Job) -> None:
    """Ask for a new choice of layout; it is made once, after the whole event has been handled."""
    state.unsettled[job.id] = None


def consider(state: State, job: Job) -> None:
    """Have the bidder asked for the job, once the whole event has been handled."""
    state.considered[job.id] = None


def newcomer(state: State, job: Job) -> None:
    """Wait `settle_s` for other newcomers, so that one layout takes them all in."""
    soon_s = state.now_s + state.settings.settle_s
    if job.layouts.settle_at_s is None or job.layouts.settle_at_s > soon_s:
        job.layouts.settle_at_s = soon_s
        set_alarm(state, soon_s, "settle", job.id)


def finished_computing(job: Job) -> bool:
    """Return whether the last step is committed and all its workers can deliver the model."""
    workers = job.layouts.current.workers if job.layouts.current is not None else ()
    return (
        0 < job.progress.steps_total <= job.progress.step
        and bool(workers)
        and job.workers.keys() >= {*workers}
    )
