"""A worker among others: the side of the step's transaction that runs beside the script.

    compute own microbatches -> reduce my slice -> hand it to all, and to the keeper -> prepared
    -> commit -> apply

The script's thread does everything here and waits in one place only (`_wait`); the threads of the mesh
and of the link to the keeper leave what arrives and wake it. A new layout (`Enter`) interrupts every
wait that belongs to an older one. State moves at step boundaries, and never into a script's
unfinished step.
"""

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

import msgspec
import numpy as np
import torch

from agent import measuring, probing, tree
from agent.deep import Deep, Whole
from agent.errors import WireError
from agent.faults import passing
from agent.layout import Layout
from agent.link import Link
from agent.mesh import Mesh
from agent.messages import UNRECORDED, JobOrder, NanPolicy, WorkerOrder
from agent.partial import Partial
from agent.pipeline.examine import cut_points
from agent.pipeline.record import CannotRecord
from agent.pipeline.wires import MeshChannel
from agent.profile import Profile
from agent.protocol import (
    AnyMessage,
    Commit,
    Done,
    Enter,
    Held,
    Hello,
    Holding,
    Measured,
    Noticed,
    Part,
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
from agent.pulling import Pulling, covers, share_among
from agent.schedule import Kind
from agent.session import Session
from agent.shards import cut
from agent.store.layers import REST, Collected, LiveLayer, share_of, with_settings
from agent.store.memory import copy_bytes, joined
from agent.store.shares import Extent, Gathered, Share, batches, whole
from agent.sums import Sum, Summed
from agent.timeline import Notes
from agent.wire import Connection
from agent.world import Abandoned, Facts, Interrupted

log = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 20  # of a snapshot, so that what is urgent can pass in between

T = TypeVar("T")


class Group:
    """The world of a session that is one of many."""

    nan: NanPolicy = "fail"

    def __init__(self, order: WorkerOrder, host: str, ended: Callable[[str], None]) -> None:
        self._job, self._me, self._machine_id = order.job, order.worker, order.machine_id
        self._changed = threading.Condition()
        self._pulling = Pulling(self, lambda: self._mesh, self._changed)
        self._mesh = Mesh(
            self._me, order.secret, host, self._changed, self._peer_broke, self._answer_peer
        )
        self._broke: PeerBroken | None = None  # the last complaint
        self.link = Link(
            order.keeper_address,
            order.secret,
            self._hello,
            self._deliver,
            ended,
            connected=self._complain_again,
        )
        self._welcome: tuple[JobOrder, bytes] | None = None
        self._ready: Ready | None = None
        self._steps_total = 0
        self._session: Session | None = None
        self._order: Enter | None = None  # the newest that was heard of
        self._entered: Enter | None = None  # the one this worker is in
        self._holds = False  # this worker's state is one that the job goes on from
        self._needs_state = False
        self._sliced_at = 0  # the connection to the keeper by which the sum was sent
        self._committed = 0
        self._snapshot_at: int | None = None
        self._state: tuple[State, memoryview] | None = None
        self._redo: dict[tuple[int, int], tuple[memoryview, bytes]] = {}  # by generation, step
        self._done = False
        self._notice_at_s: float | None = None
        self._began_s, self._computed = 0.0, 0  # of this share: since when, and microbatches so far
        self._deep = Deep(self._me)
        self._trace_at: int | None = None  # the step whose timeline is asked for
        self._unmeasured = False  # the script can be cut, and nobody has measured it yet
        self._known: ProfileKnown | None = None
        # Whose network has not been measured with all kinds of peers.
        self._unprobed: Profile | None = None
        self._probed_at = -1  # the generation in which it was tried
        self._addresses: dict[str, str] = {}
        self._slices: list[tuple[int, list[memoryview]]] = []  # what the keeper got of the sum
        self._having: dict[str, frozenset[str] | None] = {}  # who has what of the state; None: all
        self._promised: Held | None = None  # what is here once the step in flight is committed
        self.astray = False  # what the script does until the next boundary counts for nothing

    # --- what the worker process uses ---------------------------------------------------------------

    def start(self) -> tuple[JobOrder, bytes]:
        """Connect to the keeper; the order and the script."""
        self.link.start()
        order, script = self._wait(lambda: self._welcome)
        self.nan = order.nan
        return order, script

    def close(self) -> None:
        self.link.close()
        self._mesh.close()

    # --- what the session uses ----------------------------------------------------------------------

    @property
    def leads(self) -> bool | None:
        """As `leader`; None as long as this worker was in no layout at all."""
        return None if self._entered is None else self.leader

    @property
    def leader(self) -> bool:
        first = self._holds and self._layout.workers[0] == self._me
        return first and not self.astray

    @property
    def notice_s(self) -> float | None:
        return None if self._notice_at_s is None else self._notice_at_s - time.time()

    def boundary(self, session: Session, facts: Facts) -> None:
        self._session, self._steps_total = session, facts.steps_total
        if self._ready is None:
            self._ready = Ready(
                microbatches=facts.microbatches,
                steps_total=facts.steps_total,
                state_bytes=session.state_bytes,
                unbuilt=measuring.unbuilt(session.objects.values(), session.birth_mark),
            )
            self.link.send(self._ready)
        self.astray = False
        while True:
            try:
                self._come_in(session)
                self._snapshot(session)
            except Interrupted:
                continue
            break
        self._pulling.forget(session.version)

    def logged(self, step: int) -> tuple[memoryview, bytes] | None:
        entered = self._entered
        assert entered is not None
        if not entered.version - entered.redo <= step < entered.version:
            return None
        generation = entered.layout.generation
        # One comes while the one before is applied; what is not asked for takes no memory here.
        first = step == entered.version - entered.redo
        for wanted in range(step if first else step + 1, min(step + 2, entered.version)):
            self.link.send(RedoAsked(generation=generation, step=wanted))
        try:
            return self._wait(lambda: self._redo.pop((generation, step), None))
        except Interrupted:
            self.astray = True
            raise Abandoned from None

    def share(self) -> tuple[int, int]:
        if self._superseded():
            self._change_in_step()
        if self._entered is not None and self._entered.record and self.leader:
            self._tell_recorded()
        if self._unmeasured and self.leader:
            self._measure()
        if self._unprobed is not None and self.leader:
            self._probe(self._unprobed)
        self._note()
        self._began_s, self._computed = time.monotonic(), 0
        return self._range()

    def _range(self) -> tuple[int, int]:
        mine = self._layout.replica_of(self._me)
        return mine.first, mine.count

    def _tell_recorded(self) -> None:
        """Whether the script could be cut, once it is known."""
        assert self._session is not None
        assert self._ready is not None
        if self._ready.uncuttable != UNRECORDED:
            return
        self.link.send(Recording())
        try:
            points = cut_points(self._session.recording().facts)
            why = "" if points else "its model has no place to be cut at"
        except CannotRecord as error:
            points, why = (), str(error)
        except Exception as error:
            # What the script does is right as long as nobody cuts it: it trains on in one piece.
            log.exception("the loop could not be recorded")
            points, why = (), f"recording its loop failed: {type(error).__name__}: {error}"
        self._ready = msgspec.structs.replace(
            self._ready, uncuttable=why, stages_max=len(points) + 1
        )
        self.link.send(self._ready)
        self._unmeasured = not why

    def _measure(self) -> None:
        """Unless it was measured before. The others wait for it in the step, so it has to be short."""
        session = self._session
        assert session is not None
        recording = session.recording()
        key = measuring.key_of(recording)
        if not self._measured_before(key):
            left = (self._steps_total - session.version) * session.microbatches
            things = session.objects.values()
            try:
                profile = measuring.profile_of(recording, things, self._job, left, self._go_on)
                self._unmeasured, self._unprobed = False, profile
                try:
                    self._unprobed = self._with_network(profile)
                finally:  # who is called away has still measured the model
                    self.link.send(Measured(profile=self._unprobed))
            except Interrupted:
                raise
            except Exception as error:  # a job trains without a profile too
                self._say_unmeasured("model", error)
        self._unmeasured = False

    def _say_unmeasured(self, what: str, error: Exception) -> None:
        print(f"{self._me}: the {what} was not measured: {error!r}", file=sys.__stderr__)

    def _measured_before(self, key: str) -> bool:
        while True:
            asked_at = self.link.connects
            self.link.send(ProfileAsked(key=key))
            found = self._wait(partial(self._answer, key, asked_at))
            if isinstance(found, ProfileKnown):
                self._unprobed = found.unprobed
                return found.known

    def _answer(self, key: str, asked_at: int) -> ProfileKnown | bool:
        """The keeper's answer; or that it was restarted, and has to be asked again."""
        if self._known is not None and self._known.key == key:
            return self._known
        return self.link.connects != asked_at

    def _probe(self, profile: Profile) -> None:
        """When there are neighbours of a kind that there was none of before."""
        if self._probed_at == self.generation:
            return
        try:
            found = self._with_network(profile)
        except Interrupted:
            raise
        except Exception as error:  # nor does it need to know the network
            self._unprobed = None
            self._say_unmeasured("network", error)
            return
        if found != profile:
            self.link.send(Measured(profile=found))
        self._unprobed = None if found.network_from == "measured" else found

    def _with_network(self, profile: Profile) -> Profile:
        assert self._session is not None
        self._probed_at = self.generation
        host = self._mesh.address.rpartition(":")[0]
        near, far = list[str](), list[str]()
        for peer in self._layout.workers:
            if peer != self._me and peer in self._addresses:
                there = self._addresses[peer].rpartition(":")[0]
                (near if there == host else far).append(peer)
        return probing.probed(profile, near, far, self, self._session.version)

    def _answer_peer(self, peer: str, part: Part) -> None:
        if part.tag == probing.PROBE:
            probing.answer(self._mesh, peer, part)
        else:
            self._pulling.answer(peer, part)

    def _note(self) -> None:
        session = self._session
        assert session is not None
        session.notes = Notes() if self._trace_at == session.version else None

    def _tell_noted(self, step: int, cuts: tuple[int, ...] = ()) -> None:
        assert self._session is not None
        notes, generation = self._session.notes, self._layout.generation
        if notes is not None:
            notes.lap(Kind.REDUCE, 0)
            moments = tuple(notes.moments)
            self.link.send(Traced(generation=generation, step=step, cuts=cuts, moments=moments))

    @property
    def deep(self) -> bool:
        return self._layout.depth > 1

    def play(self, step: int, batches: Sequence[object]) -> Summed:
        session, layout = self._session, self._layout
        assert session is not None
        chain = self._deep.chain(
            layout,
            step,
            session.recording(),
            Whole(session.space, session.holdings, session.total),
            lambda: MeshChannel(
                self._mesh,
                self._changed,
                layout.generation,
                patience_s=threading.TIMEOUT_MAX / 2,  # the keeper says when it is over
                check=self._go_on,
            ),
        )
        if chain.held is not None:
            self._pull(session, chain.held)
            if session.newborn:
                self._having = self._deep.keepers()
        summed = chain.play(step, batches, lambda m: session.seed_for(step, m), self._stop_or_save)
        self.link.microbatch_s = chain.busy_s
        if session.notes is not None:
            chain.note(session.notes)
            self._tell_noted(step, chain.cuts)
        if chain.held is None:
            self._send_slices(step, self._my_slice(summed.total))
        else:
            self._send_slices(step, chain.slices())
        return summed

    def fetch(self) -> None:
        """Everyone does at the same place of the script, or who does not waits for those who do.

        The script goes on with a whole model, or for nothing. A new layout is heard of here, and its workers are
        asked; it is entered later, for the state of an unfinished step is not one to hand over.
        """
        session = self._session
        assert session is not None
        here, version = session.holdings, session.next_version
        layers = here.lacking(here.all) - here.borrowed
        if not layers or self.astray:
            return
        if session.newborn:
            session.bear_to_look()
            return
        self._pulling.show(version, session.snapshot())
        while (known := self._counted_among(order := self._order)) is not None:
            assert order is not None
            try:
                gathered = self._pulling.look(layers, version, known, order.layout.generation)
            except Interrupted:
                continue
            session.borrow(gathered, layers)
            return
        self._holds, self.astray = False, True

    def _counted_among(self, order: Enter | None) -> dict[str, frozenset[str] | None] | None:
        """Who else has what, if the job goes on from what is here."""
        if order is None or order is self._entered:
            return self._others() if self._holds else None
        if self._me not in order.holders:
            return None
        return {worker: held for worker, held in _having(order).items() if worker != self._me}

    def _go_on(self, generation: int | None = None) -> None:
        if self._superseded(generation):
            raise Interrupted

    def _stop_or_save(self) -> None:
        self._go_on()
        assert self._session is not None
        self._snapshot(self._session)

    def check(self) -> None:
        self._stop_or_save()
        self._computed += 1

    def gather(self, step: int, partial: Partial, total: Sum) -> None:
        """Reduce-scatter and all-gather, in the order of the canonical tree."""
        assert self._session is not None
        if self._session.notes is not None:
            self._session.notes.skip()
        if self._computed:
            self.link.microbatch_s = (time.monotonic() - self._began_s) / self._computed
        workers, generation = self._layout.workers, self._layout.generation
        peers = [worker for worker in workers if worker != self._me]
        spans = {
            worker: cut(total.space.total_bytes, len(workers), index)
            for index, worker in enumerate(workers)
        }
        mine = partial.nodes(*self._range())
        present = _union(node.present for node in mine)
        for peer in peers:
            part = Part(generation=generation, step=step, tag="part", extra=present)
            self.send(peer, part, [node.memory(*spans[peer]) for node in mine])
        passing("step: sums sent")
        start, end = spans[self._me]
        parts, masks = self._parts(step, dict.fromkeys(peers, spans[self._me]), present)
        passing("step: sums taken")
        own = tree.nodes_of(*self._range(), self._layout.microbatches)
        parts |= dict(zip(own, (node.flat[start:end] for node in mine), strict=True))
        total.flat[start:end] = tree.fold(
            tree.root(self._layout.microbatches),
            parts,
            self._layout.microbatches,
            lambda a, b: total.space.add_slices(a, b, start),
        )
        summed = Part(generation=generation, step=step, tag="sum")
        for peer in peers:
            self.send(peer, summed, [total.memory(start, end)])
        self._send_slices(step, self._my_slice(total))
        for peer in peers:
            _, payload = self.take(peer, step, "sum")
            copy_bytes(payload, total.memory(*spans[peer]))
        total.present[:] = _union(masks)
        self._tell_noted(step)

    def commit(self, step: int, summed: Summed) -> None:
        session = self._session
        assert session is not None
        if summed.held is not None:
            self._promised = Held(tuple(sorted(summed.held)), len(session.holdings.all))
        self._send_prepared(step, summed)
        while True:
            self._wait(
                lambda: (
                    self._committed > step
                    or self.link.connects != self._sliced_at
                    or self._snapshot_due(session)
                )
            )
            self._snapshot(session)
            if self._committed > step:
                passing("step: commit heard")
                break
            if self.link.connects != self._sliced_at:
                # The keeper was restarted, and forgot what it was sent.
                self._send_slices(step, self._slices)
                self._send_prepared(step, summed)
        if summed.held is not None:
            self._having = self._deep.keepers()

    def finish(self, session: Session, facts: Facts) -> None:  # noqa: ARG002
        while not self._done:
            try:
                self._come_in(session)
                if self._layout.owned:
                    self._pulling.offer(session.version, session.snapshot())
                    self._pull(session, self._wanted_behind(session))
                self._sliced_at = self.link.connects
                self._send_state(session.settled(), session.version, final=True)
                self._wait(lambda: self._done or self.link.connects != self._sliced_at)
            except Interrupted:
                continue

    def _wanted_behind(self, session: Session) -> frozenset[str]:
        """What comes behind the loop may use all of the model, unless it is too large for that: then what nobody
        in the layout has is shared out, since the final state is sent by those who are in it.
        """
        if not session.unbuilt:
            return session.holdings.all
        workers = self._layout.workers
        having = {worker: self._having.get(worker, frozenset()) for worker in workers}
        if covers(having, session.holdings.all):
            return having[self._me] or frozenset()
        found = [held for held in having.values() if held is not None]
        orphans = sorted(session.holdings.all.difference(*found))
        for index, worker in enumerate(workers):
            self._having[worker] = found[index] | set(orphans[index :: len(workers)])
        return self._having[self._me] or frozenset()

    # --- layouts ------------------------------------------------------------------------------------

    @property
    def _layout(self) -> Layout:
        assert self._entered is not None
        return self._entered.layout

    def _superseded(self, generation: int | None = None) -> bool:
        """Whether a newer layout was heard of than this; if none is named, than the one entered."""
        order = self._order
        since = self.generation if generation is None else generation
        return order is not None and order.layout.generation > since

    def _come_in(self, session: Session) -> None:
        """At a boundary: be in the newest layout, with its state (or on the way there by redo)."""
        while True:
            if self._superseded():
                self._enter()
            if self._needs_state:
                self._receive_state(session)
            entered = self._entered
            if entered is not None and self._me in entered.layout.workers:
                self._pull_whole(session)
                break
            self._wait(lambda: self._superseded() or self._done, interruptible=False)
            if self._done:
                return
        if not self._holds and session.version == entered.version:
            self._holds = True
            self._say_held(session)
            passing("morph: holding said")

    def _change_in_step(self) -> None:
        """In the middle of a step: go on with it in the new layout, or give it up."""
        self._enter()
        if not self._holds or self._me not in self._layout.workers:
            self._holds, self.astray = False, True
            raise Abandoned
        assert self._session is not None
        self._pull_whole(self._session)

    def _pull_whole(self, session: Session) -> None:
        """Have all of the state, where everyone keeps it; or where some of it lies outside of the layout and
        is to go to the keeper: without a backup there would be no commit, and so no moment to ask for it again.
        """
        entered, workers = self._entered, self._layout.workers
        assert entered is not None
        if entered.layout.owned:
            if session.newborn:
                return  # each has what it keeps as soon as it knows what that is
            having = {worker: self._having.get(worker, frozenset()) for worker in workers}
            if not (entered.snapshot and entered.holders) or covers(having, session.holdings.all):
                return
        self._pull(session, session.holdings.all)
        if entered.layout.owned:
            self._having |= dict.fromkeys(workers)

    def _enter(self) -> None:
        order, session = self._order, self._session
        assert order is not None
        assert session is not None
        self._mesh.enter(order.layout.generation)
        self._deep.leave()
        self._holds = self._me in order.holders
        born = session.newborn and order.version == 0 and bool(order.holders)
        self._needs_state = not self._holds and not born and self._me in order.layout.workers
        self._entered, self._promised = order, None
        self._having = {} if born else _having(order)
        passing("morph: entered")
        if not self._holds:
            return
        if session.version != order.version:
            raise WireError(
                f"the keeper takes {self._me} for a holder of version {order.version}, "
                f"but it holds {session.version}"
            )
        if not born:
            if order.layout.owned or order.held:
                self._pulling.offer(order.version, session.collected())
            self._hand_over(order, session)

    def _others(self) -> dict[str, frozenset[str] | None]:
        return {worker: held for worker, held in self._having.items() if worker != self._me}

    def _pull(self, session: Session, layers: frozenset[str]) -> None:
        """Have these layers, of the version that the session is at."""
        lacking = session.holdings.lacking(layers)
        if session.newborn:
            session.bear(layers)
        elif lacking:
            gathered = self._pulling.pull(lacking, session.version, self._others())
            session.add(gathered, lacking)
            # Before anybody knows of it: who asks in the next layout may ask before we are in it.
            self._pulling.offer(session.version, session.collected())
            self._say_held(session)

    def _held(self, session: Session) -> Held | None:
        here = session.holdings.here
        if session.newborn:
            return None  # whatever is not here can be born
        return None if here is None else Held(tuple(sorted(here)), len(session.holdings.all))

    def _say_held(self, session: Session) -> None:
        self._promised = None
        self.link.send(
            Holding(
                generation=self._layout.generation,
                version=session.version,
                held=self._held(session),
            )
        )

    def _hand_over(self, order: Enter, session: Session) -> None:
        """My slice of the state, to everyone in the layout who has none."""
        receivers = [w for w in order.layout.workers if w not in order.holders]
        if receivers and not order.layout.owned and not order.held:
            self._hand_out(order, session, receivers)
        if self._me not in order.layout.workers:
            self._holds = False

    def _hand_out(self, order: Enter, session: Session, receivers: list[str]) -> None:
        passing("morph: hand-over begun")
        index = order.holders.index(self._me)
        share, pieces = share_of(session.settled(), len(order.holders), index)
        part = Part(
            generation=order.layout.generation,
            step=order.version,
            tag="state",
            extra=msgspec.msgpack.encode(share),
        )
        for receiver in receivers:
            self.send(receiver, part, pieces)
            passing("morph: part sent")

    def _receive_state(self, session: Session) -> None:
        order = self._entered
        assert order is not None
        if order.holders:
            if order.layout.owned or order.held:
                self._start_with(session, order)
            else:
                session.load(self._gather_state(order), order.version)
            self._needs_state = False
            passing("morph: state received")
            return
        generation = order.layout.generation
        state, payload = self._wait(
            lambda: (
                self._state
                if self._state is not None and self._state[0].generation == generation
                else None
            )
        )
        self._state = None
        gathered = Gathered()
        gathered.add(Share(forms=state.layers, extents=whole(state.layers)), payload)
        session.load(gathered, state.version)
        self._needs_state = False

    def _start_with(self, session: Session, order: Enter) -> None:
        """What belongs to no stage, and what optimizers are set to. Layers are asked for when it is known which
        ones are needed.
        """
        every = session.holdings.all
        layers = every & {REST} if order.layout.owned else every
        asked = layers | with_settings(session.objects)
        gathered = self._pulling.pull(asked, order.version, self._others())
        session.load(gathered, order.version, layers if order.layout.owned else None)
        passing("morph: state received")

    def _gather_state(self, order: Enter) -> Gathered:
        gathered = Gathered()
        for holder in order.holders:
            extra, payload = self.take(holder, order.version, "state")
            gathered.add(msgspec.msgpack.decode(extra, type=Share), payload)
        return gathered

    # --- snapshots for the keeper -------------------------------------------------------------------

    def _snapshot_due(self, session: Session) -> bool:
        """What is asked for with a new layout is sent under that layout, not under the one before."""
        born = not (session.newborn and self._layout.owned) or bool(self._having)
        return (
            self._holds and not self._superseded() and self._snapshot_at == session.version and born
        )

    def _snapshot(self, session: Session) -> None:
        if self._snapshot_due(session):
            self._snapshot_at = None
            self._send_state(session.settled(), session.version, final=False)

    def _send_state(self, state: list[LiveLayer], version: int, *, final: bool) -> None:
        """Copy my share now, so that the next step may change it; send it while that is computed."""
        workers, generation = self._layout.workers, self._layout.generation
        assert self._session is not None
        if self._layout.owned and not (final and not self._session.unbuilt):
            having = {worker: self._having.get(worker, frozenset()) for worker in workers}
            if not covers(having, self._session.holdings.all):
                return  # whoever has the rest is not in the layout: we will be asked again
            share, pieces = share_among(state, having, self._me)
        else:
            share, pieces = share_of(state, len(workers), workers.index(self._me))
        frozen = joined(pieces)
        passing("save: snapshot begun")
        begun = Snapshot(
            generation=generation,
            version=version,
            forms=share.forms,
            extents=(),
            last=False,
            final=final,
        )
        threading.Thread(
            target=self._stream, args=(begun, share.extents, frozen), name="snapshot", daemon=True
        ).start()

    def _stream(self, begun: Snapshot, extents: tuple[Extent, ...], frozen: memoryview) -> None:
        at, message = 0, begun
        for batch in batches(extents, CHUNK_BYTES):
            size = sum(extent.size for extent in batch)
            self.link.send(msgspec.structs.replace(message, extents=batch), frozen[at : at + size])
            passing("save: share sent")
            at, message = at + size, msgspec.structs.replace(begun, forms=())
            if self._superseded():
                return
        self.link.send(msgspec.structs.replace(message, last=True))

    # --- sending and waiting ------------------------------------------------------------------------

    def _my_slice(self, total: Sum) -> list[tuple[int, list[memoryview]]]:
        """Where everyone has the whole sum, each sends as much of it."""
        workers = self._layout.workers
        start, end = cut(total.space.total_bytes, len(workers), workers.index(self._me))
        return [(start, [total.memory(start, end)])]

    def _send_slices(self, step: int, slices: list[tuple[int, list[memoryview]]]) -> None:
        assert self._session is not None
        self._sliced_at, self._slices = self.link.connects, slices
        for offset, pieces in slices:
            message = Slice(
                generation=self._layout.generation,
                step=step,
                offset=offset,
                total=self._session.space.total_bytes,
            )
            self.link.send(message, *pieces)
        passing("step: slice sent")

    def _send_prepared(self, step: int, summed: Summed) -> None:
        self.link.send(
            Prepared(
                generation=self._layout.generation,
                step=step,
                loss=float(summed.total.loss) / self._layout.microbatches,
                present=summed.present,
                held=self._promised if summed.held is not None else None,
            )
        )
        passing("step: prepared")

    # --- what those see who ask for layers ----------------------------------------------------------

    @property
    def generation(self) -> int:
        return self._entered.layout.generation if self._entered is not None else -1

    def now(self) -> tuple[int, Collected | None]:
        session = self._session
        return (-1, None) if session is None else (session.version, session.kept)

    def send(self, peer: str, part: Part, pieces: list[memoryview]) -> None:
        while True:
            connection: Connection = self._wait(
                lambda: self._mesh.connection(peer), generation=part.generation
            )
            try:
                connection.send(part, *pieces)
            except WireError:
                self._mesh.drop(peer, connection)
            else:
                return

    def take(
        self, peer: str, step: int, tag: str, generation: int | None = None
    ) -> tuple[bytes, memoryview]:
        key = (peer, self.generation if generation is None else generation, step, tag)
        return self._wait(lambda: self._mesh.mailbox.pop(key, None), generation=generation)

    def _parts(
        self, step: int, spans: dict[str, tuple[int, int]], own: bytes
    ) -> tuple[dict[tree.Node, torch.Tensor], list[bytes]]:
        """Everyone's sums for my slice, by node; and what each contributed to."""
        parts: dict[tree.Node, torch.Tensor] = {}
        masks = [own]
        for replica in self._layout.replicas:
            peer = replica.workers[0]
            if peer == self._me:
                continue
            present, payload = self.take(peer, step, "part")
            size = spans[peer][1] - spans[peer][0]
            nodes = tree.nodes_of(replica.first, replica.count, self._layout.microbatches)
            flat = torch.frombuffer(payload, dtype=torch.uint8) if size else torch.empty(0)
            for index, node in enumerate(nodes):
                parts[node] = flat[index * size : (index + 1) * size]
            masks.append(present)
        return parts, masks

    def _wait(
        self,
        look: Callable[[], T | None],
        *,
        interruptible: bool = True,
        generation: int | None = None,
    ) -> T:
        """The one place where the script's thread waits: until `look` finds something."""
        with self._changed:
            while True:
                found = look()
                if found:
                    return found
                if interruptible and self._entered is not None:
                    self._go_on(generation)
                self._changed.wait()

    # --- what arrives, on other threads -------------------------------------------------------------

    def _hello(self) -> Hello:
        return Hello(
            job=self._job,
            worker=self._me,
            machine_id=self._machine_id,
            mesh_address=self._mesh.address,
            generation=self.generation,
            version=self._session.version if self._session is not None and self._holds else None,
            held=self._promised or (self._held(self._session) if self._session else None),
            ready=self._ready,
        )

    def _deliver(self, message: AnyMessage, payload: memoryview) -> None:
        with self._changed:
            match message:
                case Welcome():
                    self._welcome = (message.order, bytes(payload))
                case Peers():
                    self._addresses = dict(message.addresses)
                    self._mesh.want(message.addresses)
                case Enter():
                    self._hear(message)
                case Commit():
                    self._committed = max(self._committed, message.version)
                    if message.snapshot:
                        self._snapshot_at = message.version
                    if message.trace:
                        self._trace_at = message.version
                case ProfileKnown():
                    self._known = message
                case State():
                    self._state = (message, payload)
                case Redo():
                    self._redo[message.generation, message.step] = (payload, message.present)
                case Noticed():
                    self._notice_at_s = message.deadline_s
                case Done():
                    self._done = True
                case _:
                    raise WireError(f"the keeper sent {type(message).__name__}")
            self._changed.notify_all()

    def _hear(self, order: Enter) -> None:
        if self._order is not None and order.layout.generation <= self._order.layout.generation:
            return
        before = set(self._order.addresses) if self._order is not None else set()
        self._order = order
        self._mesh.forget(before - set(order.addresses))
        self._mesh.want(order.addresses)
        self._snapshot_at = order.version if order.snapshot else None
        self._committed = order.version
        self._redo.clear()

    def _peer_broke(self, peer: str) -> None:
        """Of the newest layout that was heard of: what breaks before it is entered is lacking in it."""
        order = self._order
        if order is not None and peer in order.layout.workers:
            self._broke = PeerBroken(generation=order.layout.generation, peer=peer)
            self.link.send(self._broke)

    def _complain_again(self) -> None:
        """The keeper may not have heard it, or has forgotten it: it was restarted."""
        if self._broke is not None:
            self.link.send(self._broke)


def _having(order: Enter) -> dict[str, frozenset[str] | None]:
    """Which layers each holder has; None is all."""
    held = order.held
    return {one: frozenset(held[one]) if one in held else None for one in order.holders}


def _union(masks: Iterable[bytes | bytearray]) -> bytes:
    rows = [np.frombuffer(mask, dtype=np.uint8) for mask in masks]
    return bytes(np.bitwise_or.reduce(rows)) if rows else b""
