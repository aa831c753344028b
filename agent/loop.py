"""The script's loop over its steps: what happens between, before and after them.

arrive     come to the boundary of the next step, with the state that all workers go on from
one_step   the script's body of one step
backward   a phase in it: see `agent.step`
"""

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from agent.checks.graph import Outside
from agent.checks.optimizers import Optimizers
from agent.checks.process import OwnProcess
from agent.checks.registry import Registered
from agent.data.data import Data
from agent.errors import Misuse, WireError
from agent.replica import BEFORE, BETWEEN, Replica
from agent.step import VOID, LossOf, Result, Step, check_call
from agent.world import Abandoned, Facts, World

SENT_BACK = "others were lost with what only they had, and a loop that is left does no step again"

ONCE = (
    "the data of session.data(...) is gone through inside `for epoch in session.epochs(n)`, once per epoch; with "
    "session.steps(n) use data.at(step); validate with a plain DataLoader"
)


class Loop:
    """The loop of a session, or its loops, one after the other, with `total` turns together."""

    def __init__(
        self,
        world: World,
        replica: Replica,
        registered: Registered,
        microbatches: int,
        process: OwnProcess,
        total: int = 0,
    ) -> None:
        self.world, self.replica, self._registered = world, replica, registered
        self._process = process
        self.microbatches = microbatches or world.microbatches
        self.facts = Facts(0, 0)
        # The turns before the present loop, and those up to its end, of all that there are.
        self._first, self._turns, self._total = 0, 0, total
        # The epoch that the script is in, and its length, in a loop over epochs.
        self._epoch, self._length = 0, 0
        self._given = 0  # the length that the script's data has; see `_cut`
        self.data: list[Data] = []
        self._optimizers = Optimizers(
            replica.objects,
            replica.space.params,
            lambda: replica.turn,
        )
        models = registered.models.values()
        self._outside = Outside({id(p) for model in models for p in model.parameters()})
        # Made as soon as the number of microbatches is known.
        self._step: Step | None = None
        # Whether the other workers know of this session.
        self._bound = False
        self._result = VOID

    @property
    def seed(self) -> int:
        return self.replica.seed

    @property
    def passed_over(self) -> bool:
        """Whether the loop begun last had no step to do, because a rehearsal was over before it."""
        return self.replica.stage == "over" and self._first > 0 and self.replica.turn <= self._first

    def begin(self, count: int) -> None:
        """Begin a loop of `count` turns."""
        self._process.check()
        if self.replica.stage == "made":
            self.replica.form.check(0)
            self._total = self._total or count
            steps = min(self._total, self.world.stop_at or self._total)
            self.facts = Facts(self.microbatches, steps)
        if self._turns + count > self._total:
            raise Misuse(
                f"session.steps() or epochs() was called for {self._turns + count} steps, and the job has {self._total}: for "
                "loops one after the other say how many steps all of them have together, Session(..., "
                f"steps={self._turns + count}), and give it all that any of them trains with"
            )
        if self.replica.turn < self._turns and self.replica.stage != "over":
            raise Misuse(
                f"step {self.replica.turn}: the script left its loop here, {self._turns - self.replica.turn} steps before its end, "
                "and begins another, which a worker that joins later could not know: go through all steps of a loop, and leave "
                "out in each what is over"
            )
        self._first, self._turns, self._length = self._turns, self._turns + count, 0
        self._close_data()  # of the loop before; what goes on is fetched ahead again
        self.world.output.begin()
        self.replica.own_values.begin_loop(sys._getframe())

    def steps(self, total: int) -> Iterator[int]:
        """Go through the steps that are still to do."""
        self.begin(total)
        while self.arrive():
            yield from self._one_step(self._first)
        self.replica.own_values.end_loop()

    def epochs(self, count: int, length: int) -> Iterator[int]:
        """Go through the epochs that are still to do, each of `length` steps."""
        given, length = length, self._cut(count, length)
        self.begin(count * length)
        self._length, self._given = length, given
        while self.arrive():
            first = self._first
            epoch, place = divmod(self.replica.turn - first, length)
            self._epoch = epoch
            if place:
                # The script's code at the start of this epoch was done already, with these numbers.
                self._set_aside(comes_in=True, to_epoch=True)
                self.replica.seed_for(BEFORE, first + epoch * length)
            else:
                self.replica.groups.begin_epoch()
            yield epoch
            end = first + (epoch + 1) * length
            through = self.replica.stage == "open" and self.replica.turn == end
            if not through and self.replica.stage not in ("ended", "aside", "over"):
                raise Misuse(
                    f"epoch {epoch}: the loop over what session.data(...) or session.each(...) gives was left in step "
                    f"{self.replica.turn}, or goes through something else, as a plain DataLoader; go through all of it, or leave "
                    "the loop over session.epochs(...) as well; for an epoch of n samples, session.data(..., order=lambda epoch: range(n))"
                )
        self.replica.own_values.end_loop()

    def _cut(self, count: int, length: int) -> int:
        """Shorten the epochs of a rehearsal, so that it tries what a script does at their ends."""
        stop_at = self.world.stop_at
        return min(length, -(-stop_at // min(count, 2))) if stop_at and count else length

    def steps_of_epoch(self, length: int) -> Iterator[int]:
        """Go through the steps of the epoch that the loop over `epochs` is in.

        They are counted from the beginning of that loop.
        """
        self._take_up()
        length = self._length if length == self._given else length
        first = self._first
        turn = self.replica.turn - first
        again = length == self._length and turn // length != self._epoch
        if self.replica.stage != "open" or again:
            raise Misuse(ONCE)
        epoch, begins = turn // length, turn % length == 0
        while True:
            turn = self.replica.turn
            yield from self._one_step(first)
            # A script that takes one item only has not gone through anything.
            self._check_way(turn, length)
            # The next boundary comes after what the script does at the end of its epoch.
            if (self.replica.turn - first) % length == 0:
                return
            output, begun = self.world.output, first + epoch * length
            output.within = range(begun + 1, begun + length)
            self.replica.keeps_own = begins and self._may_go_back
            begins = begins and self.replica.stage == "open"  # the turn trained nothing
            arrived = self.arrive()
            self.replica.keeps_own, output.within = False, None
            if not arrived:
                return
            now, place = divmod(self.replica.turn - first, length)
            if now != epoch or not place:
                # The script ends its epoch on the state here, and gets its own back at the next
                # one; or at the start of the same one, which that state is from before.
                self._set_aside()
                return

    def _check_way(self, turn: int, length: int) -> None:
        """Refuse a loop that has ended `turn` if the epoch goes by something else."""
        if not self._length:
            raise Misuse(ONCE)
        if length != self._length:
            raise Misuse(
                f"step {turn}: the script goes through {length} steps, and an epoch has {self._length}: give what it goes "
                "through to session.epochs(n, mine); validate with a plain DataLoader, and take batches of a second data "
                "set by data.at(session.step)"
            )
        if self.replica.turn != turn + 1:
            raise Misuse(
                f"step {turn}: two loops go through the epoch at once; go through one of them, and take batches of the "
                "other data set by data.at(session.step)"
            )

    def backward(self, loss_of: LossOf, microbatches: Sequence[Any]) -> Result:
        """Do one phase of the step; let it run out if the job has gone on without this worker."""
        replica = self.replica
        self._process.check()
        check_call(replica, loss_of, microbatches, self.microbatches)
        # In a step that the job went on without, no call counts.
        astray = replica.astray
        if replica.stage == "summed":
            replica.version, replica.phase = replica.version + 1, replica.phase + 1
        step = self._know(len(microbatches))
        if replica.phase == 0 and not astray:
            # Before the first step gets a state of others, which is no change of the script.
            self._check_early()
        prior = step.prior()
        if astray or not (self._bound or self._bind()):
            self._result = step.blank()
        else:
            try:
                self._result = step.run(loss_of, microbatches, prior)
            except Abandoned:
                self._result = step.blank()
        self.world.settle()
        replica.stage = "summed"
        return self._result

    def _check_early(self) -> None:
        replica = self.replica
        if changed := replica.changed_since(self._kept_versions):
            raise Misuse(f"step {replica.turn}: {replica.still.what_early(changed)}")

    # --- one step ---------------------------------------------------------------------------------

    def arrive(self) -> bool:
        """Come to the start of a step; return False if there is none in this loop."""
        self._process.check()
        replica = self.replica
        replica.between = False
        if replica.stage == "aside":
            self._take_up()
        elif replica.stage in ("open", "ended") and self._at_end and not self._stays():
            # What comes between two loops changes the script's objects as a step does.
            replica.seed_for(BETWEEN, self._turns)
            return False
        elif replica.stage == "open" and replica.turn < self._turns:
            replica.seed_for(BEFORE)
        elif not self._leave_turn():
            return False
        if replica.turn < self._first:
            raise WireError(SENT_BACK)
        if replica.turn < self._turns:
            return True
        # The job is in a later loop, and the script comes to it with the state that it has there.
        self._set_aside(comes_in=True)
        replica.seed_for(BETWEEN, self._turns)
        return False

    def _leave_turn(self) -> bool:
        """Come from the end of a turn to the next boundary; return False if there is none."""
        stage = self.replica.stage
        if stage == "open":
            self._leave_open()
        over = stage == "over" or (stage == "open" and self._finished())
        return not over and self._next_step()

    def _stays(self) -> bool:
        """Whether this worker must not leave its loop yet, at whose end it is."""
        ended = self.replica.stage == "ended"
        self.replica.between = ended and self.world.proves
        return ended and self._may_go_back

    @property
    def _may_go_back(self) -> bool:
        """Whether this worker may be given the state before the step that it has done.

        It has reproduced that step, or the job has gone on without it.
        """
        return self.world.proves or self.replica.astray

    @property
    def _at_end(self) -> bool:
        """Whether the script has done all of this loop, and another one comes."""
        replica = self.replica
        to_come = self._turns < self._total and replica.step < self.facts.steps_total
        return to_come and replica.turn == self._turns

    def _one_step(self, first: int) -> Iterator[int]:
        """Let the script do its body of one step, counted from `first`."""
        try:
            yield self.replica.turn - first
        finally:
            # A script that leaves its loop here may do with its model what it likes.
            self.world.settle()
        self._end_step()

    def _next_step(self) -> bool:
        """Come to the boundary of the next step; return False if there is none."""
        replica = self.replica
        self._close_step()
        while True:
            replica.begin_boundary()
            if self.microbatches:
                self._know(self.microbatches)
                self._bound = True
                self.world.boundary(replica, self.facts)
                replica.forget_arena()
            if replica.turn < self._total and replica.step < self.facts.steps_total:
                break
            replica.stage = "over"
            replica.drop_collected()
            self._show_state()
            if self._finished():
                return False
        self._show_state()
        self._open()
        return True

    def _show_state(self) -> None:
        """Report the script's state, which others can compare with theirs."""
        if self._step is None:
            return
        evidence, shown = self._step.evidence, self.world.state_shown
        if shown == "nothing":
            evidence.pass_over()
        else:
            evidence.look_beside(self.world.arrived, whole=shown == "all")
            if self.replica.stage == "over":
                evidence.settle()

    def _open(self) -> None:
        """Begin the script's step."""
        replica = self.replica
        self._kept_versions = replica.collected().versions()
        turn = replica.turn - self._first
        begins = self._length and turn % self._length == 0
        replica.still.open(turn // self._length if begins else replica.step)
        replica.seed_for(BEFORE)
        replica.stage = "open"

    def _end_step(self) -> None:
        """End a step; a turn of the loop that trained nothing belongs to the step after it."""
        replica = self.replica
        if replica.stage == "open" and not replica.astray:
            if changed := replica.changed_since(self._kept_versions):
                raise Misuse(
                    f"step {replica.turn} changed the model or the optimizer without session.backward(loss_of, "
                    "microbatches), where the gradients of all workers are summed; what changes them belongs after it, "
                    f"in the same step. It was {changed!r}"
                )
            replica.idle += 1
            return
        replica.version, replica.step, replica.played = replica.version + 1, replica.step + 1, True
        replica.drop_collected()
        replica.stage = "ended"

    def _close_step(self) -> None:
        """Check and end a finished step, after the script's code at the end of an epoch."""
        replica = self.replica
        if replica.stage == "ended":
            step = replica.turn - 1
            self._registered.check(step)
            self._outside.check(step)
            self.world.end_step(step)

    def _set_aside(self, *, comes_in: bool = False, to_epoch: bool = False) -> None:
        """Put the state aside; what the script does until `_take_up` counts for nothing.

        The script is not where the job is.
        """
        self.world.settle()
        self.replica.set_aside(comes_in=comes_in, to_epoch=to_epoch)

    def _take_up(self) -> None:
        if self.replica.stage == "aside":
            self.replica.take_up()
            self.world.output.take_up()
            self._open()

    # --- the others -------------------------------------------------------------------------------

    def _know(self, microbatches: int) -> Step:
        """Take note of how many microbatches a step has, and return the steps' `Step`."""
        if self._step is None:
            self.microbatches = microbatches
            self.facts = msgspec.structs.replace(self.facts, microbatches=microbatches)
            self._step = Step(
                self.world,
                self.replica,
                self._optimizers,
                self._outside,
                microbatches=microbatches,
                bound=lambda: self._turns - (self._first if self._length else 0),
            )
            self.world.evidence = self._step.evidence
        return self._step

    def _bind(self) -> bool:
        """Join the others from within the first step; return False if they are past it."""
        self._bound = True
        return self.world.bind(self.replica, self.facts)

    def close(self) -> None:
        """End with the script; if it left its loop early, its present state is the final one."""
        replica = self.replica
        if replica.stage == "made":
            raise Misuse("the script made a session, but never looped over session.steps(...)")
        if replica.stage == "computing":
            raise Misuse(f"the script ended in the middle of step {replica.turn}")
        if replica.stage == "summed":
            self._end_step()
        if replica.stage in ("open", "ended"):
            self._leave_open()
            self.leave()

    def _leave_open(self) -> None:
        """Leave the loop where the script stands, within a step or after one."""
        replica = self.replica
        if self._step is None or (replica.idle and not replica.step):
            raise Misuse("the loop ended, and no step of it called session.backward(...)")
        self._close_step()
        replica.holdings.give_back()
        replica.drop_collected()

    def leave(self) -> None:
        """End before the last step, with the present version, as the script or the others have."""
        if not self._finished():
            raise WireError(SENT_BACK)

    def _finished(self) -> bool:
        self.replica.stage, self.replica.phase = "over", 0
        if not self.world.finish(self.replica, self.facts):
            return False
        self._optimizers.close()
        self._close_data()
        return True

    def _close_data(self) -> None:
        for data in self.data:
            data.close()
