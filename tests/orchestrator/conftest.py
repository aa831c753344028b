"""A manager in a test's hand: events in, actions out, and a small cloud that does as it is told."""

from typing import Any, TypeVar

import msgspec
import pytest

from agent.messages import (
    UNRECORDED,
    AgentJoined,
    AgentLost,
    CheckpointWritten,
    JobCompleted,
    JobProfiled,
    NoticeSeen,
    Paced,
    Progress,
    Regrouped,
    WorkerFailed,
    WorkerLost,
    WorkerReady,
)
from agent.profile import Link, Network, Profile, Section
from cloud.errors import CloudError, Refused
from cloud.model import (
    DEPLOYMENT_TAG,
    InstanceType,
    Listing,
    Machine,
    Notice,
    Pool,
    Quote,
    Sold,
    Traits,
)
from orchestrator.actions import AnyAction, Launch, ListMachines, StartWorker, Terminate
from orchestrator.brain.decide import decide
from orchestrator.events import (
    AnyEvent,
    CatalogueSeen,
    JobCancelled,
    JobResumed,
    JobSpec,
    JobSubmitted,
    Launched,
    LaunchFailed,
    Listed,
    ManagerStarted,
    QuotesSeen,
    Terminated,
    Tick,
)
from orchestrator.preview import Model
from orchestrator.sale import PlannedSale
from orchestrator.settings import Settings
from orchestrator.state import Job, Lease, State

A = TypeVar("A")
SMALL = InstanceType(
    name="small", cloud="local", slots=1, memory_bytes=1 << 30, on_demand_usd_per_h=0.10
)
LARGE = InstanceType(
    name="large", cloud="local", slots=2, memory_bytes=2 << 30, on_demand_usd_per_h=0.19
)
POOLS = tuple(
    Pool(cloud="local", region="east", zone=zone, type=kind.name)
    for zone in ("east-a", "east-b")
    for kind in (SMALL, LARGE)
)
PLACE = POOLS[0].place
PRICES = (0.03, 0.06, 0.04, 0.07)


class Hand:
    """Feeds events to `decide` and remembers what it wanted."""

    def __init__(self, **settings: Any) -> None:
        self.settings = Settings(deployment="test", **settings)
        self.state = State()
        self.at_s = 1000.0
        self.said: list[AnyAction] = []
        self.machines: dict[str, Machine] = {}
        self.served = self.waited = 0
        self.stages = 1  # into which the script can be cut
        self.steps_total = 100
        self.prices = PRICES  # at which it starts
        self.traits: Traits | None = None  # of the cloud, as it says itself
        self.kinds = (SMALL, LARGE)
        self.keys: dict[str, str] = {}  # the hardware keys of types

    # --- events -------------------------------------------------------------------------------

    def see(self, event: AnyEvent) -> list[AnyAction]:
        self.state, out = decide(self.state, event)
        self.said += out
        return out

    def start(self, epoch: int = 1) -> list[AnyAction]:
        out = self.see(ManagerStarted(at_s=self.at_s, epoch=epoch, settings=self.settings))
        sold = Sold(types=self.kinds, pools=POOLS)
        self.see(CatalogueSeen(at_s=self.at_s, place=PLACE, sold=sold, traits=self.traits))
        self.price(*self.prices)
        return out

    def catalogue(self, *pools: Pool, **more: Any) -> list[AnyAction]:
        """A place says what it sells: these pools, or all that are known; `more` is of what it sells or of itself."""
        of_place = {name: more.pop(name) for name in ("traits", "pace") if name in more}
        known = pools or tuple(each.pool for each in self.state.pools.values())
        sold = Sold(**{"types": tuple(self.state.types.values()), "pools": known, **more})
        place = known[0].place
        return self.see(CatalogueSeen(at_s=self.at_s, place=place, sold=sold, **of_place))

    def quoted(self, pool: Pool, price: float, at_s: float | None = None) -> list[AnyAction]:
        """A place says what one pool costs, since now or another moment."""
        quote = Quote(pool=pool, at_s=self.at_s if at_s is None else at_s, price_usd_per_h=price)
        return self.see(QuotesSeen(at_s=self.at_s, place=pool.place, quotes=(quote,)))

    def completed(self, step: int = 100, job: str = "job", why: str = "") -> list[AnyAction]:
        said = {"loss": 1.5, "weights_sha": "ab", "export_uri": "file:x", "why": why}
        return self.see(JobCompleted(at_s=self.at_s, job=job, step=step, **said))

    def price(self, *prices: float) -> list[AnyAction]:
        quotes = tuple(
            Quote(pool=pool, at_s=self.at_s, price_usd_per_h=price)
            for pool, price in zip(POOLS, prices, strict=True)
        )
        return self.see(QuotesSeen(at_s=self.at_s, place=PLACE, quotes=quotes))

    def train(self, seconds: float, step_s: float = 0.5) -> list[AnyAction]:
        """So much time passes, and now and then a step is committed in the newest layout."""
        end_s, out = self.at_s + seconds, []
        while self.at_s < end_s:
            out += self.wait(min(10.0, end_s - self.at_s))
            self.serve()
            out += self.committed(self.job.progress.step + 1, step_s=step_s)
        return out

    def wait(self, seconds: float) -> list[AnyAction]:
        """Ticks as the world gives them, until so much time has passed; what was said since the last of them."""
        end_s = self.at_s + seconds
        while self.state.wake_at_s <= end_s:
            self.at_s = max(self.at_s, self.state.wake_at_s)
            self.see(Tick(at_s=self.at_s))
        self.at_s = end_s
        out, self.waited = self.said[self.waited :], len(self.said)
        return out

    def submit(self, job: str = "job", **spec: Any) -> list[AnyAction]:
        made = JobSpec(job=job, script="train.py", script_sha="0" * 64, **spec)
        return self.see(JobSubmitted(at_s=self.at_s, spec=made))

    def cancel(self, job: str = "job") -> list[AnyAction]:
        return self.see(JobCancelled(at_s=self.at_s, job=job, by="ann"))

    def resume(self) -> list[AnyAction]:
        return self.see(JobResumed(at_s=self.at_s, job="job", by="bob"))

    def saved(self, step: int) -> list[AnyAction]:
        """A checkpoint of this step is written."""
        return self.see(
            CheckpointWritten(at_s=self.at_s, job="job", step=step, state_bytes=9, uri="x")
        )

    def launched(self, launch: Launch, at_s: float | None = None, state: Any = "running") -> str:
        """The cloud does it."""
        token = launch.request.token
        machine = Machine(
            id=f"i-{token}",
            token=token,
            pool=launch.request.pool,
            market=launch.request.market,
            state=state,
            launched_at_s=self.at_s if at_s is None else at_s,
            tags=launch.request.tags,
        )
        self.machines[machine.id] = machine
        self.see(Launched(at_s=self.at_s, token=token, machine=machine))
        return machine.id

    def refused(self, launch: Launch, error: CloudError | None = None) -> list[AnyAction]:
        """The cloud answers with this error; without one, the pool has no machine to give."""
        error = error or Refused("pool", "NoCapacity", "not now")
        return self.see(
            LaunchFailed(
                at_s=self.at_s,
                token=launch.request.token,
                code=error.code,
                error=str(error),
                refusal=error.refusal,
            )
        )

    def listed(self, *more: Machine) -> list[AnyAction]:
        machines = (*self.machines.values(), *more)
        here = tuple(machine for machine in machines if machine.pool.place == PLACE)
        listing = Listing(place=PLACE, machines=here)
        return self.see(Listed(at_s=self.at_s, asked_at_s=self.at_s, listing=listing))

    def joined(self, machine_id: str, slots: int | None = None) -> list[AnyAction]:
        if slots is None:
            known = self.machines.get(machine_id)
            sold = {kind.name: kind.slots for kind in self.kinds}
            slots = sold.get(known.pool.type, 1) if known is not None else 1
        return self.see(
            AgentJoined(at_s=self.at_s, machine_id=machine_id, address="10.0.0.1", slots=slots)
        )

    def away(self, machine_id: str) -> list[AnyAction]:
        return self.see(AgentLost(at_s=self.at_s, machine_id=machine_id, why="no answer"))

    def notice(self, machine_id: str, left_s: float) -> list[AnyAction]:
        notice = Notice(machine_id=machine_id, kind="terminate", deadline_s=self.at_s + left_s)
        return self.see(NoticeSeen(at_s=self.at_s, notice=notice))

    def becomes(self, machine_id: str, **changes: Any) -> None:
        """What the cloud will say of it from now on."""
        self.machines[machine_id] = msgspec.structs.replace(self.machines[machine_id], **changes)

    def ends(self, machine_id: str, ended_at_s: float, ended_by: Any = "provider") -> None:
        self.becomes(machine_id, state="terminated", ended_by=ended_by, ended_at_s=ended_at_s)

    def taken(self, *machine_ids: str) -> list[AnyAction]:
        """The cloud takes them, or all that are held, and its list says so."""
        for machine_id in machine_ids or [lease.machine_id for lease in self.leases]:
            self.ends(machine_id, self.at_s)
        return self.listed()

    def sells(self, *types: str) -> None:
        """Only machines of these types are sold."""
        for known in self.state.pools.values():
            known.sold = known.pool.type in types

    def terminated(self, machine_id: str) -> list[AnyAction]:
        ref = self.machines.pop(machine_id).ref
        return self.see(Terminated(at_s=self.at_s, ref=ref))

    def ready(
        self, start: StartWorker, steps: int | None = None, **changes: Any
    ) -> list[AnyAction]:
        said = WorkerReady(
            at_s=self.at_s,
            job=start.job,
            worker=start.worker,
            machine_id=start.machine_id,
            microbatches=8,
            steps_total=steps or self.steps_total,
            state_bytes=1 << 20,
            uncuttable="" if self.stages > 1 else UNRECORDED,
            stages_max=self.stages,
            hardware=self.keys.get(self.machines[start.machine_id].pool.type, ""),
        )
        return self.see(msgspec.structs.replace(said, **changes))

    def lost(self, worker: str, job: str = "job") -> list[AnyAction]:
        return self.see(WorkerLost(at_s=self.at_s, job=job, worker=worker, cause="connection"))

    def failed(
        self, worker: str, kind: Any = "exception", step: int | None = None
    ) -> list[AnyAction]:
        detail = 'Traceback\n  File "train.py"\nValueError: bad batch'
        return self.see(
            WorkerFailed(
                at_s=self.at_s, job="job", worker=worker, kind=kind, detail=detail, step=step
            )
        )

    def profiled(self, profile: Profile) -> list[AnyAction]:
        return self.see(JobProfiled(at_s=self.at_s, job="job", worker="w0", profile=profile))

    def paced(self, **slow: float) -> list[AnyAction]:
        """A microbatch takes a second on every worker of the layout, and so many times that on these."""
        each = {worker: slow.get(worker, 1.0) for worker in self.job.layouts.current.workers}
        generation = self.job.layouts.generation
        return self.see(Paced(at_s=self.at_s, job="job", generation=generation, microbatch_s=each))

    def committed(self, step: int, job: str = "job", step_s: float = 0.5) -> list[AnyAction]:
        """The newest layout has committed so many steps."""
        generation = self.state.jobs[job].layouts.generation
        out = self.see(
            Regrouped(at_s=self.at_s, job=job, generation=generation, step=step, pause_s=0.1)
        )
        return out + self.see(
            Progress(
                at_s=self.at_s,
                job=job,
                generation=generation,
                step=step,
                steps_total=self.steps_total,
                loss=2.0,
                step_s=step_s,
            )
        )

    # --- whole stretches ----------------------------------------------------------------------

    def serve(self, steps: int | None = None, *, ready: bool = True) -> None:
        """Whatever is asked for happens at once: machines start, agents join, workers are `ready`."""
        while self.served < len(self.said):
            action = self.said[self.served]
            self.served += 1
            if isinstance(action, Launch) and action.request.token in self.state.leases:
                self.joined(self.launched(action))
            elif isinstance(action, StartWorker) and action.worker in self.state.workers:
                if ready:
                    self.ready(action, steps)
            elif isinstance(action, Terminate) and action.machine_id in self.machines:
                self.terminated(action.machine_id)
            elif isinstance(action, ListMachines):
                self.listed()

    def orders(self, **spec: Any) -> Launch:
        """The one machine that is asked for when this job is submitted."""
        self.start()
        self.submit(**{"slots_max": 1, **spec})
        (launch,) = self.only(self.wait(2.0), Launch)
        return launch

    def begun(self, *, ready: bool = True, **spec: Any) -> "Hand":
        """A job whose workers are there; nothing is committed yet."""
        self.start()
        self.submit(**spec)
        self.wait(2.0)
        self.serve(ready=ready)
        return self

    def goes_on(self, step: int | None = None, job: str = "job") -> None:
        """What is asked for happens, and then a step is committed: this one, or the next."""
        self.wait(2.0)
        self.serve()
        self.wait(2.0)
        self.committed(step or self.state.jobs[job].progress.step + 1, job)

    def served_after(self, seconds: float, times: int = 1) -> None:
        """So often that much time passes, and then what is asked for happens."""
        for _ in range(times):
            self.wait(seconds)
            self.serve()

    def running(self, **spec: Any) -> "Hand":
        """A job that has committed its first step on all the slots that it may have."""
        self.begun(**spec)
        self.wait(2.0)
        self.committed(1)
        return self

    # --- readings -----------------------------------------------------------------------------

    @property
    def job(self) -> Job:
        return self.state.jobs["job"]

    @property
    def leases(self) -> list[Lease]:
        return list(self.state.leases.values())

    def types_in(self) -> set[str]:
        """Of what the job's layout is made."""
        layout = self.job.layouts.current
        workers = (self.state.workers.get(w) for w in (layout.workers if layout else ()))
        return {self.state.leases[worker.token].type.name for worker in workers if worker}

    def planned(self, profile: Profile, **sale: Any) -> tuple[PlannedSale, Model]:
        """What a plan without a manager goes by: all that is sold here at one price, and a measured model."""
        pools = tuple(known.pool for known in self.state.pools.values())
        sold = PlannedSale(
            places={PLACE: Sold(types=tuple(self.state.types.values()), pools=pools)},
            quotes=tuple(Quote(pool=pool, at_s=0.0, price_usd_per_h=0.03) for pool in pools),
            source="",
            **sale,
        )
        model = Model(job="before", profile=profile, microbatches=8, stages_max=4, uncuttable="")
        return sold, model

    @staticmethod
    def bought(actions: list[AnyAction]) -> list[str]:
        """The types of what is launched."""
        return [action.request.pool.type for action in actions if isinstance(action, Launch)]

    @staticmethod
    def only(actions: list[AnyAction], kind: type[A]) -> list[A]:
        return [action for action in actions if isinstance(action, kind)]

    @staticmethod
    def words(actions: list[AnyAction]) -> str:
        return "\n".join(f"{type(action).__name__}: {action.because}" for action in actions)

    def stray(self, deployment: str, token: str = "unknown") -> Machine:
        """A machine that no lease of ours claims."""
        return Machine(
            id=f"i-{token}",
            token=token,
            pool=POOLS[0],
            market="spot",
            state="running",
            launched_at_s=self.at_s,
            tags={DEPLOYMENT_TAG: deployment},
        )


def profile_of(sections: int, *, memory: float = 16e9, **changes: Any) -> Profile:
    """Equal sections; a microbatch takes 0.1 s over all of them, the state is 1 MiB."""
    link = Link(bandwidth_bytes_per_s=1e10, latency_s=1e-6)
    each = Section(
        name="section",
        forward_s=(0.1 / 3 / sections,),
        backward_s=(0.2 / 3 / sections,),
        activation_bytes=1e3,
        stash_bytes=1e3,
        parameter_bytes=(1 << 20) / 3 / sections,
        optimizer_bytes=(1 << 20) * 2 / 3 / sections,
    )
    named = (
        msgspec.structs.replace(
            each, name=f"section{n}", after=10 * (n + 1) if n + 1 < sections else -1
        )
        for n in range(sections)
    )
    fields: dict[str, Any] = {
        "model": "model",
        "instance_type": "small",
        "microbatch_sizes": (4,),
        "network": Network(intra=link, inter=link, reduce_intra=link, reduce_inter=link),
        "memory_bytes": memory,
        "sections": tuple(named),
    }
    return Profile(**{**fields, **changes})


@pytest.fixture
def profile() -> Any:
    """The maker of a measured model."""
    return profile_of


@pytest.fixture(scope="session")
def hand() -> type[Hand]:
    """The maker of a manager in hand."""
    return Hand
