"""The step that a joining worker reproduces before it counts (`agent.keeper.admission`).

    hear(message, payload)   take in `Prove`, or `State` and `Redo` of `PROVING`; called on the
                             link's thread, with the crew's lock
    asked                    a question waits, so each wait for a layout goes to a boundary and
                             calls `load`
    load(replica)            at a boundary: take over the state that the step begins with
    going                    from then on until it is answered; no layout is entered meanwhile
    microbatch(phase)        in `backward`: the microbatch to compute and sample, if any
    sum(phase)               after that: the sum of the phase, to be applied, or `Abandoned`
    answer()                 at the next boundary: report the result to the keeper

A question is dropped when a newer one comes, because its connection is gone.
"""

import msgspec

from agent.proof.evidence import Evidence
from agent.protocol import Computed, Prove, Proved, Reached, Redo, State
from agent.replica import Replica
from agent.tensors.device import settle
from agent.worker.peers import PeerWorker
from agent.worker.state.shards import Stores
from agent.world import Abandoned

Payload = tuple[memoryview, bytes]


class _Question:
    def __init__(self, prove: Prove) -> None:
        self.prove = prove
        self.state: tuple[State, memoryview] | None = None
        self.sums: dict[int, Payload] = {}


class Proving:
    def __init__(self, crew: PeerWorker, stores: Stores) -> None:
        self._crew, self._stores = crew, stores
        self._heard: _Question | None = None
        self._begun: _Question | None = None
        self._computed: list[Computed] = []
        self._reached: list[Reached] = []

    # --- what arrives -----------------------------------------------------------------------------

    def hear(self, message: Prove | State | Redo, payload: memoryview) -> None:
        if isinstance(message, Prove):
            self._heard = _Question(message)
        elif self._heard is None:
            return
        elif isinstance(message, State):
            self._heard.state = (message, payload)
        else:
            self._heard.sums[message.step] = (payload, message.present)

    @property
    def asked(self) -> bool:
        return self._heard is not None and self._heard is not self._begun

    @property
    def going(self) -> bool:
        return self._begun is not None

    # --- what the script's thread does ------------------------------------------------------------

    def load(self, replica: Replica) -> None:
        """Take over the state of the newest question."""
        question = self._with_state()
        assert question.state is not None
        state, payload = question.state
        question.state = None
        gathered = self._stores.gathered(state, payload, self._crew.link)
        with self._crew.link.stuck.aided():
            settle(replica.space.device)
        replica.load(gathered, state.version)
        self._begun, self._computed = question, []
        self._reached = [self._evidence.look(whole=True)]

    def _with_state(self) -> _Question:
        def come() -> _Question | None:
            heard = self._heard
            return heard if heard is not None and heard.state is not None else None

        return self._crew.wait(come, interruptible=False)

    def microbatch(self, phase: int) -> int | None:
        if self._begun is None:
            return None
        asked = self._begun.prove.microbatches
        return asked[phase] if phase < len(asked) else None

    def sum(self, phase: int) -> Payload:
        """Return the sum of this phase; raise `Abandoned` after the last one asked for.

        Then the rest of the script's body counts for nothing.
        """
        question = self._begun
        assert question is not None
        prove, version = question.prove, question.prove.version + phase
        self._note(self.microbatch(phase))
        ends = phase + 1 >= len(prove.microbatches) and not prove.reaches
        if phase >= prove.commits or self._is_old(question) or ends:
            self.answer()
            raise Abandoned
        self._crew.wait(
            lambda: version in question.sums or self._is_old(question), interruptible=False
        )
        if version not in question.sums:
            self._begun = None
            raise Abandoned
        return question.sums.pop(version)

    def _note(self, microbatch: int | None) -> None:
        wanted = (one for one in self._evidence.computed if one.microbatch == microbatch)
        self._computed += wanted

    def answer(self) -> None:
        """Send the result to the keeper, unless the question is old and no answer is awaited."""
        question, self._begun = self._begun, None
        if question is None or self._is_old(question):
            return
        replica = self._crew.replica
        if replica.stage == "boundary" and question.prove.reaches:
            reached = self._evidence.look(whole=True)
            # What others had there was the state after the script's code between two loops.
            layers = () if replica.between else reached.layers
            self._reached.append(msgspec.structs.replace(reached, layers=layers))
        with self._crew.lock:
            self._forget(question)
        self._crew.link.send(
            Proved(
                version=question.prove.version,
                computed=tuple(self._computed),
                reached=tuple(self._reached),
            )
        )

    def _forget(self, question: _Question) -> None:
        if self._heard is question:
            self._heard = None

    @property
    def _evidence(self) -> Evidence:
        return self._crew.evidence

    def _is_old(self, question: _Question) -> bool:
        return self._heard is not question
