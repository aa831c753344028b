"""The view: one value, made from the manager's state, read by the CLI and the dashboard.

The manager publishes it to Redis (`orch:view`) on every change, at most a few times a second.
"""

from typing import Literal

import msgspec

from agent.messages import OutputFile
from cloud.clock import HOUR_S

JobStatus = Literal[
    "PENDING",
    "PROVISIONING",
    "RUNNING",
    "RECOVERING",
    "DRAINING",
    "SUCCEEDED",
    "FAILED",
    "CANCELLED",
]


class MachineView(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    token: str
    job: str  # the job that it works for, which pays for it
    pool: str
    market: str
    state: str  # as a lease has it; a machine that boots no more and has to join again is `silent`
    price_usd_per_h: float
    on_demand_usd_per_h: float
    cost_usd: float
    launched_at_s: float
    ended_at_s: float | None
    why_bought: str
    why_ended: str
    disk_usd: float = 0.0  # part of the cost
    egress_usd: float = 0.0  # part of the cost
    bid_usd_per_h: float | None = None  # None if the market takes no bids
    boot: dict[str, float] = {}  # when each phase of its first boot was over, since that began


class Unlisted(msgspec.Struct, frozen=True, kw_only=True):
    """Live machines of one kind that the list of machines has no room for."""

    pool: str
    market: str
    state: str
    count: int


class SeatView(msgspec.Struct, frozen=True, kw_only=True):
    """A place in a job's layout: which machine computes it, and how fast."""

    machine: str
    slot: int
    microbatch_s: float  # what a microbatch took lately; 0 until there is a report
    slow: float  # how many times longer than its peers it takes, as layouts assume


class ServerView(msgspec.Struct, frozen=True, kw_only=True):
    """What a machine does in a job of served tables; the manager's own has no name."""

    machine: str
    slot: int
    serves: int  # partitions
    copies: int
    blocks: int  # that it computes


class JobView(msgspec.Struct, frozen=True, kw_only=True):
    """One job with its own costs; the costs of all jobs together are in `CostView`."""

    id: str
    script: str
    script_sha: str
    argv: tuple[str, ...]
    status: JobStatus
    because: str
    step: int
    steps_total: int
    loss: float | None
    step_s: float
    slot_step_s: float  # what a step takes on one slot, as the newest layout showed; 0 for unknown
    layout: str
    generation: int
    workers: int
    preemptions: int
    failures: int
    steps_lost: int
    machines: int
    spent_usd: float
    reserved_usd: float  # for giving back what is held
    budget_usd: float | None
    deadline_s: float | None = None
    now_usd_per_h: float
    on_demand_usd: float
    saved_usd: float
    traffic_usd: float = 0.0  # part of what was spent: between zones, by its layouts
    submitted_at_s: float
    ended_at_s: float | None
    eta_s: float | None
    took_s: float  # so far, without the time between an end and a resume
    recoveries_s: tuple[float, ...]
    backup_step: int
    checkpoint_step: int
    export_uri: str
    sums_kept: bool = True  # whether the sums since the backup are kept
    exact: bool = True  # only machines that round alike are in a layout
    unlike_step: int | None = None  # the first step that machines of another kind have computed
    bits: str = ""  # the same for people, in a line
    microbatches: int = 0  # of a step; 0 until a worker has reported
    stages_max: int = 1
    uncuttable: str = ""
    chains: tuple[tuple[SeatView, ...], ...] = ()  # of the layout, each stage after stage
    # Of the last microbatches, or grains of served tables: those that slower workers gave to faster.
    given: int = 0
    computed: int = 0
    tables_stage: int = 0  # of a job of served tables; 0 for another
    partitions: int = 0
    servers: tuple[ServerView, ...] = ()
    logged: dict[str, float | None] = {}  # what its script has logged last; None is not finite
    logged_step: int = -1
    # What its script keeps in `session.state`, in words; the count is all entries.
    state: tuple[tuple[str, str], ...] = ()
    state_count: int = 0
    state_step: int = -1
    output: tuple[OutputFile, ...] = ()  # the last files of `session.output`, the newest first
    output_files: int = 0
    output_bytes: int = 0
    begun_step: int = 0  # the step of another job from which this one went on

    @property
    def steps_done(self) -> int:
        """Return the steps that this job itself has done and paid for."""
        return max(0, self.step - self.begun_step)

    @property
    def rest_usd(self) -> float:
        """Return what its steps to come cost at the present price and pace; 0 while unknown."""
        return 0.0 if self.eta_s is None else self.now_usd_per_h * self.eta_s / HOUR_S

    @property
    def short_usd(self) -> float:
        """Return by how much its budget is too small for them and for the reserve."""
        return _short_usd(self, self.rest_usd)


class CostView(msgspec.Struct, frozen=True, kw_only=True):
    """The costs of everything; `on_demand_usd` is what the same machine time costs on demand."""

    spent_usd: float
    reserved_usd: float  # for giving back what is held
    budget_usd: float | None
    now_usd_per_h: float
    on_demand_usd: float
    saved_usd: float
    manager_usd: float
    traffic_usd: float = 0.0  # part of what was spent: between zones, by the layouts of jobs
    machines: int  # how many are held now


def _short_usd(paid: JobView | CostView, rest_usd: float) -> float:
    if paid.budget_usd is None or not rest_usd:
        return 0.0
    return max(0.0, paid.spent_usd + paid.reserved_usd + rest_usd - paid.budget_usd)


class Sentence(msgspec.Struct, frozen=True, kw_only=True):
    """One line of `orchestrator events`: when, about what, and why in one sentence."""

    at_s: float
    who: str
    what: str
    because: str
    job: str = ""  # that a purchase is for; a launch has no machine by which the job could be found


class PoolView(msgspec.Struct, frozen=True, kw_only=True):
    pool: str
    slots: int
    spot_usd_per_h: float | None
    on_demand_usd_per_h: float
    held: int
    blocked_until_s: float | None
    blocked_because: str = ""
    evicted_in_1h: float | None = None  # the odds, as decisions assume them
    # What an hour of a slot's work is expected to cost, for the job of the view's `thought`.
    spot_usd_per_slot_h: float | None = None
    on_demand_usd_per_slot_h: float | None = None
    spot_room: int | None = None  # machines that the quotas leave; None if none is known
    on_demand_room: int | None = None
    on_demand_blocked_until_s: float | None = None
    on_demand_blocked_because: str = ""


class ThoughtView(msgspec.Struct, frozen=True, kw_only=True):
    """What the bidder said of the newest active job last: why it holds what it holds."""

    job: str
    at_s: float
    because: str


class View(msgspec.Struct, frozen=True, kw_only=True):
    at_s: float
    tick_s: float = 0.0  # the same by `cloud.clock.ticks` of the manager's machine
    epoch: int
    deployment: str
    jobs: tuple[JobView, ...]
    machines: tuple[MachineView, ...]
    pools: tuple[PoolView, ...]
    cost: CostView
    events: tuple[Sentence, ...]
    thought: ThoughtView | None = None
    unlisted: tuple[Unlisted, ...] = ()  # machines beside those that are listed
    costly: tuple[str, ...] = ()  # why what is held in a place may cost more than it should
    ending: bool = False  # everything is given back, and then the house ends

    @property
    def short_usd(self) -> float:
        """Return by how much the budget of everything is too small, as far as that is known."""
        return _short_usd(self.cost, sum(job.rest_usd for job in self.jobs))
