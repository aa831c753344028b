"""The invariants that must hold after every event, whatever goes wrong.

A breach stops the simulation, and its message says which invariant broke.
"""

import math
from collections.abc import Sequence

from agent.messages import Rewound
from cloud.clock import HOUR_S
from cloud.model import DEPLOYMENT_TAG
from orchestrator.actions import AnyAction, Launch, Note, Regroup, Terminate
from orchestrator.brain.holdings import alike, ledger
from orchestrator.events import AnyEvent
from orchestrator.simulated.scenario import Scenario
from orchestrator.simulated.world import SimulatedWorld
from orchestrator.state import Account, Job, Lease, LeaseState, State, keys_of, leases_of

EPSILON_USD = 1e-6
CALLED_BACK_S_MAX = 180.0
AWAY_S_MAX = 120.0  # the longest time that a manager may be suspended without a break
ROUNDING_S = 1e-3
SILENCES_MAX = 2  # of one region that may follow each other
TRIES_MAX = 6  # the most tries of one call that fail in a row on a bad day


class Breach(AssertionError):  # noqa: N818 - it names what happened
    """An invariant does not hold."""


class Watcher:
    """Compares every state with the state before it and with the simulated world."""

    def __init__(self, world: SimulatedWorld, scenario: Scenario) -> None:
        self._world = world
        self._settings = scenario.settings
        faults, settings = scenario.faults, scenario.settings
        self._time_leaps = bool(faults.killed or faults.clock_jump_every_s or faults.clock_set_back)
        tries = TRIES_MAX if faults.unreachable or faults.throttled else 1
        self.unowned_s_max = (
            settings.launch_grace_s
            + tries * (settings.listing_period_s + settings.control_period_s)
            + (tries - 1) * settings.drain_s / 4
            + 2 * scenario.pace.answer_s
            + SILENCES_MAX * faults.silent_s
            + (AWAY_S_MAX if self._time_leaps else 0.0)
        )
        self._turns: list[tuple[AnyEvent, Sequence[AnyAction]]] = []
        self._unowned: dict[str, float] = {}
        self._steps: dict[str, tuple[int, int]] = {}
        self._statuses: dict[str, str] = {}
        self._unending = dict[str, tuple[str, float]]()
        self._leases: dict[str, LeaseState] = {}
        self._generations: dict[str, int] = {}
        self._launched: dict[str, None] = {}
        self._made_way_s: dict[str, float] = {}
        self.last_state: State | None = None

    def journaled(self, event: AnyEvent, actions: Sequence[AnyAction]) -> None:
        self._turns.append((event, actions))

    def check(self, state: State) -> None:
        """Check all invariants; to be called after every event that a manager has finished."""
        actions = [action for _, more in self._turns for action in more]
        self._machines_are_owned(state)
        self._nothing_remains()
        self._steps_do_not_go_back(state)
        self._money_suffices(state)
        self._changes_are_told(state, actions)
        self._actions_make_sense(state, actions)
        self._books_agree(state)
        self._turns.clear()
        self.last_state = state

    def _machines_are_owned(self, state: State) -> None:
        now_s = self._world.timeline.now_s
        for machine_id, (token, _) in self._world.alive.items():
            if token in state.leases:
                self._unowned.pop(machine_id, None)
                continue
            since_s = max(self._unowned.setdefault(machine_id, now_s), self._world.born_s)
            age_s = now_s - since_s
            if age_s > self.unowned_s_max:
                raise Breach(f"machine {machine_id} has had no lease for {age_s:.0f} s")

    def _steps_do_not_go_back(self, state: State) -> None:
        rewound = [event for event, _ in self._turns if isinstance(event, Rewound)]
        for job in state.jobs.values():
            step, checkpoint = self._steps.get(job.id, (0, 0))
            if job.progress.step < step:
                to = [r.to_step for r in rewound if r.job == job.id and r.to_step >= checkpoint]
                if job.progress.step not in to:
                    raise Breach(f"job {job.id} went from step {step} back to {job.progress.step}")
            self._steps[job.id] = (job.progress.step, job.progress.checkpoint_step)

    def _money_suffices(self, state: State) -> None:
        accounts = [("everything", state.account)]
        accounts += [(job.id, job.account) for job in state.jobs.values()]
        for name, account in accounts:
            if account.cap_usd is None or not account.leases:
                continue
            spent = ledger.spent_usd(account, state.now_s)
            committed = ledger.committed_usd(account, state.now_s)
            # The reserve may be used up when time leaps, but giving back must remain affordable.
            if self._time_leaps:
                committed *= self._settings.drain_s / self._settings.reserve_s
            excess = spent + committed - account.cap_usd - self._unending_usd(state, name)
            if excess > EPSILON_USD:
                raise Breach(
                    f"{name}: spent ${spent:.6f} + committed ${committed:.6f} "
                    f"is over the cap ${account.cap_usd:.6f}"
                )

    def _unending_usd(self, state: State, account: str) -> float:
        """Return what machines may cost that their place has not taken back for longer than is reserved."""
        for lease in state.leases.values():
            if lease.drained:
                hours = (state.now_s - lease.history[-1].at_s) / HOUR_S
                self._unending[lease.token] = (lease.job, lease.ceiling_usd_per_h * hours)
        each = self._unending.values()
        return sum(usd for job, usd in each if account in (job, "everything"))

    def _changes_are_told(self, state: State, actions: Sequence[AnyAction]) -> None:
        """Check that a sentence explains every change of a job or a machine.

        A change between working and ready needs none, because the new layout explains it.
        """
        told: dict[str, str] = {}
        for action in actions:
            if not action.because:
                raise Breach(f"{action} does not say why")
            told |= dict.fromkeys(_names(action), action.because)
        for job in state.jobs.values():
            if self._statuses.get(job.id) != job.status:
                if not told.get(job.id):
                    raise Breach(f"job {job.id} became {job.status} and nobody was told")
                self._statuses[job.id] = job.status
        now: dict[str, LeaseState] = {lease.token: lease.state for lease in state.leases.values()}
        quiet = ({"working", "ready"}, {"ready"}, {"working", "leaving"}, {"noticed", "leaving"})
        for token in {**self._leases, **now}:
            before, after = self._leases.get(token, ""), now.get(token, "ended")
            if before == after or {before, after} in quiet:
                continue
            machine = state.leases[token].machine_id if token in state.leases else ""
            if (
                token not in told
                and machine not in told
                and not self._ended_is_told(state, token, told)
            ):
                raise Breach(f"lease {token} went from {before} to {after} and nobody was told")
        self._leases = now

    def _ended_is_told(self, state: State, token: str, told: dict[str, str]) -> bool:
        ended = state.ended_leases.get(token)
        return ended is not None and ended.machine_id in told

    def _actions_make_sense(self, state: State, actions: Sequence[AnyAction]) -> None:
        for action in actions:
            if isinstance(action, Launch):
                if action.request.token in self._launched:
                    raise Breach(f"token {action.request.token} was used twice")
                self._launched[action.request.token] = None
            elif isinstance(action, Regroup):
                generation = action.layout.generation
                if generation < self._generations.get(action.job, 0):
                    raise Breach(f"job {action.job} went back to generation {generation}")
                self._generations[action.job] = generation
                _layout_is_sound(state, action)
            elif isinstance(action, Terminate):
                tags = self._world.places.tags_of(action.ref.id)
                if tags is None:
                    tags = self._tags_of(action.machine_id)
                if tags.get(DEPLOYMENT_TAG) != self._settings.deployment:
                    raise Breach(f"{action.machine_id} is not ours: {action.because}")
        if len(state.leases) > self._settings.machines_max:
            raise Breach(f"{len(state.leases)} leases, machines_max={self._settings.machines_max}")

    def _tags_of(self, name: str) -> dict[str, str]:
        """Return the tags of a machine, or of what a machine has left over and is gone by now."""
        return self._world.cloud.machine(name.removeprefix("disk-")).tags

    def _nothing_remains(self) -> None:
        now_s = self._world.timeline.now_s
        for name, since_s in self._world.places.since_s.items():
            age_s = now_s - max(since_s, self._world.born_s)
            if age_s > self.unowned_s_max:
                raise Breach(f"{name} has been left behind for {age_s:.0f} s")

    def _books_agree(self, state: State) -> None:
        """Check that the indices agree with what they index, and that a wake-up is due in time."""
        period_s = self._settings.control_period_s
        if state.wake_at_s + state.skew_s > state.now_s + period_s + ROUNDING_S:
            raise Breach(f"at {state.now_s} s nothing wakes the manager before {state.wake_at_s} s")
        _agree("workers", len(state.workers), sum(len(j.workers) for j in state.jobs.values()))
        _agree("leases", len(state.leases), sum(len(j.leases) for j in state.jobs.values()))
        _agree("leases", len(state.leases), sum(len(p.leases) for p in state.pools.values()))
        _agree("accounts", len(state.leases), state.account.leases)
        for job in state.jobs.values():
            _agree(f"account of {job.id}", len(job.leases), job.account.leases)
            _no_negative(job.id, job.account)
            _no_idle_traffic(job)
            self._holds_no_more_than_it_may(state, job)
            _can_train_with_what_it_holds(state, job)
        _no_negative("everything", state.account)

    def _holds_no_more_than_it_may(self, state: State, job: Job) -> None:
        """Check that nothing is bought twice: a job keeps at most the slots that it asked for.

        A machine that was released for a replacement, and kept because a worker was lost before
        the replacement was there, may stay until the bidder is asked again.
        """
        staying = leases_of(state, job)
        self._made_way_s |= {e.token: state.now_s for e in staying if e.released}
        called_back_s = state.now_s - CALLED_BACK_S_MAX
        kept = [
            lease.type.slots
            for lease in staying
            if lease.stays
            and lease.goes_at_s is None
            and _undisturbed(lease)
            and self._made_way_s.get(lease.token, -math.inf) < called_back_s
        ]
        if job.active and sum(kept) > job.spec.slots_max:
            raise Breach(f"job {job.id} holds {sum(kept)} slots, slots_max={job.spec.slots_max}")


def _can_train_with_what_it_holds(state: State, job: Job) -> None:
    """Check that an exact job keeps no machine that has told another key than its own."""
    kind = job.layouts.kind
    if not (job.active and job.exact and kind is not None and alike.has_kind(state, job)):
        return
    for lease in leases_of(state, job):
        if lease.stays and kind.hardware and lease.hardware not in ("", kind.hardware):
            raise Breach(f"job {job.id} keeps {lease.machine_id}, which rounds differently")


def _layout_is_sound(state: State, action: Regroup) -> None:
    """Check a layout: equal depths, no worker twice, every microbatch once, stages that fit."""
    layout, job = action.layout, state.jobs[action.job]
    name = f"job {action.job}, generation {layout.generation}"
    workers = layout.workers
    if len(set(workers)) != len(workers):
        raise Breach(f"{name}: somebody is in it twice: {workers}")
    if any(len(replica.workers) != layout.depth for replica in layout.replicas):
        raise Breach(f"{name}: unequal depths")
    given = [m for r in layout.replicas for m in range(r.first, r.first + r.count)]
    if given != list(range(job.layouts.microbatches)):
        raise Breach(f"{name}: the shares are {given} of {job.layouts.microbatches} microbatches")
    if any(replica.count < 1 for replica in layout.replicas):
        raise Breach(f"{name}: a replica has nothing to do")
    there = [state.workers[worker] for worker in workers if worker in state.workers]
    keys = {alike.key_of(state, worker) for worker in there} - {""}
    if job.exact and len(keys) > 1:
        raise Breach(f"{name}: machines that round differently: {', '.join(sorted(keys))}")
    if job.layouts.uncuttable and layout.depth > 1:
        raise Breach(f"{name}: depth {layout.depth}, but {job.layouts.uncuttable}")
    plan, profile = job.layouts.plan, job.layouts.profile
    if layout != job.layouts.current or plan is None or profile is None:
        return
    if (plan.way.depth, plan.shares) != (layout.depth, tuple(r.count for r in layout.replicas)):
        raise Breach(f"{name}: it is not what was planned: {plan.describe()}")
    if plan.owned != layout.owned:
        raise Breach(f"{name}: whether workers keep their own state only is not what was planned")
    if max(plan.memory_bytes) > profile.memory_bytes:
        raise Breach(f"{name}: a stage of {max(plan.memory_bytes)} bytes does not fit")


def _undisturbed(lease: Lease) -> bool:
    """Return whether the lease never had a notice and never lost its agent.

    A machine that did may have come back beside its replacement.
    """
    states = [moved.to for moved in lease.history]
    working = states[states.index("ready") :] if "ready" in states else []
    return "noticed" not in states and "booting" not in working


def _names(action: AnyAction) -> tuple[str, ...]:
    """Return the ids of what an action's sentence is about."""
    match action:
        case Note():
            return (action.who,)
        case Launch():
            return (action.request.token, *keys_of(action.request))
        case Terminate():
            return (action.machine_id,)
        case _:
            return ()


def _agree(what: str, left: int, right: int) -> None:
    if left != right:
        raise Breach(f"the books of {what} do not agree: {left} and {right}")


def _no_idle_traffic(job: Job) -> None:
    """Check that a job is expected to send nothing between zones while nothing steps."""
    rate = job.account.traffic_usd_per_h
    if rate and job.status not in ("RUNNING", "DRAINING"):
        raise Breach(f"job {job.id} is {job.status} and charged ${rate:.6f}/h of traffic")


def _no_negative(name: str, account: Account) -> None:
    rates = account.usd_per_h, account.draining_usd_per_h
    if min(account.spent_usd, account.committed_usd, *rates) < -EPSILON_USD:
        raise Breach(f"{name}: negative money in {account}")
