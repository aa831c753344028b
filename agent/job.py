"""One job as the keeper runs it: who is there, in which layout, and what is committed.

The manager says which layout shall be; here it comes into being, and every step of it is committed. What
workers say arrives on one thread per connection; one lock makes the job's decisions one after the
other, and nothing that may take long (Redis, the disk, a worker that does not read) is done under it.

    version    steps committed, as the commit log has them
    holder     a member whose state is `version`, or will be as soon as it has applied the commit
"""

import logging
import math
import threading
import time
from collections.abc import Callable
from itertools import count
from typing import Protocol

from agent import commits
from agent.backup import Assembly, Backup, LoggedSum
from agent.errors import CheckpointError, Fenced, WireError
from agent.layout import Layout
from agent.member import Member
from agent.messages import (
    UNRECORDED,
    FailureKind,
    JobCompleted,
    JobOrder,
    LossCause,
    Report,
    When,
)
from agent.profile import Profile
from agent.protocol import (
    AnyMessage,
    Beat,
    Commit,
    Done,
    Ended,
    Enter,
    Failed,
    Hello,
    Holding,
    LayersAsked,
    Lines,
    Measured,
    Noticed,
    PeerBroken,
    Peers,
    Prepared,
    ProfileAsked,
    ProfileKnown,
    Ready,
    Recording,
    Redo,
    RedoAsked,
    Slice,
    Snapshot,
    State,
    Traced,
    Welcome,
)
from agent.reports import Reports
from agent.store.shares import bodies
from agent.suspicions import Suspicions
from agent.timeline import Timeline
from agent.vault import Place, Vault
from agent.watch import Watch
from agent.wire import Connection

log = logging.getLogger(__name__)

RECONNECT_S = 3.0  # how long a restarted keeper waits for the workers of the running layout
TAIL_S = 30.0  # for what the script does behind its loop
RETRY_S = 5.0
RECORDERS_MAX = 2
PEER_GRACE_S = 0.5
EVERYTHING = ((0, None),)
RECALLS_ELSEWHERE = 3  # tries, before what the disk has must do


class Out(Protocol):
    """Where a job says what happens: see `agent.outbox`."""

    def report(self, report: Report) -> None: ...

    def lines(self, job: str, worker: str, lines: tuple[str, ...]) -> None: ...

    def flush(self, patience_s: float) -> bool: ...

    def profile(self, key: str) -> Profile | None: ...

    def timeline(self, timeline: Timeline) -> None: ...


class Job:
    def __init__(
        self,
        order: JobOrder,
        script: bytes,
        log_: commits.CommitLog,
        out: Out,
        place: Place,
        completed: Callable[[JobCompleted], None],
    ) -> None:
        self.order, self._script = order, script
        self._log, self._out, self._completed = log_, out, completed
        self._lock = threading.Condition(threading.RLock())
        self._term, newest = log_.take(order.job)
        self.version = newest.version
        self._reports = Reports(order.job, out.report, newest.loss or 0.0)
        self._watch = Watch()
        self._commit_generation = newest.generation
        self.vault = Vault(order, place, out.report)
        self.vault.since = self.version
        self._recalling = self._recalled = False  # what is stored is being read; it was
        self.members: dict[str, Member] = {}
        self.layout: Layout | None = None
        self._started = False  # the layout was told to its workers
        self._sources: tuple[str, ...] = ()  # who was asked to hand its state to those who lack it
        self._recorded = False  # somebody has said whether the script can be cut
        self._recorders: set[str] = set()  # who has begun to find out
        self._trace_wanted = False
        self._traced: tuple[int, int] | None = None  # generation and step that are noted down
        self._moments: dict[str, Traced] = {}
        self._pending: Layout | None = None
        self._awaited_until_s: float | None = None
        self._prepared: dict[str, Prepared] = {}
        self._sums: Assembly | None = None
        self._committing = False
        self._suspicions = Suspicions()
        self._finishing: set[str] | None = None  # workers whose script is not at its end yet
        self._reopening = threading.Lock()
        self.closed = self.fenced = False  # the latter: by a newer keeper, as far as we know

    # --- what the manager says ----------------------------------------------------------------------

    def regroup(self, layout: Layout, when: When) -> None:
        with self._lock:
            newest = self._pending or self.layout
            if self.closed or (newest is not None and layout.generation <= newest.generation):
                return
            self._pending = layout
            idle = self.layout is None or not self._started or not self._complete()
            if (when == "now" or idle) and not self._committing and self._awaited_until_s is None:
                self._apply()

    def restore(self, layout: Layout) -> None:
        """The keeper was restarted: this is the layout that was running."""
        with self._lock:
            self.layout, self._started = layout, True
            self._awaited_until_s = time.monotonic() + RECONNECT_S

    def write_checkpoint(self) -> None:
        with self._lock:
            self.vault.write_beside()

    def trace(self) -> None:
        """Have the next step noted down that is played to its end in one layout."""
        with self._lock:
            self._trace_wanted = True

    def close(self) -> None:
        """Commit nothing more."""
        with self._lock:
            self.closed = True
            self._lock.notify_all()
            self._lock.wait_for(lambda: not self._committing, TAIL_S)
            members = list(self.members.values())
            self.members.clear()
        for member in members:
            member.dismiss("the job was closed")

    def put_away(self) -> bool:
        """Put what there is of a closed job on the disk. Says whether it is there."""
        saved = self.vault.saved
        if saved is None or self.fenced:
            return True
        return self.vault.write(saved, last=True)

    def lets_in(self, worker: str) -> bool:
        """Whether it is none of those that were let go, who dial again of their own accord."""
        with self._lock:
            return self._watch.gone(worker) is None

    def reopen(self) -> None:
        """It is closed, but what it holds is here only; or it was fenced, and is asked for here all the same."""
        with self._reopening:
            if self.closed:
                self._take_again()

    def _take_again(self) -> None:
        term, newest = self._log.take(self.order.job)
        with self._lock:
            if newest.version != self.version:
                self.vault.drop()
            self._term, self.version, self._commit_generation = (
                term,
                newest.version,
                newest.generation,
            )
            self.vault.begin_anew(self.version)
            self.layout, self._pending, self._awaited_until_s = None, None, None
            self._finishing, self._recalled = None, False
            self.closed = self.fenced = False

    def notice(self, machine_id: str, deadline_s: float) -> None:
        with self._lock:
            for member in self.members.values():
                if member.machine_id == machine_id:
                    member.post(Noticed(deadline_s=deadline_s))

    # --- who comes and goes -------------------------------------------------------------------------

    def join(self, connection: Connection, hello: Hello) -> Member | None:
        member = Member(connection, hello)
        with self._lock:
            why = self._watch.gone(hello.worker)
            if self._finishing is not None and hello.worker not in self._finishing:
                why = "the job is done"
            if why is not None or self.closed:
                member.dismiss(why or "the job was closed")
                return None
            earlier = self.members.pop(hello.worker, None)
            if earlier is not None:
                earlier.close()
            self.members[hello.worker] = member
            member.post(Welcome(order=self.order), self._script)
            addresses = {m.worker: m.mesh_address for m in self.members.values()}
            for each in self.members.values():
                each.post(Peers(addresses=addresses))
            if hello.ready is not None:
                self._on_ready(member, hello.ready)
            if self._awaited_until_s is not None and self._complete():
                self._carry_on()
        return member

    def leave(self, member: Member, cause: LossCause, detail: str) -> None:
        """Its connection is broken, or it is silent: it is out, and never comes back."""
        with self._lock:
            if self.members.get(member.worker) is not member:
                return
            self._lose(member.worker, cause, detail)

    def _lose(self, worker: str, cause: LossCause, detail: str) -> None:
        owed_state = self._owes_state(worker)
        member = self._remove(worker, f"it was declared lost ({cause})")
        if member is not None:
            member.close()
        if self._finishing is None:
            self._reports.lost(worker, cause, detail, owed_state=owed_state)

    def _owes_state(self, worker: str) -> bool:
        """Whether those of the layout wait for the state of this one, who is not in it."""
        layout = self.layout
        if layout is None or worker in layout.workers or worker not in self._sources:
            return False
        inside = [self.members[w] for w in layout.workers if w in self.members]
        if any(member.version != self.version for member in inside):
            return True
        # Of the newest version they may have some layers only, and be about to fetch the others.
        return not layout.owned and any(member.held is not None for member in inside)

    def _remove(self, worker: str, why: str) -> Member | None:
        self._watch.shut_out(worker, why)
        self._suspicions.drop(worker)
        if self.layout is not None and worker in self.layout.workers:
            self._reports.disturbed()
        if self._finishing is not None:
            self._finishing.discard(worker)
            self._lock.notify_all()
        return self.members.pop(worker, None)

    def _complete(self) -> bool:
        """Whether everyone of the layout is there."""
        layout = self.layout
        return layout is not None and all(worker in self.members for worker in layout.workers)

    def _awaited(self, member: Member) -> bool:
        """Whether others wait for it: in the layout, in the one that comes next, or for the state that it has."""
        if member.ready is None:
            return False
        layouts = (self.layout, self._pending)
        inside = any(layout is not None and member.worker in layout.workers for layout in layouts)
        return inside or self._owes_state(member.worker)

    def tick(self, now_s: float, late_s: float) -> None:
        """`late_s` is by how much this very call is late: others may be late for the same reason."""
        with self._lock:
            for member in list(self.members.values()):
                bound_s = self._watch.bound_s(awaited=self._awaited(member))
                if (silent_s := member.silent_s(now_s)) > bound_s + late_s:
                    self._watch.wait_longer(self.version)
                    self._lose(member.worker, "silent", f"nothing was heard for {silent_s:.1f} s")
            while (pair := self._suspicions.lost(now_s)) is not None:
                self._suspect(*pair)
            if self._awaited_until_s is not None and now_s > self._awaited_until_s:
                self._carry_on()
            if self.vault.due() and not self.closed:
                self.vault.write_beside()
            if self._held_up() and self.vault.wants:
                self._ask_for_state()

    def _held_up(self) -> bool:
        """Whether everyone waits for a backup: no commit is a moment to ask for it again."""
        here = self._started and not self.closed and self._awaited_until_s is None
        return here and self._complete() and not self.vault.open

    def _suspect(self, accused: str, by: str) -> None:
        self._suspicions.drop(accused)
        if accused in self.members:
            self._lose(accused, "connection", f"its connection to {by} broke")

    # --- layouts ------------------------------------------------------------------------------------

    def _apply(self) -> None:
        """The layout that was asked for becomes the one."""
        assert self._pending is not None
        self.layout, self._pending, self._started = self._pending, None, False
        self._prepared.clear()
        self._sums = None
        self._suspicions.clear()
        self.vault.stop_asking()
        self._reports.regrouping()
        absent = [w for w in self.layout.workers if w not in self.members]
        for worker in absent:
            self._lose(worker, "connection", "it is not connected")
        if not absent:
            self._start()

    def _holders(self) -> tuple[str, ...]:
        """Who has the newest version: together all of it, or nobody counts."""
        found = {w: m.held for w, m in self.members.items() if m.version == self.version}
        parts = [held for held in found.values() if held is not None]
        together = {layer for held in parts for layer in held.layers}
        if len(parts) == len(found) > 0 and len(together) < parts[0].of:
            return ()
        return tuple(found)

    def _start(self) -> None:
        """Everyone is there: tell them, and see to it that they get the state."""
        layout = self.layout
        assert layout is not None
        holders = self._holders()
        reached = self.vault.reached
        if not holders and reached not in (None, self.version) and not self._go_back(reached):
            return
        if not holders and self.vault.backup is None:
            if not self._recalled:
                self._recall()
                return
            if not self._begin_anew():
                return
            holders = self._holders()
        snapshot = self.vault.wants
        if snapshot:
            self.vault.ask(layout, self.version)
        enter = Enter(
            layout=layout,
            version=self.version,
            holders=holders,
            addresses={w: m.mesh_address for w, m in self.members.items()},
            held={w: h.layers for w in holders if (h := self.members[w].held) is not None},
            redo=0 if holders else len(self.vault.redo),
            snapshot=snapshot,
            record=self._wants_recorded(layout.workers[0]),
        )
        for worker in dict.fromkeys((*layout.workers, *holders)):
            member = self.members[worker]
            member.post(enter)
            member.fresh, member.generation = False, layout.generation
            if worker not in holders or worker not in layout.workers:
                member.version = None
            if not holders and not layout.owned:
                self._send_backup(member, layout.generation)
        self._started, self._sources = True, holders

    def _wants_recorded(self, leader: str) -> bool:
        """Who begins and never says may have died of it: a few may, and not all that ever come."""
        few = len(self._recorders) < RECORDERS_MAX
        return not self._recorded and (few or leader in self._recorders)

    def _send_backup(
        self, member: Member, generation: int, wanted: tuple[str, ...] | None = None
    ) -> None:
        """All of it, or the layers that were asked for."""
        backup = self.vault.backup
        assert backup is not None
        layers = tuple(each for each in backup.layers if wanted is None or each.name in wanted)
        state = State(generation=generation, version=backup.version, layers=layers)
        member.post(state, *bodies(layers, backup.bodies))

    def _send_logged(self, member: Member, asked: RedoAsked) -> None:
        """One by one, as a worker has room for them: so a newer layout is never behind all of them."""
        if self.layout is None or asked.generation != self.layout.generation:
            return
        logged = self.vault.logged(asked.step)
        if logged is None:
            raise WireError(
                f"{member.worker} asked for the sum of step {asked.step}, which is gone"
            )
        redo = Redo(generation=asked.generation, step=logged.step, present=logged.present)
        member.post(redo, *(logged.body[start:end] for start, end in asked.spans or EVERYTHING))

    def _recall(self) -> None:
        """Nobody holds the state, and nor do we: read what is stored, beside whatever else happens."""
        if not self._recalling:
            self._recalling = True
            threading.Thread(target=self._read_beside, name="recall", daemon=True).start()

    def _read_beside(self) -> None:
        found = None
        for attempt in count():
            try:
                found = self.vault.recall(self.version, elsewhere=attempt < RECALLS_ELSEWHERE)
                break
            except (CheckpointError, OSError, MemoryError) as error:
                self._reports.recall_failed(str(error) or type(error).__name__)
                with self._lock:
                    if self._lock.wait_for(lambda: self.closed, RETRY_S):
                        break
        with self._lock:
            self._recalling, self._recalled = False, True
            if self.closed or self.vault.backup is not None:
                return
            if found is not None and found.saved is not None:
                self.vault.adopt(found.saved)
                self._reports.recalled(found.saved.reached, found.because)
            if not self._started and self._complete():
                self._start()

    def _begin_anew(self) -> bool:
        """Nothing is stored either: somebody who has the state that the script began with is the holder."""
        if self.version and not self._go_back(0):
            return False
        assert self.layout is not None
        fresh = [w for w in self.layout.workers if self.members[w].fresh]
        if fresh:
            self.members[fresh[0]].version = 0
            return True
        for worker in self.layout.workers:
            self._lose(worker, "connection", "its state is from a past that was lost")
        return False

    def _go_back(self, version: int) -> bool:
        """Whether it is for us to say."""
        generation = max(self._commit_generation, 0)
        commit = commits.Commit(generation=generation, version=version, loss=None)
        try:
            self._log.rewind(self.order.job, self._term, commit)
        except Fenced as error:
            self._give_up(error)
            return False
        before, self.version = self.version, version
        self.vault.since = version
        if version < before:
            self._reports.rewound(before, version)
        return True

    def _carry_on(self) -> None:
        """After a restart: who is there goes on where it was, as far as they fit together."""
        layout = self.layout
        assert layout is not None
        self._awaited_until_s = None
        for member in self.members.values():
            same = member.generation == self._commit_generation
            if same and member.version == self.version - 1:  # the commit has not reached it yet
                member.post(Commit(generation=member.generation, version=self.version))
                member.version = self.version
        for worker in layout.workers:
            if worker not in self.members:
                self._lose(worker, "connection", "it did not come back to the restarted keeper")
        if self._pending is not None:
            self._apply()
            return
        inside = [m for m in self.members.values() if m.generation == layout.generation]
        if not inside and self._complete():
            self._start()
            return
        holding = any(m.version == self.version for m in inside)
        for member in inside if not holding else list(self.members.values()):
            fits = member.generation == layout.generation and member.version == self.version
            if member.worker in layout.workers and not fits:
                self._lose(
                    member.worker, "connection", "it was on its way when the keeper restarted"
                )
        if self._complete():
            self._ask_for_state()

    def _ask_for_state(self) -> None:
        layout = self.layout
        assert layout is not None
        self.vault.ask(layout, self.version)
        for worker in layout.workers:
            self.members[worker].post(
                Commit(generation=layout.generation, version=self.version, snapshot=True)
            )

    # --- what workers say ---------------------------------------------------------------------------

    def place(self, member: Member, message: AnyMessage, size: int) -> memoryview | None:
        """Where the payload of `message` shall land."""
        with self._lock:
            if self.members.get(member.worker) is not member or self.layout is None:
                return None
            if isinstance(message, Snapshot):
                return self.vault.place(message, self.layout)
            if isinstance(message, Slice) and self._is_current(message.generation, message.step):
                return self._sum(message.total).place(message.offset, size)
        return None

    def receive(self, member: Member, message: AnyMessage, payload: memoryview) -> None:
        if isinstance(message, Beat):
            member.beat(message.microbatch_s)
            return
        if isinstance(message, ProfileAsked):  # without the lock: Redis may be away
            self._look_up(member, message.key)
            return
        with self._lock:
            if self.members.get(member.worker) is not member:
                return
            self._handle(member, message, payload)
            commit = self._next_commit()
        if commit is not None:
            self._commit(commit)

    def _handle(  # noqa: PLR0912 - one branch per message
        self, member: Member, message: AnyMessage, payload: memoryview
    ) -> None:
        match message:
            case Ready():
                self._on_ready(member, message)
            case Slice():
                if self._is_current(message.generation, message.step):
                    self._sum(message.total).take(message.offset, payload)
            case Prepared():
                self._on_prepared(member, message)
            case Holding():
                if self.layout is not None and message.generation == self.layout.generation:
                    member.version, member.held = message.version, message.held
            case Snapshot():
                if self.layout is not None:
                    whole = self.vault.take(message, payload, member.worker, self.layout)
                    if whole is not None and message.final:
                        self._finish(whole)
            case Recording():
                self._recorders.add(member.worker)
            case Measured():
                self._reports.profiled(member.worker, message.profile)
            case Traced():
                self._on_traced(member.worker, message)
            case LayersAsked():
                if self.layout is not None and message.generation == self.layout.generation:
                    self._send_backup(member, message.generation, message.layers)
            case RedoAsked():
                self._send_logged(member, message)
            case PeerBroken():
                if self.layout is not None and message.generation == self.layout.generation:
                    due_s = time.monotonic() + PEER_GRACE_S
                    self._suspicions.hear(message.peer, member.worker, due_s)
            case Lines():
                self._out.lines(self.order.job, member.worker, message.lines)
            case Failed():
                self._on_failed(member, message.kind, message.detail)
            case Ended():
                self._remove(member.worker, "its script has ended")
                member.dismiss("the script has ended")
            case _:
                raise WireError(f"{member.worker} sent {type(message).__name__}")

    def _on_ready(self, member: Member, ready: Ready) -> None:
        other = next((m for m in self.members.values() if m.ready and m is not member), None)
        if other is not None and other.ready is not None and _unlike(ready, other.ready):
            why = f"its model would have other initial values than that of {other.worker}"
            seed = "call torch.manual_seed(...) before unbuilt(...)"
            self._on_failed(member, "setup", f"{member.worker}: {why}: {seed}")
            return
        member.ready = ready
        self._recorded |= ready.uncuttable != UNRECORDED
        self._reports.ready(member, ready)

    def _look_up(self, member: Member, key: str) -> None:
        profile = self._out.profile(key)
        if profile is not None:
            self._reports.profiled(member.worker, profile)
        unprobed = profile if profile is not None and profile.network_from != "measured" else None
        member.post(ProfileKnown(key=key, known=profile is not None, unprobed=unprobed))

    def _on_traced(self, worker: str, traced: Traced) -> None:
        layout = self.layout
        if layout is None or (traced.generation, traced.step) != self._traced:
            return
        self._moments[worker] = traced
        if set(self._moments) != set(layout.workers):
            return
        self._trace_wanted, self._traced = False, None
        self._out.timeline(
            Timeline(
                job=self.order.job,
                step=traced.step,
                at_s=time.time(),
                layout=layout,
                cuts=max((each.cuts for each in self._moments.values()), key=len),
                workers={name: each.moments for name, each in self._moments.items()},
            )
        )

    def _on_failed(self, member: Member, kind: FailureKind, detail: str) -> None:
        self._remove(member.worker, "its script failed")
        member.dismiss("the script failed")
        self._reports.failed(member.worker, kind, detail)

    # --- commits ------------------------------------------------------------------------------------

    def _is_current(self, generation: int, step: int) -> bool:
        layout = self.layout
        return layout is not None and generation == layout.generation and step == self.version

    def _sum(self, total: int) -> Assembly:
        if self._sums is None:
            self._sums = Assembly(total)
        if self._sums.total != total:
            raise WireError(f"a sum of {total} bytes, but others say {self._sums.total}")
        return self._sums

    def _on_prepared(self, member: Member, message: Prepared) -> None:
        if self._is_current(message.generation, message.step):
            self._prepared[member.worker] = message
        elif message.step < self.version:
            member.post(Commit(generation=message.generation, version=self.version))

    def _next_commit(self) -> commits.Commit | None:
        """The commit that can be written now. It is the only one until it is written."""
        layout = self.layout
        if layout is None or self._committing or self.closed or not self.vault.open:
            return None
        if self._sums is None or not self._sums.whole or self._awaited_until_s is not None:
            return None
        if any(worker not in self._prepared for worker in layout.workers):
            return None
        self._committing = True
        loss = self._prepared[layout.workers[0]].loss
        return commits.Commit(generation=layout.generation, version=self.version + 1, loss=loss)

    def _commit(self, commit: commits.Commit) -> None:
        """Write it down, however long Redis is away; then tell everyone."""
        try:
            self._log.write(self.order.job, self._term, commit)
        except Fenced as error:
            self._give_up(error)
            return
        with self._lock:
            self._committing = False
            self._take_commit(commit)
            self._lock.notify_all()

    def _give_up(self, error: Fenced) -> None:
        """Somebody newer writes the commits of this job: it is theirs, and not ours any more."""
        log.error("%s", error)
        self._out.lines(self.order.job, "keeper", (f"{error}; this keeper commits no more",))
        with self._lock:
            self.closed, self.fenced, self._committing = True, True, False
            for worker in list(self.members):
                self._lose(worker, "connection", "another keeper has taken the job over")
            self._lock.notify_all()

    def _take_commit(self, commit: commits.Commit) -> None:
        layout, sums = self.layout, self._sums
        assert layout is not None
        assert sums is not None
        present = self._prepared[layout.workers[0]].present
        held = {worker: prepared.held for worker, prepared in self._prepared.items()}
        self.vault.log(LoggedSum(self.version, present, sums.body))
        self.version, self._commit_generation = commit.version, layout.generation
        if commit.loss is not None and math.isfinite(commit.loss):
            self._reports.loss = commit.loss  # a skipped step has none that could be shown
        self._prepared.clear()
        self._sums = None
        snapshot = self.vault.wants and self._pending is None
        if snapshot:
            self.vault.ask(layout, self.version)
        trace = self._trace_wanted and self._pending is None
        if trace:
            self._traced, self._moments = (layout.generation, self.version), {}
        told = Commit(
            generation=layout.generation, version=self.version, snapshot=snapshot, trace=trace
        )
        for worker in layout.workers:
            if (member := self.members.get(worker)) is not None:
                member.version, member.held = self.version, held[worker]
                member.post(told)
        ready = next((m.ready for m in self.members.values() if m.ready is not None), None)
        steps_total = ready.steps_total if ready is not None else 0
        self._reports.progress(layout.generation, self.version, steps_total)
        inside = [self.members[w] for w in layout.workers if w in self.members]
        self._reports.paces(layout.generation, inside)
        if self._pending is not None and not self.closed:
            self._apply()

    # --- the end ------------------------------------------------------------------------------------

    def _finish(self, final: Backup) -> None:
        if self._finishing is None:
            assert self.layout is not None
            self._finishing = set(self.layout.workers)
            threading.Thread(
                target=self._wind_up, args=(final, self._finishing), name="wind-up", daemon=True
            ).start()

    def _wind_up(self, final: Backup, finishing: set[str]) -> None:
        """Put the result on the disk, let the scripts end, then say that the job is complete."""

        def over() -> bool:
            return self.closed or self._finishing is not finishing

        while (result := self.vault.store(final)) is None:
            with self._lock:
                if self._lock.wait_for(over, RETRY_S):
                    return
        with self._lock:
            if over():
                return
            for member in self.members.values():
                if member.worker in finishing:
                    member.post(Done())
                else:
                    member.dismiss("the job is done")
            self._lock.wait_for(lambda: over() or not finishing, TAIL_S)
        sha, uri = result
        self._completed(self._reports.completed(final.version, sha, uri))


def _unlike(one: Ready, other: Ready) -> bool:
    """Whether they would give a model that is built in parts other initial values."""
    return one.unbuilt is not None and (
        other.unbuilt is None or one.unbuilt.mark != other.unbuilt.mark
    )
