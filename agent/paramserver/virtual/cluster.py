"""Nodes on virtual time. Computing takes what the model says; messages what the network says.

A worker looks for messages between grains. In between nothing is simulated, so a clock without
messages is one event.
"""

import heapq
import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple, Protocol

from agent.paramserver.api import Application
from agent.paramserver.controller import Controller, Plan
from agent.paramserver.help import Settings
from agent.paramserver.member import FOR_SERVERS, Member, join
from agent.paramserver.messages import CONTROLLER, End, Leave, Message, Out, Section
from agent.paramserver.server import Server
from agent.paramserver.worker import Bound, Run, Worker

SOON = 1e-9


class Disk:
    """The store of a virtual cluster."""

    def __init__(self) -> None:
        self.files: dict[tuple[int, int], list[Section]] = {}

    def write(self, partition: int, clock: int, sections: list[Section]) -> None:
        self.files[partition, clock] = sections

    def read(self, partition: int, clock: int) -> list[Section]:
        return self.files[partition, clock]

    def drop(self, partition: int, before: int) -> None:
        for one in [one for one in self.files if one[0] == partition and one[1] < before]:
            del self.files[one]


class Network(Protocol):
    def send(self, source: str, target: str, message: Message, deliver: Callable[[], None]) -> None:
        """Have `deliver` called when the message has arrived, in order for each pair."""


class Place(NamedTuple):
    name: str
    machine: str
    reliable: bool = True
    allocation: str = "first"


class Host:
    """The processor of one node: what it computes now, and how fast."""

    def __init__(self, member: Member) -> None:
        self.member = member
        self.inbox: list[tuple[str, Message]] = []
        self.run: Run | None = None
        self.done = 0.0  # grains of the run
        self.taken = 0  # of these, those that the worker knows
        self.since_s = 0.0
        self.slow = 1.0  # times as long
        self.grain_s = 0.0
        self.token = 0
        self.began_s = 0.0
        self.ended = False

    @property
    def grains(self) -> int:
        return self.run.span.last - self.run.span.first if self.run else 0

    def progress(self, now_s: float) -> None:
        if self.run is not None:
            self.done += (now_s - self.since_s) / (self.grain_s * self.slow)
        self.since_s = now_s


class Virtual:
    """`application` makes the application of a node. `cost` is of one grain of a block, in s."""

    def __init__(  # noqa: PLR0913 - what a cluster consists of
        self,
        application: Callable[[], Application],
        plan: Plan,
        places: Iterable[Place],
        *,
        cost: Callable[[int], float],
        network: "Callable[[Virtual], Network]",
        bound: Bound | None = None,
        help_settings: Settings | None = None,
        load_s: float = 0.0,
    ) -> None:
        self.now_s, self._events, self._serial = (
            0.0,
            list[tuple[float, int, Callable[[], None]]](),
            0,
        )
        self._make, self.plan, self.cost, self.load_s = application, plan, cost, load_s
        self.bound = (bound or Bound(0))._replace(clocks=plan.stop.clocks)
        self.settings = help_settings or Settings(size=plan.help_size)
        self.network, self.disk = network(self), Disk()
        self.hosts: dict[str, Host] = {}
        self.controller: Controller | None = Controller(plan)
        self.brain = self.controller
        self.closed_s: list[float] = []  # when each clock was closed, for the first time
        self.on_message: Callable[[str, str, Message], None] | None = None
        self.on_event: Callable[[], None] | None = None
        self.detect_s = SOON
        for place in places:
            self.add(place)

    # Time.

    def at(self, time_s: float, act: Callable[[], None]) -> None:
        self._serial += 1
        heapq.heappush(self._events, (max(time_s, self.now_s), self._serial, act))

    def run(self, until: Callable[[], bool] | None = None, limit_s: float = math.inf) -> str:
        """Run until the job ends, `until` holds, or nothing is left to happen."""
        while self._events:
            if self.brain.ended and not until:
                return self.brain.ended
            time_s, _, act = heapq.heappop(self._events)
            if time_s > limit_s:
                return "the time is over"
            self.now_s = time_s
            act()
            if self.on_event is not None:
                self.on_event()
            if until is not None and until():
                return "as asked"
        return self.brain.ended or "nothing happens any more"

    # Machines.

    def add(self, place: Place) -> Host:
        application = self._make()
        tables = {table.name: table for table in application.tables}
        count = self.plan.partitions
        worker = Worker(place.name, application, self.plan.work, self.bound, self.settings, count)
        server = Server(place.name, tables, count, self.disk, self.plan.work.blocks)
        host = Host(Member(worker, server))
        self.hosts[place.name] = host
        self._say(place.name, join(place.reliable, place.machine, place.allocation))
        return host

    def kill(self, names: Iterable[str]) -> None:
        """End nodes without a warning; the controller notices it a little later."""
        gone = sorted({name for name in names if name in self.hosts})
        for name in gone:
            self.hosts.pop(name).token += 1
        self.at(self.now_s + self.detect_s, lambda: self._notice(gone))
        self.at(self.now_s + 1.0, lambda: self._notice(gone))  # if it had just begun to join

    def _notice(self, gone: list[str]) -> None:
        if self.controller is None:
            self.at(self.now_s + 0.1, lambda: self._notice(gone))
        else:
            self._say(CONTROLLER, self.controller.lost(gone, self.now_s))

    def evict(self, names: Iterable[str], warning_s: float) -> None:
        """Warn of an eviction, and end the nodes when the time is over."""
        going = list(names)
        if self.controller is not None:
            self._say(CONTROLLER, self.controller.evicted(going, warning_s, self.now_s))
        self.at(self.now_s + warning_s, lambda: self.kill(going))

    def stop_controller(self, away_s: float) -> None:
        """Have the controller miss everything for a while, and come back as it was."""
        brain, self.controller = self.controller, None

        def back() -> None:
            self.controller = brain
            if brain is not None:
                self._say(CONTROLLER, brain.restarted())

        self.at(self.now_s + away_s, back)

    # Messages.

    def _say(self, source: str, out: Out) -> None:
        for target, message in out:
            if self.on_message is not None:
                self.on_message(source, target, message)
            deliver = partial(self._deliver, source, target, message)
            if source == target:
                self.at(self.now_s, deliver)
            else:
                self.network.send(source, target, message, deliver)

    def _deliver(self, source: str, target: str, message: Message) -> None:
        if target == CONTROLLER:
            if self.controller is not None:
                self._say(CONTROLLER, self.controller.handle(source, message, self.now_s))
                while len(self.closed_s) <= self.controller.ledger.closed:
                    self.closed_s.append(self.now_s)
            return
        host = self.hosts.get(target)
        if host is None or host.ended:
            return
        if isinstance(message, End | Leave):
            host.ended = True
            host.token += 1
            if isinstance(message, Leave):
                del self.hosts[target]
        elif isinstance(message, FOR_SERVERS):
            self._say(target, host.member.handle(source, message, self.now_s))
        elif host.run is None:
            self._say(target, host.member.handle(source, message, self.now_s))
            self._work(host)
        else:
            host.inbox.append((source, message))
            if len(host.inbox) == 1:
                self._schedule(host)

    # Computing.

    def _work(self, host: Host) -> None:
        """Begin what the worker has to compute now."""
        worker = host.member.worker
        run, out = worker.next_run(self.now_s)
        self._say(worker.name, host.member.marked(out))
        host.run, host.done, host.taken, host.since_s = run, 0.0, 0, self.now_s
        host.began_s = self.now_s
        host.token += 1
        if run is not None:
            host.grain_s = self.cost(run.span.block)
            self._schedule(host)

    def _schedule(self, host: Host) -> None:
        """Look at a host when its run ends, or at the end of the present grain if it has mail."""
        host.progress(self.now_s)
        host.token += 1
        goal = float(host.grains)
        if host.inbox:
            goal = min(goal, math.ceil(host.done - 1e-6) if host.done > 1e-6 else 0)
        token, left = host.token, max(0.0, goal - host.done)
        self.at(
            self.now_s + left * host.grain_s * host.slow,
            lambda: self._pause(host, token, round(goal)),
        )

    def _pause(self, host: Host, token: int, done: int) -> None:
        if host.token != token or host.run is None:
            return
        worker, run = host.member.worker, host.run
        took_s = self.now_s - host.began_s
        host.run = None
        out = worker.finish(run, done, lambda: took_s, self.now_s) if done else []
        self._say(worker.name, host.member.marked(out))
        inbox, host.inbox = host.inbox, []
        for source, message in inbox:
            self._say(worker.name, host.member.handle(source, message, self.now_s))
        self._work(host)

    def slow_down(self, name: str, times: float) -> None:
        """Have a node compute `times` as long from now on."""
        host = self.hosts.get(name)
        if host is None or host.slow == times:
            return
        host.progress(self.now_s)
        host.slow = times
        if host.run is not None:
            self._schedule(host)
