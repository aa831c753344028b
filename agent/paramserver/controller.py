"""The controller: which clock consists of what, who is where, and what a loss costs.

All that counts is decided in this one place. A clock is closed by a list of batches that tile it, so
nothing can count twice, whatever was computed twice.
"""

import math
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from msgspec.structs import replace

from agent.paramserver import groups
from agent.paramserver.api import Stop, Work
from agent.paramserver.messages import (
    Beat,
    Close,
    Committed,
    Done,
    End,
    Failed,
    Finished,
    Gone,
    Grant,
    Group,
    Installed,
    Join,
    Leave,
    Load,
    Loaded,
    Message,
    Move,
    Out,
    Passed,
    PushUp,
    Received,
    Release,
    Released,
    Report,
    Roll,
    Route,
    Save,
    Saved,
    listed,
)
from agent.paramserver.placement import Drain, Node, Stages, actives, preloads, spread, workers

DEAD_S = 5.0  # without a sign of life
PUSH_S = 0.01  # from the beginning of a push to that of the next one, at least


class Plan(NamedTuple):
    """What is fixed for a job."""

    work: Work
    stop: Stop
    partitions: int
    expected: int = 1  # nodes, before it begins
    help_size: int = 0
    dwell: int = 3
    save_every: int = 0  # commits
    drain: Drain = Drain()
    bytes_per_s: float = 1.25e8
    partition_bytes: float = 0.0
    dead_s: float = DEAD_S
    apart: bool = False  # reliable machines hold copies only: they neither serve nor compute


class Resumed(NamedTuple):
    """What an earlier controller of this job has left: its newest clock in the store."""

    epoch: int = 0  # all messages of the earlier ones are of smaller epochs
    measures: tuple[float, ...] = ()
    elapsed_s: float = 0.0  # in which the job was served so far


class Part(NamedTuple):
    """What a node does: partitions that it serves, partitions that it holds a copy of, blocks that it computes."""

    node: str
    reliable: bool
    serves: int
    copies: int
    blocks: int


class Ledger:
    """What is known of each block in each clock that is not closed."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self.next = [0] * work.blocks  # the clock that each block is to do
        self._done: dict[int, dict[int, list[Done]]] = {}
        self._measured: dict[int, float] = {}
        self.measures: list[float] = []
        self._given: dict[int, int] = {}  # grains of a clock that others did for who finished them
        self._worked = (0, 0)

    @property
    def closed(self) -> int:
        return len(self.measures) - 1

    def enter(self, worker: str, message: Finished) -> str:
        """Enter what a worker finished. Return what is wrong with it, or nothing."""
        spans: dict[int, list[Done]] = {}
        for done in message.done:
            spans.setdefault(done.span.block, []).append(done)
        entered = self._done.get(message.clock, {})
        if all(self.next[block] > message.clock or block in entered for block in spans):
            return ""  # it is said for the second time
        for block, dones in spans.items():
            at = 0
            for one in sorted(dones, key=lambda one: one.span.first):
                if one.span.first != at:
                    break
                at = one.span.last
            if at != self._work.grains or block in entered or self.next[block] > message.clock:
                return f"clock {message.clock} of block {block} is not done once: {dones}"
        self._done.setdefault(message.clock, {}).update(spans)
        for block in spans:
            while block in self._done.get(self.next[block], ()):
                self.next[block] += 1
        given = sum(
            done.span.last - done.span.first
            for done in message.done
            if done.batch.rpartition("/")[0] != worker
        )
        self._given[message.clock] = self._given.get(message.clock, 0) + given
        before = self._measured.get(message.clock, 0.0)
        self._measured[message.clock] = before + message.measured
        return ""

    def close(self) -> Close | None:
        """Return the next clock if it is complete."""
        clock = self.closed + 1
        if min(self.next) <= clock:
            return None
        batches = listed(self._done.pop(clock))
        self.measures.append(self._measured.pop(clock))
        given, all_ = self._worked
        self._worked = (
            given + self._given.pop(clock),
            all_ + self._work.blocks * self._work.grains,
        )
        return Close(clock=clock, batches=batches)

    def take_worked(self) -> tuple[int, int]:
        """Return grains of the clocks that closed since the last call: those given away, and all."""
        worked, self._worked = self._worked, (0, 0)
        return worked

    def resume(self, measures: Iterable[float]) -> None:
        self.measures = list(measures)
        self.next = [len(self.measures)] * self._work.blocks

    def roll_back(self, clock: int) -> None:
        self.next = [clock + 1] * self._work.blocks
        self._done, self._measured, self._given = {}, {}, {}
        del self.measures[clock + 1 :]


class Controller:
    def __init__(self, plan: Plan, resumed: Resumed | None = None) -> None:
        self.plan, self.ledger = plan, Ledger(plan.work)
        resumed = resumed or Resumed()
        self.ledger.resume(resumed.measures)
        self.nodes: dict[str, Node] = {}
        self.holders: dict[int, set[str]] = {block: set() for block in range(plan.work.blocks)}
        self.asked: dict[str, set[int]] = {}  # blocks that a node is loading
        self.blocks: dict[int, str | None] = dict.fromkeys(range(plan.work.blocks))
        self.releasing: set[int] = set()
        self.leaving: set[str] = set()
        self.owners: list[str] = [""] * plan.partitions
        self.replicas: list[str] = [""] * plan.partitions
        self.moves: dict[int, str] = {}
        self.awaited: set[int] = set()  # partitions on their way from their replicas
        self.mirroring: set[int] = set()
        self.epoch, self.version = resumed.epoch, 0
        self.committed = self.saved = self.ledger.closed
        self._expected = plan.expected
        self._restores = self.saved >= 0  # the copies are in the store, not in memory
        self.failed = False  # whether the application is why it ended
        self.pushing: int | None = None
        self._received: set[int] = set()
        self._pushed_s = -math.inf
        self._saving: dict[int, set[int]] = {}
        self.stages = Stages(dwell=plan.dwell)
        self.nic: float | None = None
        self.begun_s: float | None = None
        self._before_s = resumed.elapsed_s  # what it was served before that
        self.ending = self.ended = ""
        self.unprotected = False
        self.notes: list[str] = []
        self._order = 0
        self._last_close: Close | None = None
        self._groups: dict[str, list[str]] = {}
        self._seen_s: dict[str, float] = {}
        self._ticked_s: float | None = None
        self.rolls = 0

    # What happens.

    def handle(self, sender: str, message: Message, now_s: float) -> Out:
        if self.ended:
            return []
        self._seen_s[sender] = now_s
        if isinstance(message, Join):
            return self._marked(self._join(sender, message, now_s))
        if isinstance(message, Loaded):
            self._loaded(sender, message)
            return [] if self.asked.get(sender) else self._marked(self._settle(now_s))
        loads = isinstance(message, Failed) and self.begun_s is None  # which is in no epoch yet
        is_old = message.epoch != self.epoch and not loads
        if isinstance(message, Passed) and not is_old:
            return self._passed(message, now_s)
        if is_old or sender not in self.nodes or isinstance(message, Beat):
            return []
        return self._marked(self._heard(sender, message, now_s))

    def _heard(self, sender: str, message: Message, now_s: float) -> Out:
        match message:
            case Finished():
                return self._finished(sender, message, now_s)
            case Released():
                for block, clock in message.clocks.items():
                    # One that says more than was heard of is repeated, after what it is about.
                    known = self.ledger.next[block] >= clock
                    if known and self.blocks[block] == sender and block in self.releasing:
                        self.blocks[block] = None
                        self.releasing.discard(block)
            case Installed():
                return self._installed(sender, message, now_s) + self._settle(now_s)
            case Received():
                return self._receive(message, now_s)
            case Saved():
                return self._keep(message)
            case Failed():
                self.failed = True
                return self._end(message.why)
        return self._settle(now_s)

    def _join(self, sender: str, message: Join, now_s: float) -> Out:
        if sender in self.nodes:
            return []
        self._order += 1
        node = Node(sender, message.reliable, message.machine, message.allocation, self._order)
        self.nodes[sender] = node
        if self.begun_s is None:
            return self._begin(now_s)
        return [(sender, self._roll_for(sender, self.ledger.closed, [])), *self._settle(now_s)]

    def _begin(self, now_s: float) -> Out:
        """Begin when everybody who is expected is here and has loaded what it works on."""
        if len(self.nodes) < self._expected or any(self.asked.values()):
            return []
        self._choose_stage(forced=True)
        targets = self._block_targets()
        lacking: dict[str, list[int]] = {}
        for block, node in targets.items():
            if node not in self.holders[block]:
                lacking.setdefault(node, []).append(block)
        if lacking:
            return self._load(lacking)
        self.begun_s = now_s
        if len(self._reliable()) < 2 and not self.plan.apart:
            self.notes.append(
                "not protected: the job has fewer than two reliable machines, so the loss of one "
                "costs what the store does not have"
            )
        self.blocks = dict(targets)
        self._place_all()
        if self.committed >= 0:
            every, restores = list(range(self.plan.partitions)), self._restores
            self._restores = False
            return self._start_again(self.committed, every, now_s, restore=restores)
        out = self._roll_all(-1, lost=[])
        if self.plan.apart:  # copies do not know what rows are at first
            self.mirroring = set(range(self.plan.partitions))
            for at in sorted(self.mirroring):
                out += self._mirror(at)
        return out + self._settle(now_s)

    def elapsed_s(self, now_s: float) -> float:
        """Return for how long the job was served, by earlier controllers and this one."""
        return self._before_s + (0.0 if self.begun_s is None else now_s - self.begun_s)

    def _rest(self, now_s: float) -> Out:
        """Wait for machines that serve, because the last one is gone; copies stay as they are."""
        self.notes.append(f"nobody serves any more: it goes on from clock {self.committed}")
        if self.mirroring or self.awaited & self.mirroring:
            self.committed, self._restores = self.saved, self.saved >= 0
        self.epoch += 1
        self.ledger.roll_back(self.committed)
        self._before_s = self.elapsed_s(now_s)
        self.begun_s, self._expected = None, 2
        self.pushing, self._last_close, self.ending, self._saving = None, None, "", {}
        self.moves, self.releasing, self.mirroring, self.awaited = {}, set(), set(), set()
        self.blocks = dict.fromkeys(self.blocks)
        self.owners = [""] * self.plan.partitions
        return []

    def _loaded(self, sender: str, message: Loaded) -> None:
        for block in message.blocks:
            if sender in self.nodes:
                self.holders[block].add(sender)
                self.asked.get(sender, set()).discard(block)

    def _passed(self, message: Passed, now_s: float) -> Out:
        """Enter what a server passed on, which may have left since, and may have closed the clock.

        If a lost worker's batch counts there and not here, everybody goes back.
        """
        worker, out = message.worker, Out()
        if worker in self.nodes:
            out = self._marked(self._finished(worker, message.finished, now_s, message.closed))
        if self.ending or self.ended or message.closed <= self.ledger.closed:
            return out
        if {*self.moves, *self.awaited} & self.mirroring:
            return out + self._marked(self._from_store(now_s))
        return out + self._marked(self._roll_back([], now_s))

    def _finished(self, sender: str, message: Finished, now_s: float, there: int = -1) -> Out:
        """Enter what is finished, and close clocks; whoever serves has closed those up to `there`."""
        if any(self.blocks[one.span.block] != sender for one in message.done):
            return []
        if wrong := self.ledger.enter(sender, message):
            return self._end(wrong)
        out: Out = []
        while not self.ending and (close := self.ledger.close()) is not None:
            self._last_close = close
            out += self._to_servers(close) if close.clock > there else []
            self.ending = self.plan.stop.reached(self.ledger.measures, self.elapsed_s(now_s))
            out += self._push(now_s)
        if self.ending and "" in self.replicas:
            return out + self._end(self.ending)  # there is nobody to push to
        before = self.stages
        self._choose_stage()
        return out + (self._settle(now_s) if self.stages != before else [])

    # The reliable copy.

    def _push(self, now_s: float) -> Out:
        """Have everything that is closed pushed up, unless a push is on its way or has just been."""
        closed = self.ledger.closed
        held_up = self.mirroring or self.awaited or "" in self.replicas
        if self.pushing is not None or closed <= self.committed or held_up:
            return []
        if now_s < self._pushed_s + PUSH_S and not self.ending:
            return []
        self._pushed_s = now_s
        self.pushing, self._received = closed, set()
        return self._push_again()

    def _push_again(self) -> Out:
        """Order the push that is under way, which may have been lost with a node that is gone."""
        if self.pushing is None:
            return []
        return self._to_servers(PushUp(clock=self.pushing, replicas=self.replicas))

    def _receive(self, message: Received, now_s: float) -> Out:
        if message.clock != self.pushing:
            return []
        self._received.add(message.partition)
        if len(self._received) < self.plan.partitions:
            return []
        self.committed, self.pushing = message.clock, None
        out = self._to_all(Committed(clock=self.committed))
        if self.ending and self.committed >= self.ledger.closed:
            return out + self._conclude()
        out += self._save()
        out += self._push(now_s)
        displaced = any(name not in self._staying() for name in set(self.replicas))
        return out + (self._settle(now_s) if displaced else [])

    def _conclude(self) -> Out:
        """Write the last clock to the store, if there is one, and end."""
        open_ = (
            self.committed < self.ledger.closed or self.mirroring or self.awaited or self._saving
        )
        if not self.ending or open_:
            return []
        return self._save(last=True) if self.plan.save_every else self._end(self.ending)

    def _save(self, last: bool = False) -> Out:
        """Have the committed clock written to the store, every so often and at the end."""
        every = self.plan.save_every
        if not last and (not every or self.committed < self.saved + every or self._saving):
            return []
        self._saving = {self.committed: set()}
        save = Save(clock=self.committed, saved=self.saved)
        return [(name, save) for name in self.nodes if name in self.replicas]

    def save_again(self) -> Out:
        """Have the newest clock written, because one that was ordered cannot be written any more."""
        return self._marked(self._save(last=True)) if self._saving else []

    def _keep(self, message: Saved) -> Out:
        have = self._saving.get(message.clock)
        if have is None:
            return []
        have.add(message.partition)
        if len(have) < self.plan.partitions:
            return []
        self.saved, self._saving = message.clock, {}
        done = self.ending and self.saved >= self.ledger.closed
        return self._end(self.ending) if done else self._conclude()

    def _installed(self, sender: str, message: Installed, now_s: float) -> Out:
        number = message.partition
        if message.mirror:
            if self.replicas[number] == sender:
                self.mirroring.discard(number)
            return self._push(now_s) + self._conclude()
        if self.moves.get(number) == sender:
            del self.moves[number]
            self.owners[number] = sender
            return self._route() + self._mirror(number)
        if self.owners[number] == sender and number in self.awaited:
            self.awaited.discard(number)
            return self._mirror(number) + self._push(now_s) + self._conclude()
        return self._push(now_s)

    def _mirror(self, number: int) -> Out:
        """Have a replica made, if one is lacking and the partition is in its place."""
        ready = number in self.mirroring and number not in self.awaited | set(self.moves)
        if not ready or self.owners[number] not in self.nodes:
            return []
        to, at = self.replicas[number], self.committed
        order = Move(partition=number, to=to, mirror=True, committed=at, version=self.version)
        return [(self.owners[number], order)]

    def _route(self) -> Out:
        self.version += 1
        return self._to_all(self._route_now())

    def _route_now(self) -> Route:
        return Route(version=self.version, owners=list(self.owners), replicas=list(self.replicas))

    # Losses.

    def lost(self, names: Iterable[str], now_s: float) -> Out:
        """Go on without these nodes, which are gone without having left.

        One that still lives is to end, because nobody would end it later.
        """
        gone = [name for name in names if name in self.nodes]
        if not gone or self.ended:
            return []
        for name in gone:
            self._forget(name)
        leave: Out = [(name, Leave()) for name in gone]
        return self._marked(leave) + self._without(gone, now_s)

    def _without(self, gone: list[str], now_s: float) -> Out:
        if self.begun_s is None:  # the others may have waited for just these to load
            return self._marked(self._begin(now_s))
        if not self.nodes:
            return self._end("every machine is gone; the newest checkpoint is what is left")
        if self.plan.apart and all(node.reliable for node in self.nodes.values()):
            return self._rest(now_s)
        missing = self._missing(set(gone))
        orphans = {at for at, name in enumerate(self.replicas) if name not in self.nodes}
        only_there = {*missing, *self.moves, *self.awaited} if missing else self.awaited
        both = only_there & (orphans | self.mirroring)
        self._choose_stage(forced=True)
        self._replace_replicas()
        if both:
            return self._marked(self._from_store(now_s))
        out = self._to_all(Gone(nodes=gone))
        self.mirroring |= {at for at in orphans if self.replicas[at]}
        self.mirroring -= {at for at in orphans if not self.replicas[at]}
        if orphans:
            self.pushing, self._saving = None, {}
        if missing:
            out += self._roll_back(sorted(missing), now_s)
        else:
            out += (self._route() if orphans else []) + self._push_again()
        for at in sorted(self.mirroring):
            out += self._mirror(at)
        return self._marked(out + self._settle(now_s))

    def _missing(self, gone: set[str]) -> set[int]:
        """Return the partitions that nobody has but their replicas."""
        found = {at for at, name in enumerate(self.owners) if name in gone}
        return found | {at for at, to in self.moves.items() if to in gone}

    def _roll_back(self, missing: list[int], now_s: float) -> Out:
        """Everybody goes back to the committed clock, and does again what was after it."""
        lost = sorted({*missing, *self.moves, *self.awaited})
        self.notes.append(f"went back from clock {self.ledger.closed} to {self.committed}")
        return self._start_again(self.committed, lost, now_s)

    def _from_store(self, now_s: float) -> Out:
        self.committed = self.saved
        where = f"clock {self.saved} of the store" if self.saved >= 0 else "the start"
        self.notes.append(f"a reliable machine is gone with what only it had: back to {where}")
        self.mirroring = set()
        every = list(range(self.plan.partitions))
        return self._start_again(self.saved, every, now_s, restore=True)

    def _start_again(self, clock: int, lost: list[int], now_s: float, restore: bool = False) -> Out:
        self.rolls += 1
        self.epoch += 1
        self.ledger.roll_back(clock)
        self.pushing, self._last_close, self._saving = None, None, {}
        self.ending = self.plan.stop.reached(self.ledger.measures, self.elapsed_s(now_s))
        self.moves, self.releasing = {}, set()
        now = {at: None if at in lost else name for at, name in enumerate(self.owners)}
        homes = spread(now, self._servers(), self._replica_holders())
        for at in lost:
            self.owners[at] = homes[at]
        self.awaited = set(lost)
        targets = self._block_targets()
        for block, owner in self.blocks.items():
            if owner is None and targets.get(block) in self.holders[block]:
                self.blocks[block] = targets[block]
        out = self._roll_all(clock, lost, restore) + self._settle(now_s)
        return out + self._conclude()

    def _forget(self, name: str) -> None:
        del self.nodes[name]
        self.leaving.discard(name)
        self.asked.pop(name, None)
        self._seen_s.pop(name, None)
        for those in self.holders.values():
            those.discard(name)
        for block, owner in self.blocks.items():
            if owner == name:
                self.blocks[block] = None
                self.releasing.discard(block)

    def evicted(self, names: Iterable[str], warning_s: float, now_s: float) -> Out:
        """Have these nodes leave; if the warning is too short for that, they count as lost."""
        going = [name for name in names if name in self.nodes]
        risk = max(0, self.ledger.closed - self.committed) + 1
        unpushed: dict[str, float] = {}
        for at, owner in enumerate(self.owners):
            if owner in going and self.replicas[at]:
                size = self.plan.partition_bytes * min(risk, 2)
                unpushed[self.replicas[at]] = unpushed.get(self.replicas[at], 0.0) + size
        serving = any(owner in going for owner in self.owners)
        if serving and not self.plan.drain.fits(warning_s, unpushed, self.plan.bytes_per_s):
            self.notes.append(f"{warning_s:g} s are too short to leave: an effective failure")
            return self.lost(going, now_s)
        self.leaving |= set(going)
        self._choose_stage(forced=True)
        return self._marked(self._settle(now_s))

    def tick(self, now_s: float) -> Out:
        """Go on without nodes that give no sign of life, and push what waits for its time.

        After a pause without a tick all of them count as just seen, because this process may
        have stood still, and then their signs of life are still on their way.
        """
        paused = self._ticked_s is not None and now_s - self._ticked_s > self.plan.dead_s / 2
        self._ticked_s = now_s
        if paused:
            self._seen_s = dict.fromkeys(self.nodes, now_s)
        silent = (
            []
            if self.ended
            else [
                name
                for name in self.nodes
                if now_s - self._seen_s.get(name, now_s) > self.plan.dead_s
            ]
        )
        for name in silent:
            self.notes.append(
                f"{name} gave no sign of life for {self.plan.dead_s:g} s: its blocks are moved"
            )
        out = self.lost(silent, now_s)
        return out if self.ended else out + self._marked(self._push(now_s))

    def restarted(self) -> Out:
        """Say again what may not have been heard, and ask for what we may not have heard."""
        out = self._to_all(self._route_now())
        if self._last_close is not None:
            out += self._to_servers(self._last_close)
        out += self._push_again() + self._to_all(Committed(clock=self.committed))
        out += [(self.owners[at], self._move(at, to)) for at, to in self.moves.items()]
        out += self.save_again()  # what was asked may be passed, and then nobody has it any more
        out += self._to_all(Report())  # what is finished is heard before what is released
        for name in self.nodes:
            mine = {
                block: self.ledger.next[block] for block, own in self.blocks.items() if own == name
            }
            out.append((name, Grant(clocks=mine)))
            leave = sorted(block for block in mine if block in self.releasing)
            out.append((name, Release(blocks=leave)))
        return self._marked(out)

    # Who is to be where.

    @property
    def stage(self) -> int:
        """The stage of AgileML; the third is that in which reliable machines do no work."""
        return 3 if self.plan.apart else self.stages.stage

    def parts(self) -> list[Part]:
        """Return who does what now, the reliable nodes first, then those that run longest."""
        nodes = sorted(self.nodes.values(), key=lambda node: (not node.reliable, node.order))
        serves, blocks = Counter(self.owners), Counter(self.blocks.values())
        pairs = zip(self.owners, self.replicas, strict=True)
        copies = Counter(copy for owner, copy in pairs if copy != owner)
        return [
            Part(
                node=node.name,
                reliable=node.reliable,
                serves=serves[node.name],
                copies=copies[node.name],
                blocks=blocks[node.name],
            )
            for node in nodes
        ]

    def _staying(self) -> dict[str, Node]:
        return {name: node for name, node in self.nodes.items() if name not in self.leaving}

    def _choose_stage(self, forced: bool = False) -> None:
        staying = self._staying().values()
        reliable = sum(node.reliable for node in staying)
        clock = self.ledger.closed
        stages = self.stages._replace(since=clock - self.plan.dwell) if forced else self.stages
        self.stages = stages.next(clock, len(staying) - reliable, reliable, self.nic)
        self.unprotected = reliable == 0

    def _servers(self) -> list[str]:
        nodes = self._staying() or self.nodes
        stage = 2 if self.plan.apart else self.stages.stage
        found = actives(nodes.values(), stage, self.plan.partitions, set(self.owners))
        if self.plan.apart:  # who leaves serves to its end if there is nobody else
            left = [name for name, node in self.nodes.items() if not node.reliable]
            return found or sorted(set(self.owners) & set(left)) or left
        return found or list(nodes)

    def _workers(self) -> list[str]:
        nodes = self._staying() or self.nodes
        if self.plan.apart:
            return workers(nodes.values(), 3)
        return workers(nodes.values(), self.stages.stage) or list(nodes)

    def _block_targets(self) -> dict[int, str]:
        return spread(self.blocks, self._workers(), self.holders)

    def _reliable(self) -> list[str]:
        return [name for name, node in self._staying().items() if node.reliable]

    def _place_all(self) -> None:
        homes = spread(dict.fromkeys(range(self.plan.partitions)), self._servers())
        self.owners = [homes[at] for at in range(self.plan.partitions)]
        self._replace_replicas()

    def _replace_replicas(self) -> None:
        current = {
            at: name if name in self.nodes else None for at, name in enumerate(self.replicas)
        }
        homes = spread(current, self._reliable())
        self.replicas = [current[at] or homes.get(at, "") for at in range(self.plan.partitions)]

    def _settle(self, now_s: float) -> Out:
        """Move towards where everything is to be."""
        if self.begun_s is None:
            return self._begin(now_s)
        if self.ended:
            return []
        self._choose_stage()
        out = self._settle_partitions() + self._settle_replicas()
        out += self._settle_blocks() + self._settle_groups()
        return out + self._settle_leavers()

    def _settle_partitions(self) -> Out:
        now = {at: self.moves.get(at, name) for at, name in enumerate(self.owners)}
        homes = spread(now, self._servers(), self._replica_holders())
        out: Out = []
        for at, to in sorted(homes.items()):
            if to != self.owners[at] and at not in self.moves and at not in self.awaited:
                self.moves[at] = to
                out.append((self.owners[at], self._move(at, to)))
        return out

    def _replica_holders(self) -> dict[int, set[str]]:
        return {at: {name} for at, name in enumerate(self.replicas)}

    def _move(self, at: int, to: str) -> Move:
        whole = self.replicas[at] != to or at in self.mirroring
        return Move(partition=at, to=to, whole=whole, committed=self.committed)

    def _settle_replicas(self) -> Out:
        """Give every partition a replica, where reliable machines have come or are leaving."""
        wanted = {at: name for at, name in enumerate(self.replicas) if name in self._staying()}
        if len(wanted) == self.plan.partitions or not self._reliable():
            return []
        free = self.pushing is None and not self.awaited and not self.moves
        if not free:
            return []
        homes = spread({at: wanted.get(at) for at in range(self.plan.partitions)}, self._reliable())
        changed = [at for at in homes if at not in wanted]
        for at in changed:
            self.replicas[at] = homes[at]
        self.mirroring |= set(changed)
        self._saving = {}  # whoever was asked may be gone before the answer is here
        out = self._route()
        for at in changed:
            out += self._mirror(at)
        return out

    def _settle_blocks(self) -> Out:
        targets = self._block_targets()
        lacking: dict[str, list[int]] = {}
        grants: dict[str, dict[int, int]] = {}
        releases: dict[str, list[int]] = {}
        for block, target in sorted(targets.items()):
            owner = self.blocks[block]
            if target not in self.holders[block]:
                lacking.setdefault(target, []).append(block)
            elif owner is None:
                self.blocks[block] = target
                grants.setdefault(target, {})[block] = self.ledger.next[block]
            elif owner != target and block not in self.releasing:
                self.releasing.add(block)
                releases.setdefault(owner, []).append(block)
        holders = {block: those | self._loading(block) for block, those in self.holders.items()}
        staying = self._staying()
        eligible = {name: staying[name] for name in self._workers() if name in staying}
        if all(name in eligible for name in targets.values()):
            for name, those in preloads(targets, holders, eligible).items():
                lacking.setdefault(name, []).extend(those)
        out = self._load(lacking)
        out += [(name, Grant(clocks=clocks)) for name, clocks in grants.items()]
        for name, those in releases.items():
            out.append((name, Release(blocks=those, now=name in self.leaving)))
        return out

    def _loading(self, block: int) -> set[str]:
        return {name for name, those in self.asked.items() if block in those}

    def _load(self, wanted: dict[str, list[int]]) -> Out:
        out: Out = []
        for name, those in wanted.items():
            asked = self.asked.setdefault(name, set())
            new = [
                block for block in those if block not in asked and name not in self.holders[block]
            ]
            if new:
                asked.update(new)
                out.append((name, Load(blocks=new)))
        return out

    def _settle_groups(self) -> Out:
        """Draw helper groups whenever the workers change; helpers load what they may help with."""
        if not self.plan.help_size:
            return []
        names = [name for name in self._workers() if name in self._staying()]
        machines: dict[str, list[str]] = {}
        for name in sorted(names, key=lambda name: self.nodes[name].order):
            machines.setdefault(self.nodes[name].machine, []).append(name)
        order = groups.mixed(self._kinds(machines))
        helpers = groups.ring([machines[machine] for machine in order], self.plan.help_size)
        wanted: dict[str, list[int]] = {}
        for block, owner in self.blocks.items():
            for helper in helpers.get(owner or "", ()):
                wanted.setdefault(helper, []).append(block)
        out = self._load(wanted)
        if helpers != self._groups:
            self._groups, helpees = helpers, groups.inverse(helpers)
            out += [(name, Group(helpers=helpers[name], helpees=helpees[name])) for name in helpers]
        return out

    def _kinds(self, machines: dict[str, list[str]]) -> dict[str, str]:
        """Return what makes machines alike: what takes them away, and much or little work."""
        bounds, loads = self.plan.work.bounds, dict.fromkeys(machines, 0)
        for block, owner in self.blocks.items():
            if owner in self.nodes and self.nodes[owner].machine in loads:
                loads[self.nodes[owner].machine] += bounds[block + 1] - bounds[block]
        usual = sum(loads.values()) / max(1, len(loads))
        return {
            machine: f"{self.nodes[those[0]].domain} {loads[machine] > usual}"
            for machine, those in machines.items()
        }

    def _settle_leavers(self) -> Out:
        busy = {*self.owners, *self.replicas, *self.moves.values(), *self.blocks.values()}
        free = sorted(self.leaving - busy)
        if not free:
            return []
        for name in free:
            self._forget(name)
        leave: Out = [(name, Leave()) for name in free]
        return leave + self._to_all(Gone(nodes=free)) + self._push_again()

    # What is said.

    def _roll_all(self, clock: int, lost: list[int], restore: bool = False) -> Out:
        self.version += 1
        self._groups = {}
        return [(name, self._roll_for(name, clock, lost, restore)) for name in self.nodes]

    def _roll_for(self, name: str, clock: int, lost: list[int], restore: bool = False) -> Roll:
        return Roll(
            clock=clock,
            owners=list(self.owners),
            replicas=list(self.replicas),
            version=self.version,
            lost=lost,
            blocks=sorted(block for block, owner in self.blocks.items() if owner == name),
            restore=restore,
        )

    def _to_all(self, message: Message) -> Out:
        return [(name, message) for name in self.nodes]

    def _to_servers(self, message: Message) -> Out:
        """Return a message to whoever has a partition, or is being sent one."""
        serving = {*self.owners, *self.moves.values()}
        return [(name, message) for name in self.nodes if name in serving]

    def _end(self, why: str) -> Out:
        self.ended = why
        return self._to_all(End(why=why))

    def _marked(self, out: Out) -> Out:
        at = self.epoch
        return [
            (to, message if message.epoch == at else replace(message, epoch=at))
            for to, message in out
        ]
