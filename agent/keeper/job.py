"""One job in the keeper: requests of the manager, messages of workers, and commits.

The manager says which layout to run; `agent.keeper.layouts` starts it, `agent.keeper.roster`
knows which workers are there, and this module commits every step. Messages of workers arrive on one
thread per connection. One lock makes the job's decisions one after the other, and nothing that may
take long (Redis, the disk, a worker that does not read) is done under it.

    version    steps committed, as the commit log has them
"""

import logging
import math
import threading
import time
from collections.abc import Callable

import msgspec

from agent.errors import CheckpointError, Fenced, WireError
from agent.keeper import commits, tables
from agent.keeper.admission import Entrance
from agent.keeper.completion import Ending, Tail
from agent.keeper.layouts import Regrouping
from agent.keeper.lone_proof import Trial
from agent.keeper.member import Member
from agent.keeper.outbox import Out
from agent.keeper.output_files import Outputs
from agent.keeper.pending_step import Round
from agent.keeper.reports import Reports
from agent.keeper.roster import PEER_GRACE_S, Roster
from agent.keeper.served import ServedJob
from agent.keeper.step_trace import Tracing
from agent.keeper.storage.vault import Place, Vault
from agent.layout import Layout
from agent.messages import (
    UNRECORDED,
    BackupHeld,
    CheckpointCopied,
    CheckpointFailed,
    CheckpointWritten,
    CopyFailed,
    JobCompleted,
    JobOrder,
    LossCause,
    Progress,
    Recalled,
    Regrouped,
    Report,
    When,
)
from agent.net.wire import Connection
from agent.protocol import (
    AnyMessage,
    Arrived,
    Beat,
    Commit,
    Ended,
    Failed,
    Hello,
    Holding,
    LayersAsked,
    Lines,
    LoopLeft,
    Measured,
    Numbers,
    OutputAsked,
    OutputSent,
    OutputWhole,
    Part,
    PeerBroken,
    Peers,
    Prepared,
    ProfileAsked,
    ProfileKnown,
    Proved,
    Ready,
    Recording,
    RedoAsked,
    ScriptValues,
    Serving,
    Slice,
    Snapshot,
    Strayed,
    Traced,
    Unable,
    Unled,
    Unread,
    Untried,
    Welcome,
)

log = logging.getLogger(__name__)

CLOSE_S = 30.0  # for the commit that is being written
COPIED_S = 10.0  # less than the manager waits for a job to be put away
OUTPUT_S = 5.0  # for the output that has arrived from the script
WHOLE_S = 60.0  # after a requested checkpoint, as its requester means to end this machine


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """How far a held job has come.

    `held`: all are prepared for a step that must not be committed. `lacking`: a worker waits for a
    commit of a step by which it could prove itself.
    """

    held: bool
    lacking: bool


class KeptJob:
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
        self._out = out
        self._lock = threading.Condition(threading.RLock())
        self.history = commits.History(log_, order.job)
        self._reports = Reports(order.job, self._report, self.history.loss)
        if not self.history.first:
            self._reports.sums_told = None
        self.vault = Vault(order, place, self._report)
        self.vault.since = self.history.version
        self.roster = Roster(self.history, self._reports, self._lock)
        self._round = Round(self.vault.memory.take)
        self._owed_at = 0  # the version at which it was asked for
        self._owed = False  # a checkpoint, to be written once no step is lacking in it
        self._tracing = Tracing(order.job)
        self.outputs = Outputs(order, place.checkpoints / order.job, out)
        self._entrance = Entrance(
            self.history, self.roster, self.vault, self._reports, self._on_failed, self._say
        )
        self._entrance.begins_with, self._entrance.exact = order.begins_with, order.exact
        self._trial = Trial(self.roster, self.vault, self._entrance, self._on_failed, self._say)
        self._trial.wanted = order.begins_with > 0
        self._regrouping = Regrouping(
            self.history, self.roster, self.vault, self._reports, self._entrance, self._lock
        )
        self._regrouping.begun, self._regrouping.gave_up = self._round.begin, self._give_up
        self._regrouping.committing = lambda: self._committing
        self._regrouping.resumed = self._report_progress
        self.history.steps = self.vault.proofs.step_of
        self._recall_place()

        def ended(done: JobCompleted) -> None:
            step = self.vault.proofs.step_of(done.step, ended=True)
            completed(msgspec.structs.replace(done, step=step))

        self._completed = ended
        self._tail = Tail(order.tail_s, self.roster, self._lock, lambda: self.closed, self._say)
        self._ending = Ending(self._tail, self.roster, self.vault, self._lock, self._reports, ended)
        self._committing = False
        self._microbatches = order.microbatches  # of a step; 0 until a worker is ready
        self._held_at: int | None = None  # from this step of the script on nothing is committed
        self._reopening = threading.Lock()
        self.closed = self.fenced = False  # fenced: by a newer keeper, as far as we know
        self._served: ServedJob | None = None  # if its workers are nodes of a parameter server
        self._tables_at = place.checkpoints / order.job / "tables"

    # --- what the manager says --------------------------------------------------------------------

    def regroup(self, layout: Layout, when: When) -> None:
        with self._lock:
            if self.closed or self.roster.finishing is not None:
                return
            if self._served is None:
                self._regrouping.ask(layout, when)
            else:
                self._served.regroup(layout)

    def restore(self, layout: Layout) -> None:
        """Set the layout that was running before the keeper was restarted."""
        with self._lock:
            self._regrouping.restore(layout)

    def write_checkpoint(self) -> None:
        """Write a checkpoint that has every committed step in it, once no sum is lacking here."""
        with self._lock:
            if self._served is not None:
                self._served.tables.write_checkpoint()
                return
            self._owed = True
            self._owed_at, self.vault.sharding.hurried = self.history.version, True
            self._see_to_what_is_owed()

    def _see_to_what_is_owed(self) -> None:
        """Try to write an owed checkpoint; called repeatedly.

        A state may take time to arrive, and another version may be on its way to the disk.
        """
        if self._owed and not self.closed and self.vault.sharding.on:
            backup = self.vault.backup
            self._owed = backup is None or backup.version < self._owed_at
        elif self._owed and not self.closed:
            self.vault.insist(WHOLE_S)
            self._owed = self.vault.behind > 0 or not self.vault.write_beside()

    def hold(self, step: int | None) -> None:
        """Commit nothing from this step of the script on, until a different or no step is given."""
        with self._lock:
            self._held_at = step
            commit = self._next_commit()
        if commit is not None:
            self._commit(commit)

    def standing(self) -> Standing:
        """Return how far a held job has come."""
        with self._lock:
            layout = self.roster.layout
            ready = layout is not None and self._round.whole(layout)
            held = layout is not None and ready and self._is_held(layout)
            return Standing(held=held and not self._committing, lacking=self.vault.awaited)

    def trace(self) -> None:
        """Record a timeline of the next step that is played to its end in one layout."""
        with self._lock:
            self._tracing.wanted = True

    def close(self) -> None:
        """Commit nothing more."""
        if self._served is not None:
            self._served.tables.close()
        with self._lock:
            self._shut()
            self._lock.wait_for(lambda: not self._committing, CLOSE_S)
            self._trial.close("the job was closed")
            members = list(self.roster.members.values())
            self.roster.members.clear()
        for member in members:
            member.dismiss("the job was closed")
        self.outputs.close(OUTPUT_S)

    def forsake(self) -> None:
        """End with the keeper without notifying workers, so that they wait for the next keeper."""
        with self._lock:
            self._shut()
            if self._served is not None:
                self._served.tables.leave()
            self.vault.leave()
            self.outputs.close()
            self._trial.close()
            for member in self.roster.members.values():
                member.close()

    def _shut(self) -> None:
        self.closed = True
        self._regrouping.close()
        self._lock.notify_all()

    def put_away(self) -> bool:
        """Write the state of a closed job to the disk. Return whether it is there."""
        if self.fenced:
            return True
        if self._served is not None:  # the disk has each clock
            self._served.tables.put_away()
            self.vault.clear()
            return True
        saved = (
            self.vault.saved
            or self.vault.left(self.history.version)
            or tables.left(self._tables_at, self.order.job)
        )
        beside = self.vault.beside
        away = saved is None or self.vault.write(saved, beside=beside, last=True, copied_s=COPIED_S)
        with self._reopening:
            if away and self.closed:  # not taken up again while it was written
                with self._lock:
                    self.vault.drop()
                self.vault.clear()
        return away

    def lets_in(self, worker: str) -> bool:
        """Whether this worker was not shut out; those that were may still dial again."""
        with self._lock:
            return not self.roster.is_gone(worker)

    def reopen(self) -> None:
        """Take the job up again after it was closed or fenced.

        Either it is closed and its state is only here, or it was fenced but is requested here
        again.
        """
        with self._reopening:
            if self.closed:
                self._take_again()

    def _take_again(self) -> None:
        term, newest = self.history.take()
        with self._lock:
            if not self.history.resume(term, newest):
                self.vault.drop()
            self._recall_place()
            self.vault.begin_anew(self.history.version)
            self._regrouping.forget()
            self._served = None
            self.roster.left = self.roster.finishing = None
            self.closed = self.fenced = False

    def _recall_place(self) -> None:
        """Learn where in the script the newest commit is, before any worker has said it.

        Else the middle of a step would be taken for its beginning, and commits for steps.
        """
        newest = self.history.newest
        self.vault.proofs.recall(
            newest.version - 1, newest.script_step, newest.phase, newest.phases
        )

    def notice(self, machine_id: str, deadline_s: float) -> None:
        with self._lock:
            self.roster.notice(machine_id, deadline_s)
            if self._served is not None:
                self._served.notice(machine_id, deadline_s)

    # --- who comes and goes -----------------------------------------------------------------------

    def join(self, connection: Connection, hello: Hello) -> Member | None:
        member, roster = Member(connection, hello), self.roster
        with self._lock:
            why = roster.refused(hello.worker)
            if why is not None or self.closed:
                member.dismiss(why or "the job was closed")
                return None
            if member.prover:
                self._join_prover(member, hello)
                return member
            roster.let_in(member)
            # A worker that comes again has its script, which may be large.
            script = self._script if hello.ready is None else b""
            welcome = Welcome(
                order=self.order,
                state_bytes=self._state_bytes(),
                microbatches=self._microbatches_known(),
            )
            member.post(welcome, script)
            roster.tell_of_notice(member)
            addresses = {m.worker: m.mesh_address for m in roster.members.values()}
            for each in roster.members.values():
                each.post(Peers(addresses=addresses))
            if hello.ready is not None:
                self._on_ready(member, hello.ready)
            if hello.left is not None:
                roster.hear_left(hello.left)
            self._regrouping.joined(member)
            self._ending.joined(member)
        return member

    def _join_prover(self, prover: Member, hello: Hello) -> None:
        """Take a prover in. It is no member, so no other worker hears of it."""
        known = self._microbatches_known()
        script = self._script if hello.ready is None else b""
        prover.post(Welcome(order=self.order, microbatches=known), script)
        self._trial.join(prover)

    def _microbatches_known(self) -> int:
        """Return the microbatches of a step; 0 if no worker has said it yet.

        A worker that does not know it begins with a step that may count for nothing, without a
        loss. Many scripts end themselves then, so it is known for as long as the job.
        """
        layout = self.roster.pending or self.roster.layout
        return self._microbatches if layout is None else layout.microbatches

    def _state_bytes(self) -> int:
        """Return the size of a whole state if every worker keeps one; otherwise 0."""
        layout, backup = self.roster.layout, self.vault.backup
        whole = layout is not None and not layout.owned
        return backup.state_bytes if whole and backup is not None else 0

    def leave(self, member: Member, cause: LossCause, detail: str) -> None:
        """Lose a member for good, because its connection is broken or it is silent."""
        with self._lock:
            if member.prover:
                self._trial.leave(member)
            elif self.roster.is_here(member):
                self.roster.lose(member.worker, cause, detail)

    def tick(self, now_s: float, late_s: float) -> None:
        """Look at all that depends on time.

        `late_s` is by how much this call is late: others may be late for the same reason.
        """
        with self._lock:
            self.roster.lose_the_silent(now_s, late_s)
            self.roster.lose_the_hung()
            self.roster.lose_the_suspected(now_s)
            self.roster.tell_of_ends()
            if self._served is None:
                self._regrouping.look(now_s, late_s)
            else:
                self._served.look()
            if not self.closed and self._served is None:
                self._entrance.look()
                self._trial.look()
            self._see_to_what_is_owed()
            if self.vault.due() and not self.closed and self._served is None:
                self.vault.write_beside()

    # --- what workers say -------------------------------------------------------------------------

    def place(self, member: Member, message: AnyMessage, size: int) -> memoryview | None:
        """Return where the payload of `message` shall land; None for a new buffer."""
        with self._lock:
            layout = self.roster.layout
            if not self.roster.is_here(member) or layout is None:
                return None
            if isinstance(message, Snapshot):
                return self.vault.place(message, layout)
            if isinstance(message, Slice) and self._is_current(message.generation, message.step):
                return self._round.sums(message.total).place(message.offset, size)
        return None

    def receive(self, member: Member, message: AnyMessage, payload: memoryview) -> None:
        if isinstance(message, Beat):
            member.beat(message.microbatch_s, message.step, message.hung_s)
            return
        member.unheard = True
        try:
            self._see_to(member, message, payload)
        finally:
            member.unheard = False

    def _see_to(self, member: Member, message: AnyMessage, payload: memoryview) -> None:
        """Handle a message on the thread that listens to this worker.

        That thread, and no other, waits here for Redis while Redis is away.
        """
        if isinstance(message, ProfileAsked):
            self._look_up(member, message.key)
            return
        if isinstance(message, OutputAsked):  # by a prover as well
            self.outputs.hear(member, message, payload)
            return
        with self._lock:
            if member.prover:
                self._trial.hear(member, message)
            if not self.roster.is_here(member):
                return
            self._handle(member, message, payload)
            commit = self._next_commit()
        if commit is not None:
            self._commit(commit)

    def _handle(  # noqa: PLR0912, PLR0915 - one branch per message
        self, member: Member, message: AnyMessage, payload: memoryview
    ) -> None:
        match message:
            case Ready():
                self._on_ready(member, message)
            case Slice():
                if self._is_current(message.generation, message.step):
                    self._round.sums(message.total).take(message.offset, payload)
            case Prepared():
                self._on_prepared(member, message)
            case Arrived():
                self._on_arrived(member, message)
            case Proved():
                self._entrance.proved(member, message)
            case Untried():
                self._trial.untried(member.worker, message)
            case Holding():
                if self._is_of_layout(message.generation):
                    member.holds(message.version, message.held)
            case LoopLeft():
                self.roster.hear_left(message.version)
            case Unled():
                self.roster.unled = message.step
            case Snapshot():
                self._on_snapshot(member, message, payload)
            case Unread():
                threading.Thread(
                    target=self._set_aside, args=(message,), name="aside", daemon=True
                ).start()
            case Recording():
                self.roster.recorders.begin(member.worker)
            case Measured():
                self._reports.profiled(member.worker, message.profile)
                self.vault.sharding.measured(message.profile)
            case Traced():
                self._on_traced(member.worker, message)
            case LayersAsked():
                if self._is_of_layout(message.generation):
                    self._regrouping.send_backup(member, message.generation, message.layers)
            case RedoAsked():
                self._regrouping.send_logged(member, message)
            case Part() if self._served is not None:
                self._served.tables.hear(member, message, payload)
            case PeerBroken():
                if self._is_of_layout(message.generation):
                    due_s = time.monotonic() + PEER_GRACE_S
                    self.roster.suspect(message.peer, member.worker, due_s)
            case OutputSent() | OutputWhole():
                self.outputs.hear(member, message, payload)
            case Numbers():
                self.outputs.log(message)
            case ScriptValues():
                self.outputs.hold(message)
            case Strayed():
                self.outputs.strayed(message)
            case Lines():
                self._out.lines(self.order.job, member.worker, message.lines)
            case Failed():
                self._on_failed(member, message)
            case Unable():
                self.roster.lose(member.worker, message.cause, message.why)
            case Ended():
                self.roster.came_to_end = True
                self.roster.remove(member.worker, "its script has ended")
                member.dismiss("the script has ended")
            case _:
                raise WireError(f"{member.worker} sent {type(message).__name__}")

    def _on_ready(self, member: Member, ready: Ready) -> None:
        others = (m for m in self.roster.members.values() if m is not member)
        other = next((m for m in others if m.ready is not None), None)
        if self.roster.comes_late(member.worker):
            return
        if ready.serving is not None:
            self._on_serving(member, ready, ready.serving)
            return
        if other is not None and other.ready is not None and _unlike(ready, other.ready):
            why = f"its model would have other initial values than that of {other.worker}"
            seed = "call torch.manual_seed(...) before unbuilt(...)"
            self._on_failed(member, Failed(kind="setup", detail=f"{member.worker}: {why}: {seed}"))
            return
        member.ready, self._microbatches = ready, ready.microbatches
        self.roster.recorders.told |= ready.uncuttable != UNRECORDED
        self._entrance.ready(member)

    def _on_serving(self, member: Member, ready: Ready, serving: Serving) -> None:
        """Let a node of a parameter server in; it has nothing to prove, as its clocks are tiled."""
        if self._served is not None and (unlike := self._served.serving.unlike(serving)):
            why = f"other {unlike} than the first worker of the job; all have to declare the same"
            self._on_failed(member, Failed(kind="setup", detail=f"{member.worker} has {why}"))
            return
        member.ready, member.proven, member.told = ready, True, True
        if self._served is None:
            self._regrouping.rest()
            served = ServedJob(
                self.history,
                self.roster,
                self._reports,
                self._lock,
                self._on_failed,
                self._give_up,
                self._report,
                self._completed,
                self._tail,
                self.vault,
            )
            served.begin(serving, self._tables_at, self.order.checkpoint_every_s)
            self._served = served
        self._reports.ready(member, ready)

    def _on_snapshot(self, member: Member, message: Snapshot, payload: memoryview) -> None:
        if self.roster.layout is not None:
            whole = self.vault.take(message, payload, member.worker, self.roster.layout)
            if whole is not None and message.final:
                self._ending.begin(whole)
            elif whole is not None:
                self._entrance.look()

    def _set_aside(self, unread: Unread) -> None:
        """Make a damaged version no longer count, and go on from the one before."""
        self._say(f"{unread.manifest} is damaged, and is set aside: {unread.why}")
        try:
            self.vault.unread(unread.manifest, unread.why)
        except CheckpointError as error:
            self._say(f"{unread.manifest} cannot be set aside now: {error}")
        with self._lock:
            if self.vault.forget(unread.manifest):
                self._regrouping.lose_backup()

    def _look_up(self, member: Member, key: str) -> None:
        profile = self._out.profile(key)
        if profile is not None:
            self._reports.profiled(member.worker, profile)
        unprobed = profile if profile is not None and profile.network_from != "measured" else None
        member.post(ProfileKnown(key=key, known=profile is not None, unprobed=unprobed))

    def _on_traced(self, worker: str, traced: Traced) -> None:
        layout = self.roster.layout
        timeline = self._tracing.take(worker, traced, layout) if layout is not None else None
        if timeline is not None:
            self._out.timeline(timeline)

    def _on_failed(self, member: Member, failed: Failed) -> None:
        self.roster.remove(member.worker, "its script failed")
        member.dismiss("the script failed")
        self._reports.failed(member.worker, failed)

    def _report(self, report: Report) -> None:
        """Send a report to the manager, which counts steps of the script where we count commits."""
        steps = self.vault.proofs.step_of
        match report:
            case Progress() | Regrouped() | BackupHeld() | CheckpointWritten() | Recalled():
                report = msgspec.structs.replace(report, step=steps(report.step))
            case CheckpointFailed() | CheckpointCopied() | CopyFailed():
                report = msgspec.structs.replace(report, step=steps(report.step))
        self._out.report(report)

    def _say(self, line: str) -> None:
        log.warning("%s: %s", self.order.job, line)
        self._out.lines(self.order.job, "keeper", (line,))

    # --- commits ----------------------------------------------------------------------------------

    def _is_of_layout(self, generation: int) -> bool:
        layout = self.roster.layout
        return layout is not None and generation == layout.generation

    def _is_current(self, generation: int, step: int) -> bool:
        return self._is_of_layout(generation) and step == self.history.version

    def _on_prepared(self, member: Member, message: Prepared) -> None:
        if self._is_current(message.generation, message.step):
            if unlike := self.vault.proofs.hear(member.worker, message):
                self._entrance.differs(member, unlike, message.script_step)
                return
            machines = [one.machine for one in message.computed]
            machines += [] if message.reached is None else [message.reached.machine]
            if line := self.vault.proofs.unlike(member.worker, machines):
                self._say(line)
            if message.phase:
                # In the middle of a script's step there is no state that could be saved.
                self.vault.stop_asking_for(message.step)
            self._round.prepared(member.worker, message)
            self._entrance.look()
        elif self.history.wrote(message.generation, message.step):
            member.post(Commit(generation=message.generation, version=self.history.version))
            member.holds(self.history.version, message.held)

    def _on_arrived(self, member: Member, message: Arrived) -> None:
        current = message.reached.version <= self.history.version
        if not current or not self._is_of_layout(message.generation):
            return
        if unlike := self.vault.proofs.arrive(member.worker, message):
            self._entrance.differs(member, unlike, message.script_step)
        else:
            self._entrance.look()

    def _next_commit(self) -> commits.Commit | None:
        """Return the commit that can be written now, and none until that one is written."""
        layout = self.roster.layout
        if layout is None or self._committing or self.closed:
            return None
        if self._regrouping.waits or not self._round.whole(layout):
            return None
        # A state is saved between two steps of the script only, so a step that has begun is ended.
        if not self.vault.open and not self._round.phase(layout):
            return None
        if self.roster.left == self.history.version or self._is_held(layout):
            return None
        self._committing = True
        return commits.Commit(
            generation=layout.generation,
            version=self.history.version + 1,
            loss=self._round.loss(layout),
            script_step=self._round.script_step(layout),
            phase=self._round.phase(layout),
            phases=self.vault.proofs.phases,
        )

    def _is_held(self, layout: Layout) -> bool:
        """Whether the step that all are prepared for must not be committed."""
        return self._held_at is not None and self._round.script_step(layout) >= self._held_at

    def _commit(self, commit: commits.Commit) -> None:
        """Write a commit, however long Redis is away; then send it to every worker."""
        with self._lock:
            assert self.roster.layout is not None
            step = self.history.version
            promised = self._round.logged(step, self.roster.layout)
            records = self.vault.records_of(step, promised)
        try:
            self.vault.promise(step, promised, records)
            self.history.write(commit)
        except Fenced as error:
            self._give_up(error)
            return
        except BaseException:
            # This thread ends with its worker, and the others commit the step without it.
            with self._lock:
                self._committing = False
                self._lock.notify_all()
            raise
        with self._lock:
            self._committing = False
            self._take_commit(commit)
            self._lock.notify_all()

    def _report_progress(self) -> None:
        """Report the newest commit."""
        members = self.roster.members.values()
        ready = next((m.ready for m in members if m.ready is not None), None)
        if self.history.version and ready is not None:
            generation, version = self.history.generation, self.history.version
            self._reports.progress(generation, version, ready.steps_total)

    def _give_up(self, error: Fenced) -> None:
        """Give the job up, because a newer keeper writes its commits."""
        log.error("%s", error)
        self._out.lines(self.order.job, "keeper", (f"{error}; this keeper commits no more",))
        with self._lock:
            self._shut()
            self.fenced, self._committing = True, False
            for worker in list(self.roster.members):
                self.roster.lose(worker, "connection", "another keeper has taken the job over")
            self._lock.notify_all()

    def _take_commit(self, commit: commits.Commit) -> None:
        roster, layout = self.roster, self.roster.layout
        assert layout is not None
        logged, prepared = self._round.end(self.history.version, layout)
        if logged is not None:
            self.vault.log(logged)
        else:
            self.vault.skip(self.history.version)
        self.history.note(commit)
        if commit.loss is not None and math.isfinite(commit.loss):
            self._reports.loss = commit.loss  # a skipped step has none that could be shown
        given = sum(prepared[worker].given for worker in layout.workers)
        self._reports.worked(given, layout.microbatches)
        for member in roster.inside():
            member.holds(commit.version, prepared[member.worker].held)
        self._entrance.committed()
        self.vault.choose(self._reports.step_s)
        copies = roster.copies([member.worker for member in roster.inside()])
        sums = self.vault.wants_sum(copies, parted=layout.owned)
        wanted = self.vault.wants or (sums and self.vault.adrift)
        # A worker that has to prove itself first may need that very state.
        stays = roster.pending is None or self._entrance.blocks(roster.pending)
        snapshot = wanted and stays
        if snapshot:
            self.vault.ask(layout, commit.version)
        trace = self._tracing.wanted and stays
        if trace:
            self._tracing.begin(layout.generation, commit.version)
        told = Commit(
            generation=layout.generation,
            version=commit.version,
            snapshot=snapshot,
            trace=trace,
            sums=sums or self.vault.owes(commit.version),
            shards=self.vault.shards(roster.crowd) if snapshot else None,
        )
        for member in roster.inside():
            member.post(told)
        passed = Commit(generation=layout.generation, version=commit.version)
        for member in roster.outside():
            member.hears_of_others(passed)
        self._report_progress()
        self._reports.paces(layout.generation, roster.inside())
        kept = self.vault.takes_sums(copies, parted=layout.owned)
        stored = self.vault.sharding.on
        self._reports.sums(copies, self.vault.sum_bytes, kept=kept, stored=stored)
        if roster.pending is not None and not self.closed:
            self._regrouping.apply()


def _unlike(one: Ready, other: Ready) -> bool:
    """Whether two workers would make different initial values of a model built in parts."""
    return one.unbuilt is not None and (
        other.unbuilt is None or one.unbuilt.mark != other.unbuilt.mark
    )
