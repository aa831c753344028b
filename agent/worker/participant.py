"""A worker's connection to keeper and peers, and its way into the layouts that it is sent.

The threads of the mesh and of the link leave what arrives here and wake the script's thread. A new
layout (`Enter`) interrupts every wait that belongs to an older one; the script's thread enters it
where it may.
"""

import hashlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from agent.calibration import network_probe
from agent.errors import WireError
from agent.faults import passing
from agent.messages import JobOrder, NanPolicy, WorkerOrder
from agent.net.link import Link
from agent.net.mesh import Mesh
from agent.net.watchdog import unaided
from agent.output.folder import Output
from agent.protocol import (
    PROVING,
    AnyMessage,
    Commit,
    Done,
    Enter,
    Hello,
    Noticed,
    OutputGiven,
    OutputTaken,
    Over,
    Part,
    PeerBroken,
    Peers,
    ProfileKnown,
    ProofWanted,
    Prove,
    Redo,
    State,
    Welcome,
)
from agent.replica import Replica
from agent.store.layers import Collected
from agent.tensors.device import CPU
from agent.transport.tcp import Tcp
from agent.worker.comparison import Comparison
from agent.worker.exchange.exchange import Exchanging
from agent.worker.exchange.help import Help
from agent.worker.exchange.promise import Preparing
from agent.worker.peers import PeerWorker
from agent.worker.proof.reproduction import Proving
from agent.worker.proof.second_process import Second
from agent.worker.replay import Redoing
from agent.worker.served import ServedNode
from agent.worker.snapshots import Snapshots
from agent.worker.stages.pipeline_layout import Deep
from agent.worker.stages.stages import Stages
from agent.worker.state.handover import Handover
from agent.worker.state.layer_transfer import Pulling
from agent.worker.state.prefault import Landing
from agent.worker.state.shards import Stores
from agent.worker.step_notes import Noting
from agent.worker.survey import helper
from agent.worker.survey.survey import Survey


class Participant(PeerWorker):
    """One worker among others, as they see it; `Group` is how its own session sees it."""

    nan: NanPolicy = "fail"
    stop_at = 0

    def __init__(self, order: WorkerOrder, host: str, ended: Callable[[str], None]) -> None:
        super().__init__()
        self._job, self.me, self.machine = order.job, order.worker, order.machine_id
        self.slot = order.slot
        self._worker_order, self._host = order, host
        self.output = Output(Path())  # until it is known where the script's files lie
        self.node: ServedNode | None = None  # of a job whose tables are served
        stores = Stores()
        self._handover = Handover(self, Pulling(self, lambda: self._mesh, self._changed), stores)
        self._snapshots = Snapshots(self, self._handover, stores)
        self._preparing = Preparing(self)
        self._mesh = Mesh(
            self.me, order.secret, host, self._changed, self._peer_broke, self._answer_peer
        )
        self._flows = Tcp(self.me, order.secret, self._changed, self._flow_broke)
        self._flows.address, self._mesh.others = self._mesh.address, self._flows.welcome
        self._help = Help(self)
        self._mesh.helped = self._help.hear
        self._exchanging = Exchanging(self, self._flows, self._preparing, self._help)
        self._landing = Landing()
        self._mesh.place = self._landing.place
        self._survey = Survey(self, order.job, self._mesh.address)
        self._complaints: list[PeerBroken] = []  # in the newest layout that is known
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
        self._unsaid = False  # the keeper has not heard that yet
        # The layout is of others, who may die on their way to the state: it stays here until they commit.
        self._keeps = False
        self._beyond = 0  # what those others have committed, as far as it is told
        self._needs_state = False
        self._succeeds = False  # this worker's state has come from other workers
        self._committed = 0
        self._left: int | None = None  # the version with which the script left its loop
        self._redo, self._noting, self._proving = Redoing(self), Noting(self), Proving(self, stores)
        self._comparison = Comparison(self, self._proving)
        # Whether this worker took part in a committed step, or reproduced one and was let in.
        self._proven = False
        self._done = False
        self._notice_at_s: float | None = None
        self._deep = Deep(self.me)
        self._stages = Stages(
            self, self._mesh, self._deep, self._handover, self._preparing, self._comparison
        )
        # Whether the state has come from others since the output folder was last notified.
        self._fresh = True

    # --- the connection ---------------------------------------------------------------------------

    def start(self) -> tuple[JobOrder, bytes]:
        """Connect to the keeper; return the order, and the script with its files."""
        self.link.start()
        self._greeting, payload = self.wait(lambda: self._welcome)
        self._welcome = None
        order, self.code = self._greeting.order, hashlib.sha256(payload).hexdigest()
        self.nan, self.stop_at = order.nan, order.stop_at
        if order.transport == "nixl":
            self._flows.reach()
        return order, payload

    def close(self) -> None:
        self.output.close()
        self.link.close()
        self._mesh.close()
        self._flows.close()

    @property
    def lacks_files(self) -> bool:
        """Whether the job goes on without this worker, which lacks files that the job has kept.

        It does from the state of others or, if all those are lost from whom this worker has its
        own, from a stored one, which has its files.
        """
        others = self.entered is not None and bool({*self.entered.holders} - {self.me})
        return self.output.lacks and (self._proving.going or others or self._succeeds)

    # --- layouts ----------------------------------------------------------------------------------

    @unaided
    def _come_in(self, replica: Replica) -> None:
        """Enter the newest layout at a boundary, with its state or on the way there by redo."""
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
        """Return whether there is something to do other than to wait for a layout."""
        return self.superseded() or self._done or self._proving.asked

    def _take_part(self, replica: Replica) -> bool:
        """Get the state of the layout that was entered; False if this worker is not in it."""
        entered = self.entered
        if self._needs_state and entered is not None:
            self._handover.receive(entered)
            self._needs_state, self._fresh, self._comparison.joins = False, True, True
            self._succeeds = bool(entered.holders)
        if entered is None or self.me not in entered.layout.workers:
            return False
        self._handover.pull_whole()
        self._hold(replica)
        return True

    def _hold(self, replica: Replica) -> None:
        """Go on from the state here once it is the layout's.

        With several commits in a step that may be in the middle of the step.
        """
        if not self._holds and self.entered is not None and replica.version >= self.entered.version:
            self._holds = self._unsaid = True

    @unaided
    def _say_held(self) -> None:
        """Count as a holder, because the files that belong to the state are here as well.

        Who lacks some of them counts from the first step on that it is in.
        """
        if self._unsaid and not (self._succeeds and self.output.lacks):
            self._unsaid = False
            self._handover.say_held()
            passing("morph: holding said")

    def _enter(self) -> None:
        order, replica = self.order, self.replica
        assert order is not None
        self._mesh.enter(order.layout.generation)
        self._flows.enter(order.layout.generation)
        self._preparing.settle()
        self._exchanging.drop()
        self._help.close()
        self._deep.leave()
        inside, holder = self.me in order.layout.workers, self.me in order.holders
        # If holders have layers already, this worker gets layers from them instead of making them.
        born = replica.newborn and order.version == 0 and bool(order.holders) and not order.held
        self._holds, self._needs_state = holder or born, inside and not (holder or born)
        self._keeps, self._unsaid = self._holds and not inside, False
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
        self.output.tell_numbers()  # whoever goes on from the state does not log them again
        self._handover.hand_over(order)
        self._holds = inside

    # --- what those see who ask for layers --------------------------------------------------------

    def now(self) -> tuple[int, Collected | None]:
        replica = self._replica
        return (-1, None) if replica is None else (replica.version, replica.kept)

    def past(self, version: int) -> bool:
        return self._replica is not None and self._replica.given >= version

    # --- what arrives, on other threads -----------------------------------------------------------

    def _answer_peer(self, peer: str, part: Part) -> None:
        if part.tag == network_probe.PROBE:
            network_probe.answer(self, self._mesh, peer, part)
        elif part.tag == helper.ASKED:
            self._survey.helpers.answer(peer, part)
        else:
            self._handover.pulling.answer(peer, part)

    def _version(self) -> int | None:
        """Return the version of the state here, if the job may go on from it."""
        replica = self._replica
        kept = self._keeps and not self._passed()
        holds = self._holds and not self._unsaid
        return replica.version if replica is not None and (holds or kept) else None

    def _passed(self) -> bool:
        """Return whether others have committed a step beyond the state here."""
        return self._beyond > self.replica.version

    def _hello(self) -> Hello:
        return Hello(
            job=self._job,
            worker=self.me,
            machine_id=self.machine,
            mesh_address=self._mesh.address,
            generation=self.generation,
            version=self._version(),
            held=self._handover.held(self._replica) if self._replica else None,
            promised=self._handover.promised,
            left=self._left,
            ready=self._survey.ready,
            proven=self._proven,
            prover=self._prover,
        )

    def _is_of_others(self, commit: Commit) -> bool:
        """Whether it is of the newest known layout, which leaves us out; not of a step of ours."""
        if self.order is None or self.order.layout.generation != commit.generation:
            return False
        return self.me not in self.order.layout.workers

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
                    self._want(message.addresses)
                case Enter():
                    self._hear(message)
                case Commit() if self._is_of_others(message):
                    self._beyond = message.version
                case Commit():
                    self._committed = max(self._committed, message.version)
                    self._preparing.wanted = message.sums
                    if message.snapshot:
                        self._snapshots.ask(message.version, message.shards)
                    if message.trace:
                        self._noting.asked_at = message.version
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
                    self._notice_at_s = time.monotonic() + message.left_s
                case OutputTaken() | OutputGiven():
                    self.output.hear(message, payload)
                case Done():
                    self._done = True
                case Part() if self.node is not None:
                    self.node.hear(message, payload)
                case Over():
                    self.over = message.version
                case _:
                    raise WireError(f"the keeper sent {type(message).__name__}")
            self._changed.notify_all()

    def _hear(self, order: Enter) -> None:
        """Take note of a new layout.

        A restarted keeper may send again a layout that is known here and not entered yet.
        """
        generation = order.layout.generation
        if self.order is not None and generation < self.order.layout.generation:
            return
        if generation == self.generation:
            if order.snapshot:
                self._snapshots.ask(order.version, order.shards)
            return
        before = set(self.order.addresses) if self.order is not None else set()
        self._complaints = [each for each in self._complaints if each.generation == generation]
        self.order, self._beyond = order, 0
        let_in = self.me in order.layout.workers and self.me not in order.unproven
        self._proven |= order.proven and let_in
        for peer in before - set(order.addresses):
            self._mesh.forget([peer])
            self._flows.forget(peer)
        self._want(order.addresses)
        self._snapshots.ask(order.version if order.snapshot else None, order.shards)
        self._preparing.wanted = order.sums
        # At most lower it: a worker that slept while others did a step hears that version, and its
        # own step may not have been committed.
        self._committed = min(self._committed, order.version)
        self._redo.clear()

    def _want(self, addresses: Mapping[str, str]) -> None:
        """Connect to these peers ahead of need."""
        self._mesh.want(addresses)
        for peer, address in addresses.items():
            if peer != self.me:
                self._flows.meet(peer, address.encode())

    def _flow_broke(self, peer: str) -> None:
        """Break with a peer altogether, because one of the flows of blocks has broken."""
        connection = self._mesh.connection(peer)
        if connection is None:
            self._peer_broke(peer)
        else:
            self._mesh.drop(peer, connection)

    def _peer_broke(self, peer: str) -> None:
        """Report a broken connection to a worker, or a holder, of the newest known layout.

        A connection that breaks before that layout is entered will be missing in it.
        """
        self._flows.forget(peer)
        order = self.order
        if order is not None and peer in (*order.layout.workers, *order.holders):
            complaint = PeerBroken(generation=order.layout.generation, peer=peer)
            self._complaints.append(complaint)
            self.link.send(complaint)

    def _complain_again(self) -> None:
        """Report broken connections again, because a restarted keeper may not know of them."""
        for complaint in list(self._complaints):
            self.link.send(complaint)
