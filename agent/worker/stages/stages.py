"""The step in a layout of deep chains: from this worker's stages to the sum."""

import threading
from collections.abc import Callable, Sequence

import msgspec

from agent.errors import CannotRecord
from agent.net.mesh import Mesh
from agent.pipeline.stages.transport import MeshChannel
from agent.proof.turns import sampled
from agent.replica import Replica
from agent.sharded import separable
from agent.tensors.sums import Summed
from agent.worker.comparison import Comparison
from agent.worker.exchange.promise import Preparing
from agent.worker.peers import PeerWorker
from agent.worker.stages.pipeline_layout import Deep
from agent.worker.stages.pipeline_step import Chain, How, Whole
from agent.worker.state.handover import Handover

Played = tuple[Summed, tuple[int, ...]]  # the sum, and where the model is cut

SEVERAL = (
    "a step that calls session.backward(...) several times cannot be trained where each worker keeps its own layers only: "
    "take machines with room for the whole state, or train with depth 1"
)


class Stages:
    """The stages of one worker; what of them outlives a layout is in `deep`."""

    def __init__(
        self,
        crew: PeerWorker,
        mesh: Mesh,
        deep: Deep,
        handover: Handover,
        preparing: Preparing,
        comparison: Comparison,
    ) -> None:
        self._crew, self._mesh, self._deep = crew, mesh, deep
        self._handover, self._preparing, self._comparison = handover, preparing, comparison
        # Whether it was checked that the optimizers can update layers apart.
        self._apart = False

    def chain(self, step: int) -> Chain:
        """Return this worker's place in the layout, with the layers that it keeps there."""
        replica, layout = self._crew.replica, self._crew.layout
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
                replica.total_here,
                replica.scaler,
                replica.deterministic,
                self._crew.evidence.sample_stage,
            ),
            lambda: MeshChannel(
                self._mesh,
                self._crew.lock,
                layout.generation,
                device=replica.space.device,
                patience_s=threading.TIMEOUT_MAX / 2,  # the keeper ends the wait
                check=self._crew.go_on,
            ),
        )
        if chain.held is not None:
            self._try_apart(replica)
            with self._crew.unaided():
                self._handover.pull(chain.held)
            if not self._handover.having:  # no worker had a layer, and now each has its own
                self._handover.keep(self._deep.keepers())
        return chain

    def _try_apart(self, replica: Replica) -> None:
        """Refuse optimizers that need all gradients.

        From now on each worker may have only the gradients of its own layers.
        """
        if not self._apart:
            separable.refuse(replica.objects.values())
            separable.refuse_one_memory(replica.models)
            self._apart = True

    def play(self, step: int, batches: Sequence[object], check: Callable[[], None]) -> Played:
        """Compute this worker's stages, and sum them over all workers.

        `check` is called between the pieces of work.
        """
        replica, layout, chain = self._crew.replica, self._crew.layout, self.chain(step)
        mine = layout.replica_of(self._crew.me)
        shown = {sampled(mine.first, mine.count, replica.step)}
        # A snapshot may be asked for later in this step, and then a joining worker reproduces it.
        how = How(replica.seed_for, check, shown, thorough=True)
        if (other := self._comparison.of_other_chain()) is not None:
            # A microbatch that is computed twice shows how the chain rounds.
            aside = (*(() if chain.tried else shown), other)
            chain.compute_aside(f"{step}/aside", batches, msgspec.structs.replace(how, shown=aside))
            chain.tried = True
        summed = chain.play(step, batches, how)
        self._crew.link.microbatch_s = chain.busy_s
        if replica.notes is not None:
            chain.note(replica.notes)
        if chain.held is None:
            self._preparing.slice(step, summed.total)
        else:
            self._preparing.send(step, chain.slices())
        return summed, chain.cuts

    def reproduce(self, chain: Chain, step: int, microbatch: int) -> None:
        """Compute a microbatch of a committed step, together with the rest of the chain.

        It is computed twice, because that shows how the chain rounds. The keeper gets the result
        before the chain commits anything.
        """
        crew, replica = self._crew, self._crew.replica
        how = How(replica.seed_for, crew.go_on, (microbatch,), thorough=True)
        for name in ("once", "again"):
            chain.compute_aside(f"{step}/{name}", replica.recorder.microbatches, how)
        crew.reproduced = crew.evidence.computed
