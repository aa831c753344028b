"""A worker among others, as its session sees it: the world that a step and a loop use.

    all_reduce    sum over all workers; this worker's slice goes to all, and to the keeper
    promise       tell the keeper that this worker can apply the sum
    commit        wait until the keeper has written it down

The script's thread does everything here and waits in one place only (`Crew.wait`). State moves
between steps, and never into a script's unfinished step.
"""

import time
from collections.abc import Callable, Collection, Sequence
from functools import partial

import msgspec
import torch

from agent.errors import CannotRecord, Misuse, Unplayed, WireError
from agent.faults import passing
from agent.messages import WorkerOrder
from agent.net.beside import Beside
from agent.net.watchdog import unaided
from agent.paramserver.api import Application
from agent.proof.turns import Shown
from agent.protocol import (
    STAYS_S,
    Arrived,
    Enter,
    Held,
    LoopLeft,
    Reached,
    Serving,
    Unled,
)
from agent.replica import Replica
from agent.tensors.device import settle
from agent.tensors.partial_sum import Partial
from agent.tensors.sums import Sum, Summed
from agent.tensors.tree import Canonical
from agent.worker.exchange.early import Early
from agent.worker.participant import Participant
from agent.worker.served import ServedNode, ready
from agent.worker.state.handover import Having, having
from agent.worker.state.prefault import warm
from agent.world import Abandoned, Compute, Facts, Interrupted, Own, Work

UNLED = (
    "step {}: the script leads here and looks at its whole model, of which a part was lost with another worker: "
    "what it would show or save is not there"
)


class Group(Participant):
    """The world of a session that is one of many."""

    def __init__(self, order: WorkerOrder, host: str, ended: Callable[[str], None]) -> None:
        super().__init__(order, host, ended)
        # Asked on a thread, torch takes the session's number of threads there as well. Else each of
        # its calls has all processors, whose threads spin for some time after it.
        self.beside = Beside("samples", torch.get_num_threads)
        self._last: Reached | None = None  # the state after the last step
        self._began_s, self._computed = 0.0, 0  # of this share: its start, and microbatches so far
        self._told_to_lead = False  # since the last boundary; the script may have kept it

    # --- what the session uses --------------------------------------------------------------------

    @property
    def leads(self) -> bool | None:
        """Return what `leader` returns, or None as long as this worker was in no layout at all."""
        if self._proving.going:
            return False
        return None if self.entered is None else self._leads

    @property
    def prints(self) -> bool | None:
        """Whether to pass on what the script prints: a node computes what no other does."""
        return True if self.node is not None else self.leads

    @property
    def astray(self) -> bool:
        return self._replica is not None and self._replica.astray

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
        at_s, now_s = self._notice_at_s, time.monotonic()
        return None if at_s is None or now_s >= at_s + STAYS_S else at_s - now_s

    @property
    def microbatches(self) -> int:
        return self._greeting.microbatches

    def serve(self, application: Application, serving: Serving) -> str:
        """Be a node of a parameter server until the job ends, and return why it has ended."""
        if self.node is not None:
            raise Misuse(
                "the script ran a second ParamServerJob; what is trained one after the other, as with "
                "several rates, is a job each, with the rate as an argument of the script"
            )
        if self.stop_at:  # a rehearsal does not do all of it
            clocks = min(serving.clocks or self.stop_at, self.stop_at)
            serving = msgspec.structs.replace(serving, clocks=clocks)
        self.node = ServedNode(self._worker_order, self._host, self.link, application, serving)
        self._survey.ready = ready(serving)  # the link says it again when it connects again
        self.link.send(self._survey.ready)
        why = self.node.run()
        if not self.node.done:
            self.wait(lambda: None)  # to be dismissed: the job goes on without this worker
        return why

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
            self._landing.clear()
            self._handover.pulling.forget(replica.version)
            self._tell_output(replica)
            if not (self._unsaid and self.superseded()):
                break

    def _tell_output(self, replica: Replica) -> None:
        fresh, self._fresh = self._fresh, False
        entered = None if self._proving.going else self.entered
        beside = entered is not None and bool(entered.holders)
        inside = replica.inside is not None
        self.output.enter(
            replica.turn, leads=self._leads, fresh=fresh, beside=beside, inside=inside
        )
        self._say_held()

    def _enter(self) -> None:
        super()._enter()
        if self._keeps and not self._fresh:
            # Who led has stored what those lack to whom the state went.
            self._tell_output(self.replica)

    def end_step(self, step: int) -> None:
        if self.astray:
            self.output.forget()
        else:
            saved = self._snapshots.asked_at is not None
            awaited = self._is_awaited()
            self.output.scan(step, leads=self._leads, saved=saved, awaited=awaited)
            self.output.tell(step, self.replica.state)

    def _is_awaited(self) -> bool:
        """Return whether somebody outside of the layout may come in within the next step."""
        inside = () if self.entered is None else self.entered.layout.workers
        outside = self._survey.addresses.keys() - {self.me, *inside}
        return any(self._mesh.connection(peer) is not None for peer in outside)

    def _check(self, replica: Replica) -> None:
        """Refuse what the script computed from only a part of the layers.

        Nothing is checked while this worker is astray, because its step counts for nothing.
        """
        if not self.astray:
            replica.holdings.check(replica.turn - 1)

    def _introduce(self, replica: Replica, facts: Facts) -> None:
        self._replica, self.link.step = replica, -1
        if self._survey.ready is None:
            warm(replica, self._landing, self._greeting.state_bytes)
        self._survey.introduce(facts)
        replica.rejoin()
        self._told_to_lead = False

    def bind(self, replica: Replica, facts: Facts) -> bool:
        """Enter a layout of version 0 in the middle of step 0; any state needs a boundary.

        Return False, and go astray, if the job is past version 0 or has ended, or if it asks this
        worker for a proof or has a state for it, which lacks what the script has set since.
        """
        self._introduce(replica, facts)
        while True:
            self.wait(self._called, interruptible=False)
            order = self.order
            if self._done or self._proving.asked or order is None or order.version:
                break
            try:
                self._enter()
                if self._needs_state:
                    break
                if self._take_part(replica):
                    self._send_what_is_due()
                    self._landing.clear()
                    self._tell_output(replica)
                    return True
            except Interrupted:
                continue
        replica.go_astray()
        return False

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
            chain = self._stages.chain(step)
            self._redo.meet(step, entered.layout.replica_of(self.me).workers)
            if self._reproduces(step):
                assert entered.proves is not None
                self._stages.reproduce(chain, step, entered.proves)
            payload, present = self._redo.take(step, chain.spans)
            return chain.again(step, payload, present)
        except Interrupted:
            self.replica.go_astray()
            raise Abandoned from None

    def asked(self, phase: int) -> int | None:
        if self._proving.going:
            return self._proving.microbatch(phase)
        entered = self.entered
        if entered is None or entered.layout.owned or not self._reproduces(self.replica.version):
            return None
        return entered.proves

    def arrived(self, reached: Reached) -> None:
        """Report this state at once after a snapshot, else with the step's first commit."""
        over = self.replica.stage == "over"
        self._last = reached if over else None
        reproduces = bool(self.reproduced) and not self._holds
        if (reproduces or (self._holds and self.state_shown == "all")) and not over:
            self._say_arrived(reached)

    def _say_arrived(self, reached: Reached) -> None:
        generation, step = self.generation, self.replica.step
        self.link.send(Arrived(generation=generation, script_step=step, reached=reached))

    @property
    def proves(self) -> bool:
        return self._proving.going

    @property
    def state_shown(self) -> Shown:
        return self._comparison.state_shown

    @property
    def batch_shown(self) -> Shown:
        return self._comparison.batch_shown

    @property
    def twice(self) -> int | None:
        return self._comparison.twice

    def _reproduces(self, step: int) -> bool:
        """Return whether `step` is the first one applied again, and a microbatch proves it."""
        entered = self.entered
        if entered is None or entered.proves is None or self._holds:
            return False
        return step == entered.version - entered.redo

    def _proven_sum(self) -> Summed:
        try:
            payload, marks = self._proving.sum(self.replica.phase)
        except Abandoned:
            self.replica.go_astray()
            raise
        return self.replica.summed(payload, marks)

    def share(self) -> tuple[int, int]:
        if self.superseded():
            self._change_in_step()
        self._hold(self.replica)
        self._say_held()
        if self._leads:
            self._survey.look()
        else:
            self._survey.help()
        self._noting.begin()
        self._began_s, self._computed = time.monotonic(), 0
        self.link.step, mine = self.replica.version, self.layout.replica_of(self.me)
        if not self.deep and self.replica.partial is not None:
            self._exchanging.open(self.replica.version, self.replica.partial)
        self._share = mine.first, mine.count
        return self._share

    @unaided
    def _change_in_step(self) -> None:
        """Go on with the step in flight in the new layout, or give it up.

        A worker that is left out waits first: those that it handed the state to may be lost before
        they have done anything with it.
        """
        self._enter()
        while self._keeps:
            self.wait(self._released, interruptible=False)
            if not self.superseded():
                break
            self._enter()
        if not self._holds or self.me not in self.layout.workers:
            self._holds = self._keeps = False
            self.replica.go_astray()
            raise Abandoned
        self._handover.pull_whole()
        self._tell_output(self.replica)

    def _released(self) -> bool:
        """Return whether there is a newer layout, or the job is past the state that is kept here.

        In the first step of an unbuilt model only a layout counts: there is nothing to go on with,
        and a worker that waits is no worse off than a newcomer.
        """
        return self.superseded() or (not self.replica.newborn and (self._done or self._passed()))

    @property
    def deep(self) -> bool:
        return self.layout.depth > 1

    def play(self, step: int, batches: Sequence[object]) -> Summed:
        try:
            summed, cuts = self._stages.play(step, batches, self._stop_or_save)
        except CannotRecord as error:
            if self.layout.owned or not self._survey.take_back(str(error)):
                cause = error.__cause__ if isinstance(error, Unplayed) else None
                raise (cause or error) from None  # owned: nobody has room for the whole model
            return self.wait(lambda: None)  # for the next layout, which is of depth 1
        self._noting.tell(step, cuts)
        return summed

    def fetch(self) -> None:
        """Get the layers that are not here, so that the script goes on with a whole model.

        Every worker calls this at the same place of the script; a worker that does not call it
        waits for those that do. If it fails, the script goes on for nothing, with values that are
        not-a-number. A leading script would show or save these, so the leader raises `WireError`
        instead. Here this worker may hear of a new layout, and then asks that layout's workers. It
        enters the layout later, because the state of an unfinished step cannot be handed over.
        """
        if not self.astray and self._handover.look(self._counted_among):
            return
        leads, replica = self._leads or self._told_to_lead, self.replica
        self._holds = False
        self.replica.go_astray()
        if leads:
            # A step that is not committed is done again, and led by the worker that leads then.
            if replica.stage != "open":
                self.link.send(Unled(step=replica.next_version - 1))
            raise WireError(UNLED.format(replica.inside))

    def _counted_among(self, order: Enter | None) -> Having | None:
        """Return who has which layers of the state at hand, or None if the job left that state."""
        if order is not None and order is not self.entered:
            return having(order) if self.me in order.holders else None
        if self._holds:
            return self._handover.having
        # A committed step is applied again: the workers of our chain are at the same one, others
        # may be ahead.
        chain = self.layout.replica_of(self.me).workers
        return {one: held for one, held in self._handover.having.items() if one in chain}

    def _stop_or_save(self) -> None:
        self.go_on()
        self._send_what_is_due()

    def _send_what_is_due(self) -> None:
        if self._snapshots.asked_at is None or not self._holds:
            return
        with self.unaided():
            self._send_due()

    def _send_due(self) -> None:
        if self._snapshots.due():
            self._comparison.proven_from = self.replica.step
            self.output.tell_numbers()  # whoever goes on from the snapshot does not log them again
            if not self._fresh:
                self.output.precede(self.replica.turn - 1, leads=self._leads)
            self._snapshots.send()

    def check(self) -> None:
        # This worker notices a newer layout when it waits for the sum of the step.
        if self._proving.going or self._reproduces(self.replica.version):
            return
        self._stop_or_save()
        self._computed += 1

    def work(self, step: int, partial: Partial, shown: Collection[int], compute: Compute) -> Work:
        first, count = self._share
        missing = partial.missing(first, count)
        alone = self._proving.going or self._reproduces(self.replica.version)
        if not self.replica.helps or alone or self.layout.width == 1:
            self._help.close()
            return Own(missing)
        assert isinstance(partial, Canonical)
        self._help.open(step, partial, compute)
        return self._help.work(missing, shown, range(first, first + count))

    def early(self, step: int, partial: Partial, total: Sum, microbatch: int) -> Early | None:
        if self._proving.going or self._reproduces(self.replica.version):
            return None
        return self._exchanging.early(step, partial, total, microbatch)

    def all_reduce(self, step: int, partial: Partial, total: Sum) -> None:
        if self.replica.notes is not None:
            self.replica.notes.skip()
        if self._computed:
            settle(self.replica.space.device)
            own_s = time.monotonic() - self._began_s - self._help.waited_s
            self.link.microbatch_s = own_s / self._computed
        with self.unaided():
            self._exchanging.run(step, partial, total)
        self._noting.tell(step)

    @unaided
    def promise(self, step: int, summed: Summed) -> None:
        held = None
        if summed.held is not None:
            held = Held(tuple(sorted(summed.held)), len(self.replica.holdings.all))
            self._handover.promised = held
        self._settle_samples()
        self._preparing.promise(step, summed, held, self._help.answered)

    @unaided
    def commit(self, step: int) -> None:
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
                break
            if self._preparing.forgotten:
                self._preparing.promise_again()
        self._proven, self._comparison.joins, self.reproduced = True, False, ()
        self._unsaid = False
        passing("step: commit heard")
        if self._handover.promised is not None:
            self._handover.keep(self._deep.keepers())

    def settle(self) -> None:
        self._snapshots.settle()
        self._settle_samples()

    def _settle_samples(self) -> None:
        with self.link.stuck.aided():  # waits for the thread that makes them
            self.beside.settle()

    def finish(self, replica: Replica, facts: Facts) -> bool:
        # The job would wait for a first step of this worker, which nobody can join before it.
        if not facts.steps_total:
            raise Misuse(
                "the loop has no step to do: session.steps(n) or session.epochs(n, data) was called for none, or the data "
                "is shorter than a batch"
            )
        self._check(replica)
        if not self.astray:
            self.output.tell(replica.turn - 1, replica.state, last=True)
            self.output.tell_numbers()  # the job is over before the script is
        self._help.close()
        self.link.step, last = -1, replica.version
        self._left = last
        self.link.send(LoopLeft(version=last))
        if not self.astray:
            self.output.leave(replica.turn)
        while not self._done:
            try:
                self._come_in(replica)
                self._say_held()
                if replica.version < last:
                    self._left = None
                    return False
                if self._leads:
                    self.output.hand_in()
                if self._last is not None and self._holds:
                    # Sent before the state itself, which is put together from what all workers
                    # have.
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
        self.output.gather(replica.turn)
        return True

    def _over_or_forgotten(self, sent_at: int) -> bool:
        return self._done or self._snapshots.failed or self.link.connects != sent_at

    @unaided
    def _gather_behind(self, replica: Replica) -> None:
        """Get the whole model for the script's code after its loop, if there is room for it.

        With an unbuilt model this worker takes only its share of the layers that no worker of the
        layout has.
        """
        self._handover.pulling.offer(replica.version, replica.snapshot())
        if replica.unbuilt:
            self._handover.take_in()
        else:
            self._handover.pull(replica.holdings.all)
