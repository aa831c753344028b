"""Which workers of a job are here, shut out, or waited for. No torch here.

The job that owns the roster holds its lock; nothing here waits.

    holder     a member whose state is the newest committed version, or will be once it has applied
               the commit
"""

import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable
from itertools import combinations

from agent.keeper.commits import History
from agent.keeper.member import Member, Pace
from agent.keeper.reports import Reports
from agent.layout import Layout
from agent.messages import LossCause
from agent.protocol import Held, Noticed, Over
from cloud.clock import CLOCK

SILENT_S = 2.0  # in the layout, where others wait for it; a lost packet or a stolen processor takes a second
SILENT_EARLY_S = 30.0  # while it imports, builds or records, which may hold up all; or if unawaited
HUNG_S = 30.0  # alive, and without progress where it waits for no other worker
HUNG_S_MAX = 3600.0  # by then the manager has long seen that nothing is committed
HUNG_BYTES_PER_S = 1e8  # as slow as a state is moved at worst, in one piece
GONE_MAX = 10_000
PEER_GRACE_S = 0.5  # for a worker that died to be found by its own connection
TICK_S = 0.1  # between two looks at all jobs
LOSSES_MAX = 2  # in the middle of recording, before no worker is asked for a while
AGAIN_S, AGAIN_S_MAX = 600.0, 86_400.0
HANGS = "it hangs: for {:.0f} s nothing has happened there, where it waits for nobody"


class Suspicions:
    """Broken connections between workers, and which worker is lost because of them.

    Each of two workers whose connection broke accuses the other, and only one of them can be gone.
    Once the oldest accusation has had its time, the worker with most broken connections is lost;
    among equals one that is not spared, then the one that most accuse, then the newest. A worker
    that died is found before that time, by its own connection to the keeper. A worker that reaches
    no other accuses them all, and may be accused by none. What the lost worker said, and what was
    said of it, is dropped.
    """

    def __init__(self) -> None:
        self._due_s: dict[tuple[str, str], float] = {}  # accused, by whom

    def hear(self, accused: str, by: str, due_s: float) -> None:
        self._due_s.setdefault((accused, by), due_s)

    def drop(self, worker: str) -> None:
        """Forget all accusations by and of a worker that is gone."""
        self._due_s = {pair: due_s for pair, due_s in self._due_s.items() if worker not in pair}

    def clear(self) -> None:
        self._due_s.clear()

    def lost(self, now_s: float, spared: Collection[str] = ()) -> tuple[str, str] | None:
        """Return the worker to give up now, and a worker that accuses it or is accused by it."""
        if not any(due_s <= now_s for due_s in self._due_s.values()):
            return None
        broken = {frozenset(pair) for pair in self._due_s}
        counts = Counter(worker for pair in broken for worker in pair)
        accused = Counter(worker for worker, _ in self._due_s)
        worst = max(
            counts,
            key=lambda worker: (
                counts[worker],
                worker not in spared,
                accused[worker],
                len(worker),  # w10 is newer than w9
                worker,
            ),
        )
        return worst, min(one for pair in broken if worst in pair for one in pair - {worst})


class Recorders:
    """Which workers are asked to record the script, to find out whether it can be cut.

    Recording a loop may need more memory than there is, and kill the worker. So after a few losses
    in the middle of it no worker is asked for a while. Then one is asked again, ever more seldom,
    because machines are also taken away for other reasons.
    """

    def __init__(self) -> None:
        self.told = False  # a worker has said whether the script can be cut
        self._begun: set[str] = set()
        self._last = ""  # the last worker that has begun
        self._losses = 0
        self._again_s = 0.0  # before that no other worker is asked

    def begin(self, worker: str) -> None:
        self._begun.add(worker)
        self._last = worker

    def is_busy(self, worker: str) -> bool:
        """Whether recording may hold up all of its threads, as importing and building may."""
        return worker == self._last and not self.told

    def lost(self, worker: str, now_s: float, *, announced: bool) -> None:
        """Count a worker lost while recording, unless the cloud `announced` that it would go."""
        if worker not in self._begun:
            return
        self._begun.discard(worker)
        if self.told or announced:
            return
        self._losses += 1
        if self._losses >= LOSSES_MAX:
            pause_s = min(AGAIN_S * 2 ** (self._losses - LOSSES_MAX), AGAIN_S_MAX)
            self._again_s = now_s + pause_s

    def wanted(self, now_s: float) -> bool:
        """Whether the next leader shall record the script."""
        return not self.told and now_s >= self._again_s


class Patience:
    """A bound that doubles when it ended a worker at the same step as before.

    A script may hold up all threads at that step every time.
    """

    def __init__(self, bound_s: float, bound_s_max: float) -> None:
        self.bound_s, self._bound_s_max = bound_s, bound_s_max
        self._version = -1  # where it ended a worker last

    def ended(self, version: int) -> None:
        if self._version == version:
            self.bound_s = min(2 * self.bound_s, self._bound_s_max)
        self._version = version


class Roster:
    def __init__(self, history: History, reports: Reports, changed: threading.Condition) -> None:
        """`changed` is notified when a worker goes."""
        self._history, self._reports, self._changed = history, reports, changed
        self._gone: dict[str, str] = {}  # workers that never come back, and why
        self._goes_s: dict[str, float] = {}  # machines that the cloud will take, and when
        self._silent = Patience(SILENT_S, SILENT_EARLY_S)
        self._hung = Patience(HUNG_S, HUNG_S_MAX)
        self._ticks = Pace(TICK_S)
        self.suspicions = Suspicions()
        self.recorders = Recorders()
        self.members: dict[str, Member] = {}
        self.layout: Layout | None = None
        self.pending: Layout | None = None  # the next one
        self.started = False  # the layout was sent to its workers
        # The workers asked to send their state to those that lack it; None after a restart.
        self.sources: tuple[str, ...] | None = ()
        self.left: int | None = None  # the version with which scripts left their loops
        self.unled: int | None = None  # the committed step whose side effects no leader finished
        self.finishing: set[str] | None = None  # workers whose script has not ended yet
        self.came_to_end = False  # the script of one of them

    # --- who is here ------------------------------------------------------------------------------

    @property
    def complete(self) -> bool:
        """Whether every worker of the layout is here."""
        return self.layout is not None and not self.absent()

    def absent(self) -> list[str]:
        layout = self.layout
        return [w for w in layout.workers if w not in self.members] if layout is not None else []

    def inside(self) -> list[Member]:
        """Return the members that are in the layout."""
        layout = self.layout
        workers = layout.workers if layout is not None else ()
        return [self.members[worker] for worker in workers if worker in self.members]

    def outside(self) -> list[Member]:
        """Return the members that are not in the layout."""
        inside = self.layout.workers if self.layout is not None else ()
        return [member for worker, member in self.members.items() if worker not in inside]

    @property
    def crowd(self) -> int:
        """The most workers of the layout that share a machine."""
        counts = Counter(member.machine_id for member in self.inside())
        return max(counts.values(), default=1)

    def is_here(self, member: Member) -> bool:
        return self.members.get(member.worker) is member

    def holders(self) -> tuple[str, ...]:
        """Return the workers with the newest version; none if together they lack some of it."""
        newest = self._history.version
        found = {w: m.held for w, m in self.members.items() if m.version == newest}
        return () if _is_partial(found.values()) else tuple(found)

    def lacks_owners(self) -> bool:
        """Return whether those that are here do not hold all layers of what is committed.

        The newest layout may leave out a worker that holds the others, or the only one that holds
        any, so that nothing else says that it is still on its way.
        """
        newest, generation = self._history.version, self._history.generation
        found = [
            m.held
            for m in self.members.values()
            # The newest commit may not have reached a worker of its layout yet.
            if m.version == newest or (m.version == newest - 1 and m.generation == generation)
        ]
        return _is_partial(found) or (newest > 0 and not found)

    def copies(self, holders: Collection[str]) -> int:
        """Return how many machines that stay could go on alone with what these workers hold.

        If it takes several machines to hold the whole state, groups of them are counted; more than
        one counts only if two groups have no machine in common.
        """
        layout = self.layout
        stay = [m for w in holders if not (m := self.members[w]).noticed]
        if layout is None or not layout.owned:
            return len({member.machine_id for member in stay if member.held is None})
        staying = {member.worker: member.machine_id for member in stay}
        groups = [
            {staying[worker] for worker in replica.workers}
            for replica in layout.replicas
            if all(worker in staying for worker in replica.workers)
        ]
        if self._history.generation != layout.generation:
            groups = groups[:1]  # each fetches its own layers, and has them after the first step
        apart = any(one.isdisjoint(other) for one, other in combinations(groups, 2))
        return len(groups) if apart else min(1, len(groups))

    def hear_left(self, version: int) -> None:
        """Note that a script has left its loop, unless the job has gone on from that version.

        It may be of a worker outside of the layout, from which others are about to take over.
        """
        if version == self._history.version:
            self.left = version

    def tell_of_ends(self) -> None:
        """Notify members that are in a step which scripts that left their loops will not do."""
        left = self.left
        for member in self.inside():
            if left is not None and member.step >= left:
                member.post(Over(version=left))

    def refused(self, worker: str) -> str | None:
        """Return why this worker is not let in; None if it is."""
        return self._gone.get(worker)

    def comes_late(self, worker: str) -> bool:
        """Whether a worker has come while the job ends, and waits for that end.

        Sent away, it would count as lost, and be started again and again.
        """
        return self.finishing is not None and worker not in self.finishing

    def is_gone(self, worker: str) -> bool:
        return worker in self._gone

    def let_in(self, member: Member) -> None:
        earlier = self.members.pop(member.worker, None)
        if earlier is not None:
            earlier.close()
        self.members[member.worker] = member

    # --- who goes ---------------------------------------------------------------------------------

    def notice(self, machine_id: str, deadline_s: float) -> None:
        """Note that a machine will be taken, also for workers that dial from it later."""
        self._goes_s[machine_id] = time.monotonic() + max(0.0, deadline_s - CLOCK.now_s())
        while len(self._goes_s) > GONE_MAX:
            del self._goes_s[next(iter(self._goes_s))]
        for member in self.members.values():
            if member.machine_id == machine_id:
                self.tell_of_notice(member)

    def tell_of_notice(self, member: Member) -> None:
        """Tell a worker when its machine will be taken, if the cloud has said that it will."""
        member.goes_s = self._goes_s.get(member.machine_id)
        if member.goes_s is not None and member.noticed:
            member.post(Noticed(left_s=max(0.0, member.goes_s - time.monotonic())))

    def lose(self, worker: str, cause: LossCause, detail: str) -> None:
        """Shut a worker out for good, and report it as lost."""
        owed_state = self._owes_state(worker)
        member = self.remove(worker, f"it was declared lost ({cause}: {detail})")
        if member is not None:
            self.recorders.lost(worker, time.monotonic(), announced=member.noticed)
            member.close()
        if self.finishing is None:
            self._reports.lost(worker, cause, detail, owed_state=owed_state)

    def remove(self, worker: str, why: str) -> Member | None:
        self._gone[worker] = why  # it may hold a state from a past that the job has left
        while len(self._gone) > GONE_MAX:
            del self._gone[next(iter(self._gone))]
        self.suspicions.drop(worker)
        if self.layout is not None and worker in self.layout.workers:
            self._reports.disturbed()
        if self.finishing is not None:
            self.finishing.discard(worker)
        self._changed.notify_all()
        return self.members.pop(worker, None)

    def patient(self, bound_s: float) -> float:
        """Return `bound_s`, extended by how slow everything has been lately.

        Slowness is measured by the keeper's looks and the workers' heartbeats. So a worker that is
        late while others or the keeper are late too is not presumed dead yet.
        """
        beats = (m.beats.slowness for m in self.members.values() if m.ready is not None)
        slowness = max(self._ticks.slowness, *beats, 1.0)
        return min(bound_s * slowness, max(bound_s, SILENT_EARLY_S))

    def lose_the_silent(self, now_s: float, late_s: float) -> None:
        """Lose the members that were silent for too long.

        `late_s` is by how much this look is late: others may be late for the same reason.
        """
        self._ticks.note(late_s)
        for member in list(self.members.values()):
            busy = self.recorders.is_busy(member.worker)
            awaited = self._awaited(member) and not busy
            bound_s = self.patient(self._silent.bound_s) if awaited else SILENT_EARLY_S
            if (silent_s := member.silent_s(now_s)) > bound_s + late_s:
                self._silent.ended(self._history.version)
                self.lose(member.worker, "silent", f"nothing was heard for {silent_s:.1f} s")

    def lose_the_hung(self) -> None:
        """Lose members that send heartbeats and make no progress: others would wait for them."""
        for member in list(self.members.values()):
            if not member.hung_s or member.ready is None:
                continue
            if member.hung_s > self._hung.bound_s + moved_s(member):
                self._hung.ended(self._history.version)
                self.lose(member.worker, "silent", HANGS.format(member.hung_s))

    def suspect(self, accused: str, by: str, due_s: float) -> None:
        """Note that the connection between them broke.

        The accused may have died with an earlier keeper, and so be absent. A worker that is gone
        accuses nobody any more.
        """
        assert self.layout is not None
        matters = accused in self.layout.workers or self._owes_state(accused)
        if matters and not self.is_gone(accused) and not self.is_gone(by):
            self.suspicions.hear(accused, by, due_s)

    def lose_the_suspected(self, now_s: float) -> None:
        while (pair := self.suspicions.lost(now_s, self._living_holders(now_s))) is not None:
            accused, by = pair
            self.suspicions.drop(accused)
            if not self.is_gone(accused):
                self.lose(accused, "connection", f"its connection to {by} broke")

    def _living_holders(self, now_s: float) -> set[str]:
        """Return the holders that have just been heard: without them steps may be done again."""
        members = self.members
        return {w for w in self.holders() if members[w].silent_s(now_s) < PEER_GRACE_S}

    def _owes_state(self, worker: str) -> bool:
        """Whether workers of the layout wait for the state of this worker, which is not in it."""
        layout = self.layout
        if layout is None or worker in layout.workers:
            return False
        if self.sources is not None and worker not in self.sources:
            return False
        inside = self.inside()
        if any(member.version != self._history.version for member in inside):
            return True
        # They may have only some layers of the newest version, and be about to fetch the others.
        if layout.owned:  # what each needs is not known here: after their first step they have it
            return self._history.generation != layout.generation
        return any(member.held is not None for member in inside)

    def _awaited(self, member: Member) -> bool:
        """Whether others wait for it: in this layout, the next one, or for its state.

        A worker that is alone may stand still for a while. Nobody could go on without it sooner
        than it comes back.
        """
        if member.ready is None or len(self.members) == 1:
            return False
        layouts = (self.layout, self.pending)
        inside = any(layout is not None and member.worker in layout.workers for layout in layouts)
        return inside or self._owes_state(member.worker)


def moved_s(member: Member) -> float:
    """Return how long a member's state takes at worst, to it or from it."""
    return 0.0 if member.ready is None else member.ready.state_bytes / HUNG_BYTES_PER_S


def _is_partial(held: Iterable[Held | None]) -> bool:
    """Return whether workers hold something, and lack some layers together; None is everything."""
    parts = list(held)
    some = [each for each in parts if each is not None]
    together = {layer for each in some for layer in each.layers}
    return len(some) == len(parts) > 0 and len(together) < some[0].of
