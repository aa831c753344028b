"""A worker among others: the side of the step's transaction that runs beside the script.

    compute own microbatches -> reduce my slice -> hand it to all, and to the keeper -> prepared
    -> commit -> apply

The script's thread does everything here and waits in one place only (`_wait`); the threads of the mesh
and of the link to the keeper leave what arrives and wake it. A new layout (`Enter`) interrupts every
wait that belongs to an older one. State moves at step boundaries, and never into a script's
unfinished step.
"""

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import msgspec
import torch

from agent.calibration import probing
from agent.crew import exchange, helping
from agent.crew.chain import Chain, How, Whole
from agent.crew.copies import Copies
from agent.crew.crew import Crew
from agent.crew.deep import Deep
from agent.crew.handover import Handover, Having, having
from agent.crew.noting import Noting
from agent.crew.preparing import Preparing
from agent.crew.proving import Proving
from agent.crew.pulling import Pulling
from agent.crew.redoing import Redoing
from agent.crew.second import Second
from agent.crew.snapshots import Snapshots
from agent.crew.survey import Survey
from agent.crew.warming import Landing, warm
from agent.errors import CannotRecord, WireError
from agent.faults import passing
from agent.layout import Replica as Chained
from agent.messages import JobOrder, NanPolicy, WorkerOrder
from agent.net.link import Link
from agent.net.mesh import Mesh
from agent.net.stuck import unaided
from agent.output.folder import Output
from agent.owned import separable
from agent.pipeline.wires import MeshChannel
from agent.proof.samples import sampled
from agent.protocol import (
    PROVING,
    AnyMessage,
    Arrived,
    Commit,
    CopiesAsked,
    Done,
    Enter,
    Held,
    Hello,
    LoopLeft,
    Noticed,
    OutputHeld,
    OutputTaken,
    Over,
    Part,
    PeerBroken,
    Peers,
    ProfileKnown,
    ProofWanted,
    Prove,
    Reached,
    Redo,
    State,
    Unled,
    Welcome,
)
from agent.replica import Replica
from agent.store.layers import Collected
from agent.tensors.device import CPU, settle
from agent.tensors.partial import Partial
from agent.tensors.sums import Sum, Summed
from agent.world import Abandoned, Facts, Interrupted

T = TypeVar("T")

SEVERAL = (
    "a step that calls session.backward(...) several times cannot be trained where each worker keeps its own layers only: "
    "take machines with room for the whole state, or train with depth 1"
)
# A microbatch that is computed twice takes one in so many.
TWICE = 100

UNLED = (
    "step {}: the script leads here and looks at its whole model, of which a part was lost with another worker: "
    "what it would show or save is not there"
)


def turn_of(step: int, count: int) -> int | None:
    """In which turn a microbatch is computed twice in this step of the script, if it is; workers have so many of them.

    In steps 0, 1, 2, 4, 8 and so on, because what a script keeps often shows within the first; and in every so many.
    """
    every = -(-TWICE // max(1, count))
    if not step & (step - 1):
        return step.bit_length()
    return step // every if step % every == 0 else None


class Group(Crew):
    """The world of a session that is one of many."""

    nan: NanPolicy = "fail"
    stop_at = 0
    output: Output

    def __init__(self, order: WorkerOrder, host: str, ended: Callable[[str], None]) -> None:
        super().__init__()
        self._job, self.me, self._machine_id = order.job, order.worker, order.machine_id
        self.slot = order.slot
        self._handover = Handover(self, Pulling(self, lambda: self._mesh, self._changed))
        self._copies = Copies(self, self.me, self._changed)
        self._snapshots = Snapshots(self, self._handover, self._copies)
        self._preparing = Preparing(self)
        self._mesh = Mesh(
            self.me, order.secret, host, self._changed, self._peer_broke, self._answer_peer
        )
        self._mesh.keep = self._copies.take
        self._landing = Landing()
        self._mesh.place = self._landing.place
        self._survey = Survey(self, order.job, self._mesh.address)
        self._complaints: list[PeerBroken] = []  # in the newest layout that was heard of
        self.link = Link(
            order.keeper_address,
            order.secret,
            self._hello,
            self._deliver,
            ended,
            connected=self._complain_again,
        )
        self._prover = order.prover
        self._second = Second(order, host, self.link.send, self._device)
        self._welcome: tuple[Welcome, bytes] | None = None
        self._holds = False  # this worker's state is one that the job goes on from
        self._needs_state = False
        self._committed = 0
        self._left: int | None = None  # the version with which the script left its loop
        self._redo, self._noting, self._proving = Redoing(self), Noting(self), Proving(self)
        self._joins = False  # this worker was in no commit since it got its state
        self._proven = False  # this worker was in the layout of a committed step
        self._thorough: set[int] = set()  # steps in which all layers are looked at
        self._last: Reached | None = None  # the state behind the last step
        self._done = False
        self._notice_at_s: float | None = None
        self._began_s, self._computed = 0.0, 0  # of this share: since when, and microbatches so far
        self._deep = Deep(self.me)
        self._apart = False  # optimizers were tried on layers apart
        self.astray = False  # what the script does until the next boundary counts for nothing
        # Whether the state has come from others since the output folder was told.
        self._fresh = True
        self._told_to_lead = False  # and the script may have kept that, until the next boundary

    # --- what the worker process uses ---------------------------------------------------------------

    def start(self) -> tuple[JobOrder, bytes]:
        """Connect to the keeper; the order, and the script with what goes along."""
        self.link.start()
        self._greeting, payload = self.wait(lambda: self._welcome)
        self._welcome = None
        order, self.code = self._greeting.order, hashlib.sha256(payload).hexdigest()
        self.nan, self.stop_at = order.nan, order.stop_at
        return order, payload

    def close(self) -> None:
        self.output.close()
        self.link.close()
        self._mesh.close()

    # --- what the session uses ----------------------------------------------------------------------

    @property
    def leads(self) -> bool | None:
        """As `leader`; None as long as this worker was in no layout at all."""
        if self._proving.going:
            return False
        return None if self.entered is None else self._leads

    @property
    def leader(self) -> bool:
        self._told_to_lead |= self._leads
        return self._leads

    @property
    def _leads(self) -> bool:
        entered = self.entered
        if (
            entered is None
            or self.astray
            or self._proving.going
            or entered.layout.workers[0] != self.me
        ):
            return False
        return self._holds or entered.unled == self.replica.version

    @property
    def notice_s(self) -> float | None:
        return None if self._notice_at_s is None else self._notice_at_s - time.time()

    @property
    def microbatches(self) -> int:
        return self._greeting.microbatches

    def boundary(self, replica: Replica, facts: Facts) -> None:
        self._check(replica)
        self._introduce(replica, facts)
        if self._proving.going:
            self._proving.answer()
        while True:
            try:
                self._come_in(replica)
                self._send_what_is_due()
            except Interrupted:
                continue
            break
        self._landing.clear()
        self._handover.pulling.forget(replica.version)
        self._tell_output(replica)

    def _tell_output(self, replica: Replica) -> None:
        fresh, self._fresh = self._fresh, False
        self.output.enter(replica.step, leads=self._leads, fresh=fresh)

    def end_step(self, step: int) -> None:
        if self.astray:
            self.output.forget()
        else:
            self.output.scan(step, leads=self._leads)

    def _check(self, replica: Replica) -> None:
        """Refuse what the script has made of a part of the layers; what is here for nothing is not looked at."""
        if not self.astray:
            replica.holdings.check(replica.step - 1)

    def _introduce(self, replica: Replica, facts: Facts) -> None:
        self._replica, self.link.step = replica, -1
        if self._survey.ready is None:
            warm(replica, self._landing, self._greeting.state_bytes)
        self._survey.introduce(facts)
        self.astray = self._told_to_lead = False

    def bind(self, replica: Replica, facts: Facts) -> bool:
        """A layout of version 0 is entered in the middle of step 0; a later one only at the next boundary."""
        self._introduce(replica, facts)
        while True:
            self.wait(self._called, interruptible=False)
            order = self.order
            if self._done or self._proving.asked or order is None or order.version:
                self.astray = True
                return False
            try:
                self._enter()
                if self._take_part(replica):
                    self._send_what_is_due()
                    self._landing.clear()
                    self._tell_output(replica)
                    return True
            except Interrupted:
                continue

    def logged(self, step: int) -> Summed | None:
        if self._proving.going:
            return self._proven_sum()
        entered = self.entered
        assert entered is not None
        if not entered.version - entered.redo <= step < entered.version:
            return None
        try:
            if not entered.layout.owned:
                if self._reproduces(step):
                    self.reproduced = self.evidence.computed
                payload, present = self._redo.take(step)
                return self.replica.summed(payload, present)
            chain = self._prepare_chain(step)
            self._redo.meet(step, entered.layout.replica_of(self.me).workers)
            if self._reproduces(step):
                self._reproduce(chain, step)
            payload, present = self._redo.take(step, chain.spans)
            return chain.again(step, payload, present)
        except Interrupted:
            self.astray = True
            raise Abandoned from None

    compares = True

    def asked(self, phase: int) -> int | None:
        if self._proving.going:
            return self._proving.microbatch(phase)
        entered = self.entered
        if entered is None or entered.layout.owned or not self._reproduces(self.replica.version):
            return None
        return entered.proves

    def arrived(self, reached: Reached) -> None:
        """Tell it at once behind a snapshot, and with the step's first commit else."""
        over = self.replica.stage == "over"
        self._last = reached if over else None
        reproduces = bool(self.reproduced) and not self._holds
        if (reproduces or (self._holds and self.thorough)) and not over:
            self._say_arrived(reached)

    def _say_arrived(self, reached: Reached) -> None:
        generation, step = self.generation, self.replica.step
        self.link.send(Arrived(generation=generation, script_step=step, reached=reached))

    @property
    def proves(self) -> bool:
        return self._proving.going

    @property
    def thorough(self) -> bool:
        """Whether all layers are looked at: those that join are asked for the steps behind a snapshot."""
        if self._proving.going:
            return True
        return self._replica is not None and self._replica.step in self._thorough

    @property
    def twice(self) -> int | None:
        """A microbatch of another worker that this one computes as well, to be compared before the commit.

        A worker that joins does so in its first step, because its proof may be of a step long ago, and one of the
        others does it for the one there that has nothing before it. Else the first and the last worker do it in turn:
        one of them only, so that what counts microbatches counts others on it.
        """
        layout, entered, me = self.layout, self.entered, self.me
        assert entered is not None
        if layout.depth > 1 or layout.width == 1:
            return None
        replicas, step = [each for each in layout.replicas if each.count], self.replica.step
        inside = [each for each in replicas if each.workers[0] in entered.holders]
        joining = [each for each in replicas if each not in inside]
        if self._joins:
            return sampled(inside[0].first, inside[0].count, step) if inside else None
        if inside and joining and self.replica.version == entered.version:
            return joining[0].first if inside[0].workers[0] == me else None
        return self._in_turn(replicas, replicas[-1].count)

    def _in_turn(self, replicas: Sequence[Chained], count: int) -> int | None:
        """The first and the last replica compute a microbatch of each other's in turn, once in so many of theirs."""
        step = self.replica.step
        turn = turn_of(step, count)
        if turn is None or len(replicas) == 1:
            return None
        asks, asked = (replicas[0], replicas[-1]) if turn % 2 else (replicas[-1], replicas[0])
        return sampled(asked.first, asked.count, step) if self.me in asks.workers else None

    def _of_other_chain(self) -> int | None:
        """A microbatch of another chain that this one computes as well, to be compared before the commit.

        Where somebody has proven nothing yet each chain does so for the next: thus every stage is compared with the same
        stage of others. A microbatch goes through a chain alone, so this is done the more rarely the longer chains are.
        """
        layout, entered, step = self.layout, self.entered, self.replica.step
        assert entered is not None
        replicas = layout.replicas
        if entered.unproven and self.replica.version == entered.version and len(replicas) > 1:
            after = replicas[(replicas.index(layout.replica_of(self.me)) + 1) % len(replicas)]
            return sampled(after.first, after.count, step)
        return self._in_turn(replicas, replicas[-1].count // layout.depth)

    def _reproduces(self, step: int) -> bool:
        """Whether this is the first step that is applied again, and something is known of it."""
        entered = self.entered
        if entered is None or entered.proves is None or self._holds:
            return False
        return step == entered.version - entered.redo

    def _reproduce(self, chain: Chain, step: int) -> None:
        """With the rest of the chain, compute a microbatch of a step that others have committed.

        It is done twice, because how the chain rounds shows then. The keeper hears of it before the chain commits anything.
        """
        replica, entered = self.replica, self.entered
        assert entered is not None and entered.proves is not None
        how = How(replica.seed_for, self.go_on, (entered.proves,), thorough=True)
        for name in ("once", "again"):
            chain.compute_aside(f"{step}/{name}", replica.recorder.microbatches, how)
        self.reproduced = self.evidence.computed

    def _proven_sum(self) -> Summed:
        try:
            payload, marks = self._proving.sum(self.replica.phase)
        except Abandoned:
            self.astray = True
            raise
        return self.replica.summed(payload, marks)

    def share(self) -> tuple[int, int]:
        if self.superseded():
            self._change_in_step()
        if self._leads:
            self._survey.look()
        else:
            self._survey.help()
        self._noting.begin()
        self._began_s, self._computed = time.monotonic(), 0
        self.link.step, mine = self.replica.version, self.layout.replica_of(self.me)
        return mine.first, mine.count

    def _answer_peer(self, peer: str, part: Part) -> None:
        if part.tag == probing.PROBE:
            probing.answer(self, self._mesh, peer, part)
        elif part.tag == helping.ASKED:
            self._survey.helpers.answer(peer, part)
        else:
            self._handover.pulling.answer(peer, part)

    @property
    def deep(self) -> bool:
        return self.layout.depth > 1

    def _prepare_chain(self, step: int) -> Chain:
        """This worker's place in the layout, and what it keeps there."""
        replica, layout = self.replica, self.layout
        if layout.owned and replica.phase:
            raise CannotRecord(SEVERAL)
        chain = self._deep.chain(
            layout,
            step,
            replica.recorder.to_play,
            replica.recorder.adopt,
            Whole(
                replica.space,
                replica.holdings,
                replica.total,
                replica.scaler,
                replica.deterministic,
                self.evidence.sample_stage,
            ),
            lambda: MeshChannel(
                self._mesh,
                self._changed,
                layout.generation,
                device=replica.space.device,
                patience_s=threading.TIMEOUT_MAX / 2,  # the keeper says when it is over
                check=self.go_on,
            ),
        )
        if chain.held is not None:
            self._part(replica)
            with self.unaided():
                self._handover.pull(chain.held)
            if not self._handover.having:  # nobody had anything, and now each has its own
                self._handover.keep(self._deep.keepers())
        return chain

    def _part(self, replica: Replica) -> None:
        """From now on each worker may have gradients of its own layers only."""
        if not self._apart:
            separable.refuse(replica.objects.values())
            self._apart = True

    def play(self, step: int, batches: Sequence[object]) -> Summed:
        try:
            return self._play(step, batches)
        except CannotRecord as error:
            if self.layout.owned or not self._survey.take_back(str(error)):
                raise  # owned: nobody has room for the whole model
        return self.wait(lambda: None)  # for the next layout, which is of depth 1

    def _play(self, step: int, batches: Sequence[object]) -> Summed:
        replica, chain = self.replica, self._prepare_chain(step)
        mine = self.layout.replica_of(self.me)
        shown = {sampled(mine.first, mine.count, replica.step)}
        how = How(replica.seed_for, self._stop_or_save, shown, self.thorough)
        if (other := self._of_other_chain()) is not None:
            # How the chain rounds shows in a microbatch that it computes twice.
            aside = (*(() if chain.tried else shown), other)
            chain.compute_aside(f"{step}/aside", batches, msgspec.structs.replace(how, shown=aside))
            chain.tried = True
        summed = chain.play(step, batches, how)
        self.link.microbatch_s = chain.busy_s
        if replica.notes is not None:
            chain.note(replica.notes)
            self._noting.tell(step, chain.cuts)
        if chain.held is None:
            self._preparing.slice(step, summed.total)
        else:
            slices = chain.slices()
            self._preparing.send(step, slices)
            if self.layout.sole:
                self._copies.exchange(
                    self.layout, step, summed.marks, replica.space.total_bytes, slices
                )
        return summed

    def fetch(self) -> None:
        """Everyone does at the same place of the script, or who does not waits for those who do.

        The script goes on with a whole model, or for nothing: with what is no number in it, which a script that leads
        would show or save. A new layout is heard of here, and its workers are asked; it is entered later, for the
        state of an unfinished step is not one to hand over.
        """
        if not self.astray and self._handover.look(self._counted_among):
            return
        leads, replica = self._leads or self._told_to_lead, self.replica
        self._holds, self.astray = False, True
        if leads:
            # Before its commit a step is led like any other by whoever does it.
            if replica.stage != "open":
                self.link.send(Unled(step=replica.next_version - 1))
            raise WireError(UNLED.format(replica.inside))

    def _counted_among(self, order: Enter | None) -> Having | None:
        """Who has what of the state that is looked at; None where it is not the job's any more."""
        if order is not None and order is not self.entered:
            return having(order) if self.me in order.holders else None
        if self._holds:
            return self._handover.having
        # A committed step is applied again: those of our chain are at the same one, others may be ahead.
        chain = self.layout.replica_of(self.me).workers
        return {one: held for one, held in self._handover.having.items() if one in chain}

    def _stop_or_save(self) -> None:
        self.go_on()
        self._send_what_is_due()

    @unaided
    def _send_what_is_due(self) -> None:
        if self._holds and self._snapshots.due():
            self._thorough = {self.replica.step, self.replica.step + 1}
            self._snapshots.send()

    def check(self) -> None:
        # A newer layout is heard of when the sum of the step is waited for.
        if self._proving.going or self._reproduces(self.replica.version):
            return
        self._stop_or_save()
        self._computed += 1

    def gather(self, step: int, partial: Partial, total: Sum) -> None:
        if self.replica.notes is not None:
            self.replica.notes.skip()
        if self._computed:
            settle(self.replica.space.device)
            self.link.microbatch_s = (time.monotonic() - self._began_s) / self._computed
        with self.unaided():
            exchange.gather(self, step, partial, total, lambda t: self._preparing.slice(step, t))
        self._noting.tell(step)

    @unaided
    def commit(self, step: int, summed: Summed) -> None:
        promised = None
        if summed.held is not None:
            promised = Held(tuple(sorted(summed.held)), len(self.replica.holdings.all))
            self._handover.promised = promised
        if len(self.layout.workers) == 1:  # one message behind the other: nobody waits for its sum
            self._preparing.slice(step, summed.total)
        self._preparing.say(step, summed, promised)
        while True:
            self.wait(
                lambda: (
                    self._committed > step
                    or self._preparing.forgotten
                    or (self._holds and self._snapshots.due())
                )
            )
            self._send_what_is_due()
            if self._committed > step:
                self._proven, self._joins, self.reproduced = True, False, ()
                passing("step: commit heard")
                break
            if self._preparing.forgotten:
                self._preparing.send_again(step)
                self._preparing.say(step, summed, promised)
        if summed.held is not None:
            self._handover.keep(self._deep.keepers())
        if not self.layout.sole:
            self._copies.clear()

    def stray(self, *, away: bool) -> None:
        self.astray = away

    def settle(self) -> None:
        self._snapshots.settle()

    def finish(self, replica: Replica, facts: Facts) -> bool:  # noqa: ARG002
        self._check(replica)
        self.link.step, last = -1, replica.version
        self._left = last
        self.link.send(LoopLeft(version=last))
        while not self._done:
            try:
                self._come_in(replica)
                if replica.version < last:
                    self._left = None
                    return False
                if self._last is not None and self._holds:
                    # Ahead of the state itself, which is put together of what all have.
                    self._say_arrived(self._last)
                if self.layout.owned:
                    self._gather_behind(replica)
                sent_at = self.link.connects
                self._snapshots.send_state(replica.collected(), replica.version, final=True)
                self.wait(partial(self._over_or_forgotten, sent_at))
            except Interrupted:
                continue
            if self._snapshots.failed:
                raise WireError("the last state could not be sent")
        return True

    def _over_or_forgotten(self, sent_at: int) -> bool:
        return self._done or self._snapshots.failed or self.link.connects != sent_at

    @unaided
    def _gather_behind(self, replica: Replica) -> None:
        """What comes behind the loop may use all of the model, unless nobody has room for that."""
        self._handover.pulling.offer(replica.version, replica.snapshot())
        if replica.unbuilt:
            self._handover.take_in()
        else:
            self._handover.pull(replica.holdings.all)

    # --- layouts ------------------------------------------------------------------------------------

    @unaided
    def _come_in(self, replica: Replica) -> None:
        """At a boundary: be in the newest layout, with its state (or on the way there by redo)."""
        while True:
            if self._proving.asked:
                self._proving.load(replica)
                self._fresh = True
                return
            if self.superseded():
                self._enter()
            if self._take_part(replica):
                return
            self.wait(self._called, interruptible=False)
            if self._done:
                return

    def _called(self) -> bool:
        """Whether there is something else to do than to wait for a layout."""
        return self.superseded() or self._done or self._proving.asked

    def _take_part(self, replica: Replica) -> bool:
        """Have the state of the layout that was entered; False if this worker is not in it."""
        entered = self.entered
        if self._needs_state and entered is not None:
            self._handover.receive(entered)
            self._needs_state, self._fresh, self._joins = False, True, True
        if entered is None or self.me not in entered.layout.workers:
            return False
        self._handover.pull_whole()
        # A step of several commits may have begun before this layout, and ended in it.
        if not self._holds and replica.version >= entered.version:
            self._holds = True
            self._handover.say_held()
            passing("morph: holding said")
        return True

    @unaided
    def _change_in_step(self) -> None:
        """In the middle of a step: go on with it in the new layout, or give it up.

        Who is left out in the first step of a model that is being born is no worse than a newcomer, and waits.
        """
        self._enter()
        while self.replica.newborn and self._holds and self.me not in self.layout.workers:
            self.wait(self.superseded, interruptible=False)
            self._enter()
        if not self._holds or self.me not in self.layout.workers:
            self._holds, self.astray = False, True
            raise Abandoned
        self._handover.pull_whole()
        self._tell_output(self.replica)

    def _enter(self) -> None:
        order, replica = self.order, self.replica
        assert order is not None
        self._mesh.enter(order.layout.generation)
        self._deep.leave()
        inside, holder = self.me in order.layout.workers, self.me in order.holders
        # Where some have been sent their layers, these are had from them.
        born = replica.newborn and order.version == 0 and bool(order.holders) and not order.held
        self._holds, self._needs_state = holder or born, inside and not (holder or born)
        self.entered = order
        self._handover.enter(order, born=born)
        passing("morph: entered")
        if born and not holder:
            self._handover.say_held()
        if born:
            return
        if not self._holds:
            return
        if replica.version != order.version:
            raise WireError(
                f"the keeper takes {self.me} for a holder of version {order.version}, "
                f"but it holds {replica.version}"
            )
        self._handover.hand_over(order)
        self._holds = inside

    # --- what those see who ask for layers ----------------------------------------------------------

    def now(self) -> tuple[int, Collected | None]:
        replica = self._replica
        return (-1, None) if replica is None else (replica.version, replica.kept)

    def past(self, version: int) -> bool:
        return self._replica is not None and self._replica.given >= version

    # --- what arrives, on other threads -------------------------------------------------------------

    def _hello(self) -> Hello:
        return Hello(
            job=self._job,
            worker=self.me,
            machine_id=self._machine_id,
            mesh_address=self._mesh.address,
            generation=self.generation,
            version=self._replica.version if self._replica is not None and self._holds else None,
            held=self._handover.held(self._replica) if self._replica else None,
            promised=self._handover.promised,
            copies=self._copies.any,
            left=self._left,
            ready=self._survey.ready,
            proven=self._proven,
            prover=self._prover,
        )

    def _device(self) -> torch.device:
        return CPU if self._replica is None else self._replica.space.device

    def _deliver(  # noqa: PLR0912 - one branch per message
        self, message: AnyMessage, payload: memoryview
    ) -> None:
        with self._changed:
            match message:
                case Welcome():
                    self._welcome = (message, bytes(payload))
                case Peers():
                    self._survey.addresses = dict(message.addresses)
                    self._mesh.want(message.addresses)
                case Enter():
                    self._hear(message)
                case Commit():
                    self._committed = max(self._committed, message.version)
                    self._preparing.wanted = message.sums
                    if message.snapshot:
                        self._snapshots.asked_at = message.version
                    if message.trace:
                        self._noting.asked_at = message.version
                    self._copies.heard(message.backup)
                case CopiesAsked():
                    self._copies.send_all(self.link)
                case ProfileKnown():
                    self._survey.known = message
                case Prove():
                    self._proving.hear(message, payload)
                case State() | Redo() if message.generation == PROVING:
                    self._proving.hear(message, payload)
                case State():
                    self._handover.state = (message, payload)
                case Redo():
                    self._redo.hear(message, payload)
                case ProofWanted():
                    self._second.start()
                case Noticed():
                    self._notice_at_s = message.deadline_s
                case OutputTaken() | OutputHeld():
                    self.output.hear(message, payload)
                case Done():
                    self._done = True
                case Over():
                    self.over = message.version
                case _:
                    raise WireError(f"the keeper sent {type(message).__name__}")
            self._changed.notify_all()

    def _hear(self, order: Enter) -> None:
        """A keeper that was restarted may tell again of a layout that we have heard of, and not entered yet."""
        generation = order.layout.generation
        if self.order is not None and generation < self.order.layout.generation:
            return
        if generation == self.generation:
            if order.snapshot:
                self._snapshots.asked_at = order.version
            return
        before = set(self.order.addresses) if self.order is not None else set()
        self._complaints = [each for each in self._complaints if each.generation == generation]
        self.order = order
        self._mesh.forget(before - set(order.addresses))
        self._mesh.want(order.addresses)
        self._snapshots.asked_at = order.version if order.snapshot else None
        self._preparing.wanted = order.sums
        # Not more: who slept while others did a step is told the version, and not that its own was committed.
        self._committed = min(self._committed, order.version)
        self._redo.clear()

    def _peer_broke(self, peer: str) -> None:
        """Of the newest layout that was heard of, or of who hands its state over to it: what breaks before it is
        entered is lacking in it."""
        order = self.order
        if order is not None and peer in (*order.layout.workers, *order.holders):
            complaint = PeerBroken(generation=order.layout.generation, peer=peer)
            self._complaints.append(complaint)
            self.link.send(complaint)

    def _complain_again(self) -> None:
        """The keeper may not have heard it, or has forgotten it: it was restarted."""
        for complaint in list(self._complaints):
            self.link.send(complaint)
