"""The graphs of what a script's `loss_of` computes, and when they are recorded again.

Every step looks at what the function closes over (`closed_over`); if that changed, the function is
recorded again. Other changes show only when the function is recorded once more and compared. That
happens where a layout begins, in the step after that, and then ever more seldom, so that it takes
next to no time.
"""

import time
from collections.abc import Callable, Sequence

import msgspec
import torch

from agent.errors import CannotRecord, Misuse
from agent.pipeline.tracing.closures.closure import Closure, closed_over
from agent.pipeline.tracing.graphs import Recording, Told, nobody
from agent.pipeline.tracing.loss import record_loss, same_graph
from agent.pipeline.tracing.recording.loss_value import LossOf
from agent.pipeline.tracing.recording.trace import Filled, trained

# Odd, because what alternates from step to step would look unchanged otherwise.
FAR = 63
# The share of the time that comparing may take.
SHARE = 1 / 512
ENTRIES_MAX = 8
WAY = (
    "what loss_of reads changes from step to step where nobody sees it (an environment variable, an array that is "
    "written to): put it into the microbatches, or hand it to loss_of as an argument of a functools.partial"
)


class _Entry:
    """A recording, and the last versions in which it was right and used."""

    def __init__(self, recording: Recording, version: int) -> None:
        self.recording = recording
        # The last version in which it was right, and the last in which it was used.
        self.right = self.used = version
        self.wait = 1
        self.rested_s = 0.0


class Recorder:
    def __init__(
        self,
        model: Callable[[], torch.nn.Module],
        models: Sequence[torch.nn.Module],
        scaler: torch.amp.GradScaler | None,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model, self._scaler, self._clock_s = model, scaler, clock_s
        self._filled = Filled(models)
        self._entries: list[_Entry] = []
        self._loss_of: LossOf | None = None
        self.microbatches: Sequence[object] = ()
        self._version = 0

    def asked(self, version: int, loss_of: LossOf, microbatches: Sequence[object]) -> None:
        """Note what a call of `backward`, which begins now, is to compute."""
        self._version, self._loss_of, self.microbatches = version, loss_of, microbatches

    def computing(self, role: object) -> None:
        """Note that forwards begin; what they put into attributes of modules is not recorded."""
        self._filled.begin(role)

    def computed(self) -> None:
        self._filled.look()

    def recording(self, told: Told = nobody) -> Recording:
        """Return the graph of `loss_of`; `CannotRecord` says in a line why there is none."""
        return self._entry(told).recording

    def to_play(self, told: Told = nobody, *, entered: bool) -> Recording:
        """Return the recording, compared with the function if that is due.

        `entered` says that this is the first step of a layout.
        """
        self._filled.empty()
        entry = self._entry(told)
        if not self._is_right(entry, entered=entered):
            self._entries.remove(entry)
            entry = self._entry(told)
        return entry.recording

    def adopt(self, recording: Recording) -> None:
        """Use a recording of the same function that begins with another worker's microbatch."""
        self._entries[0].recording = recording

    def _entry(self, told: Told) -> _Entry:
        loss_of = self._loss_of
        if loss_of is None:
            raise Misuse(
                "there is nothing to record before session.backward(loss_of, ...) is called"
            )
        now = closed_over(loss_of)
        which = trained(self._model())
        fitting = (each for each in self._entries if each.recording.trained == which)
        found = next((each for each in fitting if not each.recording.closure.changed(now)), None)
        if found is None:
            found = _Entry(self._record(loss_of, told, now), self._version)
        self._entries = [found, *(each for each in self._entries if each is not found)][
            :ENTRIES_MAX
        ]
        return found

    def _record(self, loss_of: LossOf, told: Told, now: Closure) -> Recording:
        """Record the function, on the example of an earlier recording if there is one.

        With the same example only a change of the function can make another graph.
        """
        before = [
            each.recording for each in self._entries if each.recording.closure.of_same_function(now)
        ]
        microbatches = self.microbatches
        if before and before[0].fixed:
            known = before[0].form.filled(before[0].example, whole=True)
            microbatches = [known, microbatches[0]]
        found = record_loss(
            self._model(), loss_of, microbatches, self._scaler, told, self._filled.empty
        )
        for each in before:
            if found.same_as(each):
                # Stages that were built for the same graph stay in use.
                found = found.begun_with(each.variants.first)
                break
        because = before[0].closure.changed(now) if before else ""
        return msgspec.structs.replace(found, because=because)

    def _is_right(self, entry: _Entry, *, entered: bool) -> bool:
        """Return whether the recording still holds; if not, the function is recorded again.

        All workers check that in the first step of their layout.
        """
        version = self._version
        before, entry.used = entry.used, version
        if version < entry.right:
            # This worker was sent back.
            return False
        since = version - entry.right
        if since < (1 if entered else entry.wait):
            return True
        began_s = self._clock_s()
        if entry.wait == FAR and began_s < entry.rested_s and not entered:
            return True
        if self._still_computes(entry):
            entry.right, entry.wait = version, min(2 * entry.wait, FAR)
            ended_s = self._clock_s()
            entry.rested_s = ended_s + (ended_s - began_s) / SHARE
            return True
        if before > entry.right:
            raise Misuse(
                f"loss_of computes something else than {version - entry.right} commits ago, and steps between may "
                f"have been computed as that one: {WAY}"
            )
        if not entered:
            entry.used = before
            raise CannotRecord(f"loss_of computes something else than in the step before: {WAY}")
        return False

    def _still_computes(self, entry: _Entry) -> bool:
        assert self._loss_of is not None
        self._filled.empty()
        recording = entry.recording
        right = same_graph(recording, self._model(), self._loss_of, self._scaler)
        # What the function changed itself while it was recorded is no reason to record it again.
        closure = recording.closure.settled(closed_over(self._loss_of))
        if closure is not recording.closure:
            entry.recording = msgspec.structs.replace(recording, closure=closure)
        return right
