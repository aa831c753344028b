"""What a worker shows of a step, and which microbatch of another worker it repeats."""

from collections.abc import Sequence

from agent.layout import Replica as Chained
from agent.proof.turns import Shown, is_shown, sampled, turn_of
from agent.worker.peers import PeerWorker
from agent.worker.proof.reproduction import Proving


class Comparison:
    """The choices of one worker, the same on all as they follow from step and layout."""

    def __init__(self, crew: PeerWorker, proving: Proving) -> None:
        self._crew, self._proving = crew, proving
        self.proven_from = -2
        """The step after the newest snapshot, which joining workers reproduce."""
        self.joins = False
        """Whether this worker was in no commit since it got its state."""

    @property
    def state_shown(self) -> Shown:
        replica, begun = self._crew.replica, self.proven_from
        if self._proving.going or replica.stage == "over" or replica.step in (begun, begun + 1):
            return "all"
        return "some" if self._shows_some else "nothing"

    @property
    def batch_shown(self) -> Shown:
        if self._proving.going or self._crew.replica.step == self.proven_from:
            return "all"
        return "some" if self._shows_some else "nothing"

    @property
    def _shows_some(self) -> bool:
        """Whether some of this step is shown although it is not a step that is always shown.

        That holds for the first step in a layout, and for steps with a microbatch computed twice.
        """
        replica, entered = self._crew.replica, self._crew.entered
        if entered is None or entered.version == replica.version or is_shown(replica.step):
            return True
        counts = [each.count for each in entered.layout.replicas if each.count]
        return len(counts) > 1 and turn_of(replica.step, counts[-1]) is not None

    @property
    def twice(self) -> int | None:
        """A microbatch of another worker that this one computes as well, for comparison.

        They are compared before the commit. A joining worker does so in its first step, because its
        proof may be of a step long ago. In that step one of the other workers repeats a microbatch
        of the first joining worker. Else the first and the last worker do it in turn. Only one of
        them does, because a script that counts microbatches then counts differently on that worker,
        which shows.
        """
        layout, entered, me = self._crew.layout, self._crew.entered, self._crew.me
        assert entered is not None
        if layout.depth > 1 or layout.width == 1:
            return None
        replicas = [each for each in layout.replicas if each.count]
        version, step = self._crew.replica.version, self._crew.replica.step
        inside = [each for each in replicas if each.workers[0] in entered.holders]
        joining = [each for each in replicas if each not in inside]
        if self.joins:
            return sampled(inside[0].first, inside[0].count, step) if inside else None
        if inside and joining and version == entered.version:
            return joining[0].first if inside[0].workers[0] == me else None
        return self._in_turn(replicas, replicas[-1].count)

    def of_other_chain(self) -> int | None:
        """Return a microbatch of another chain that this one computes as well, for comparison.

        They are compared before the commit. If a worker has proven nothing yet, each chain does so
        for the next, so every stage is compared with the same stage of others. A microbatch goes
        through a chain alone, so the longer the chains are, the more rarely this is done.
        """
        layout, entered = self._crew.layout, self._crew.entered
        replica = self._crew.replica
        assert entered is not None
        replicas = layout.replicas
        if entered.unproven and replica.version == entered.version and len(replicas) > 1:
            after = replicas[(replicas.index(layout.replica_of(self._crew.me)) + 1) % len(replicas)]
            return sampled(after.first, after.count, replica.step)
        return self._in_turn(replicas, replicas[-1].count // layout.depth)

    def _in_turn(self, replicas: Sequence[Chained], count: int) -> int | None:
        """Return a microbatch of the first or last replica for the other of them to compute.

        They take turns, once in so many of their microbatches. Return None for every other replica.
        """
        step = self._crew.replica.step
        turn = turn_of(step, count)
        if turn is None or len(replicas) == 1:
            return None
        asks, asked = (replicas[0], replicas[-1]) if turn % 2 else (replicas[-1], replicas[0])
        return sampled(asked.first, asked.count, step) if self._crew.me in asks.workers else None
