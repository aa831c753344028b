"""The simulated world for the loop: events out, actions in, and time that only we advance."""

from collections.abc import Callable
from typing import assert_never

import msgspec

from agent.messages import NoticeSeen
from cloud.clock import DAY_S
from cloud.errors import CloudError, Refused, Unknown
from cloud.model import LaunchRequest, Listing, Market, Place, Pool, Ref
from cloud.simulated import Booted, Change, Evicted, Noticed, PricesMoved, SimulatedCloud
from orchestrator.actions import (
    AnyAction,
    CloseJob,
    KeepQuotes,
    Launch,
    ListMachines,
    Note,
    OpenJob,
    Regroup,
    StartWorker,
    Stop,
    StopWorker,
    Terminate,
    WriteCheckpoint,
)
from orchestrator.events import (
    AnyEvent,
    CatalogueSeen,
    Launched,
    LaunchFailed,
    Listed,
    ListFailed,
    ManagerStarted,
    QuotesSeen,
    Terminated,
    Tick,
)
from orchestrator.live.price_files import QuoteStore
from orchestrator.settings import Settings
from orchestrator.simulated.disturbances import DROUGHT, BadDays
from orchestrator.simulated.fleet import Fleet
from orchestrator.simulated.places import Places
from orchestrator.simulated.scenario import Scenario
from orchestrator.simulated.timeline import Inbox, Luck, Timeline
from orchestrator.state import State, keys_of


class Killed(Exception):  # noqa: N818 - it names what happened
    """The manager was killed at an await point."""


class SimulatedWorld:
    """Virtual time, one seeded cloud, and everything else that the manager communicates with."""

    def __init__(
        self,
        cloud: SimulatedCloud,
        scenario: Scenario,
        kill: Callable[[str], bool] | None = None,
    ) -> None:
        self.cloud = cloud
        self.seed = scenario.seed
        self.timeline = Timeline(cloud.market.start_s)
        self.luck = Luck(scenario.seed, scenario.faults)
        self.inbox = Inbox(self.timeline, self.luck)
        self.fleet = Fleet(scenario, self.timeline, self.luck, self.inbox)
        self.places = Places(cloud.places(), self.timeline, self.luck)
        self.launched_at_s: dict[tuple[Pool, Market], list[float]] = {}
        self.listed_at_s: dict[Place, list[float]] = {}
        self._traits = scenario.traits
        self.bad_days = BadDays(cloud, self.fleet, self.timeline, self.luck, self.inbox)
        self.end_s = self.timeline.now_s + scenario.days * DAY_S
        self.evictions = self.launches = self.restarts = 0
        self.alive: dict[str, tuple[str, float]] = {}  # machine -> token and start
        self.born_s = self.timeline.now_s  # when this life of the manager began
        self.behind_s = 0.0  # how far the manager's wall clock is behind
        self._pace = scenario.pace
        self._quotes = QuoteStore(None)
        self._answers: list[AnyEvent] = []
        self._taken: AnyEvent | None = None
        self._life = 0
        self._kill = kill or (lambda _: self.luck.chance(self.luck.faults.killed))
        self.watch: Callable[[State], None] = lambda _: None
        self._slots = {kind.name: kind.slots for kind in cloud.catalogue()[0]}

    # --- the seam -------------------------------------------------------------------------------

    async def next_event(self, by_s: float) -> AnyEvent | None:
        """Move virtual time to the next event and return it; None after the last day."""
        self._taken = None
        by_s += self.behind_s
        timeline = self.timeline
        while not (self._answers or self.inbox.ready):
            change_s = self.cloud.next_change_s()
            queued_s = timeline.next_s
            first_s = queued_s if change_s is None else min(queued_s, change_s)
            if min(first_s, by_s) > self.end_s:
                return None
            if by_s <= first_s:
                timeline.move_to(by_s)
                return Tick(at_s=self._wall_s)
            timeline.move_to(first_s)
            if change_s is not None and change_s <= queued_s:
                for change in self.cloud.advance(timeline.now_s):
                    self._cloud_changed(change)
            else:
                timeline.do_next()
        if self._answers:
            return self._answers.pop(0)
        self._taken = self.inbox.ready.pop(0)
        return self._taken

    async def perform(self, action: AnyAction) -> None:
        self.await_point("perform")
        match action:
            case Launch():
                self._launch(action.request)
            case Terminate():
                self._terminate(action.ref)
            case ListMachines():
                self._list(action.place)
            case KeepQuotes():
                self._answer(self._quotes.keep(action, self.timeline.now_s))
            case OpenJob():
                self.fleet.open_job(action)
            case StartWorker():
                self.fleet.start_worker(action)
            case StopWorker():
                self.fleet.stop_worker(action.worker, action.machine_id)
            case Regroup():
                self.fleet.regroup(action)
            case WriteCheckpoint():
                self.fleet.jobs[action.job].checkpoint()
            case CloseJob():
                self.fleet.close_job(action.job)
            case Note() | Stop():
                pass
            case _:
                assert_never(action)

    async def show(self, state: State) -> None:
        """Hand every state to the watcher of the simulation."""
        self.watch(state)

    # --- lives of the manager -------------------------------------------------------------------

    def await_point(self, where: str) -> None:
        """Raise `Killed` if the manager is to be killed at this await point."""
        if self._kill(where):
            raise Killed(where)

    def restart(self) -> None:
        """Start a new manager; answers to the old one are lost, but the durable inbox is kept."""
        self._answers.clear()
        self._life += 1
        self.restarts += 1
        if self._taken is not None:
            self.inbox.ready.insert(0, self._taken)
            self._taken = None
        self.timeline.now_s += self._pace.restart_s * self.luck.random.uniform(0.2, 2.0)
        if self.luck.chance(self.luck.faults.clock_set_back):
            self.behind_s += self.luck.random.uniform(0.0, 3600.0)

    def start(self, epoch: int, settings: Settings) -> None:
        """Queue a manager's first events: its start, the catalogue, and the prices."""
        self.born_s, wall_s = self.timeline.now_s, self._wall_s
        self._answers += [
            ManagerStarted(at_s=wall_s, epoch=epoch, settings=settings),
        ]
        for place in self.cloud.places():
            quotes = tuple(self.cloud.quotes(self.timeline.now_s, place))
            self._answers += [
                CatalogueSeen(
                    at_s=wall_s, place=place, sold=self.cloud.sold(place), traits=self._traits
                ),
                QuotesSeen(at_s=wall_s, place=place, quotes=quotes),
            ]

    def say(self, event: AnyEvent) -> None:
        """Put a person's event into the durable inbox."""
        self.inbox.ready.append(event)

    @property
    def _wall_s(self) -> float:
        """Return the time on the manager's clock."""
        return self.timeline.now_s - self.behind_s

    # --- calls to the cloud ---------------------------------------------------------------------

    def _answer(self, event: AnyEvent) -> None:
        """Send an answer later; it reaches only the manager that asked."""
        life = self._life

        def arrive() -> None:
            if life == self._life:
                self._answers.append(msgspec.structs.replace(event, at_s=self._wall_s))

        self.timeline.after(self._pace.answer_s, arrive)

    def _launch(self, request: LaunchRequest) -> None:
        now_s = self.timeline.now_s
        self.launched_at_s.setdefault((request.pool, request.market), []).append(now_s)
        lost = self.luck.chance(self.luck.faults.unreachable)
        lost = lost or self.places.is_silent(request.pool.place)
        try:
            self.places.refuse(request)
            if lost and self.luck.chance(0.5):
                raise Unknown("the request was lost")
            if now_s < self.bad_days.dry_until_s:
                raise Refused("pool", "NoCapacity", f"{request.pool.key}: {DROUGHT}")
            machines = self.cloud.launch_all(request, now_s)
            for machine, key in zip(machines, keys_of(request), strict=True):
                if machine.id not in self.alive and self.places.fails(machine):
                    self.cloud.terminate([machine.id], now_s)
                elif machine.id not in self.alive:
                    self.launches += 1
                    self.alive[machine.id] = (key, now_s)
            self.await_point("launched")
            if lost:
                raise Unknown("the answer was lost")
        except CloudError as error:
            failed = LaunchFailed(
                at_s=0.0,
                token=request.token,
                code=error.code,
                error=str(error),
                refusal=error.refusal,
            )
            self._answer(failed)
            return
        for machine in machines:
            self._answer(Launched(at_s=0.0, token=request.token, machine=machine))

    def _terminate(self, ref: Ref) -> None:
        if self.luck.chance(self.luck.faults.unreachable) or self.places.is_silent(ref.place):
            return
        if not self.places.end(ref):
            self.cloud.terminate([ref.id], self.timeline.now_s)
            self._gone(ref.id)
        self.await_point("terminated")
        self._answer(Terminated(at_s=0.0, ref=ref))

    def _list(self, place: Place) -> None:
        if self.luck.chance(self.luck.faults.unreachable):
            self._answer(ListFailed(at_s=0.0, place=place, error="no answer"))
            return
        self.listed_at_s.setdefault(place, []).append(self.timeline.now_s)
        try:
            self.places.check_list(place)
        except CloudError as error:
            self._answer(ListFailed(at_s=0.0, place=place, error=str(error)))
            return
        seen_s = self.timeline.now_s - self.luck.faults.listing_lag_s
        listed = self.places.machines(place, self.cloud.machines(region=place.region))
        machines = tuple(machine for machine in listed if machine.launched_at_s <= seen_s)
        self._answer(
            Listed(
                at_s=0.0,
                asked_at_s=self._wall_s,
                listing=Listing(
                    place=place, machines=machines, leftovers=self.places.left_in(place)
                ),
            )
        )

    # --- what the cloud does --------------------------------------------------------------------

    def _cloud_changed(self, change: Change) -> None:
        match change:
            case Booted():
                if change.machine.id in self.alive:
                    self.fleet.boot(change.machine, self._slots[change.machine.pool.type])
            case Noticed():
                if change.notice.machine_id in self.alive:
                    for notice in self.places.deadlines(change.notice):
                        seen = NoticeSeen(at_s=0.0, notice=notice)
                        self.inbox.report(seen, self._pace.notice_poll_s)
            case Evicted():
                if change.machine_id in self.alive:
                    self.evictions += 1
                    self._gone(change.machine_id)
            case PricesMoved():
                event = QuotesSeen(
                    at_s=self._wall_s, place=change.quotes[0].pool.place, quotes=change.quotes
                )
                self._answers.append(event)
            case _:
                assert_never(change)

    def _gone(self, machine_id: str) -> None:
        if self.alive.pop(machine_id, None) is not None:
            self.places.machine_ended(self.cloud.machine(machine_id))
        self.fleet.machine_dies(machine_id)
