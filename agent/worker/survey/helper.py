"""Workers that would wait for the leader's measurement of the model, and measure with it.

    the leader of a layout                          another worker
    Call   what, for which kind of machine    ->    records its own loop, on such a machine
                                              <-    asks for work; later: sends results, asks on
    Work   a task, and where to cut           ->    measures
    Over                                      ->    goes on with its step

In a layout whose workers are to find out (`Enter.record`) each begins its first share here, and the
leader says `SurveyOver` to each in any case. Nothing else is waited for: the leader measures itself what
does not come, and a newer layout ends every wait. A worker whose machine is of a different kind
goes on at once, since a profile is of one kind.

Every word has the same tag, so a later word replaces an earlier one, which is not needed any more.
"""

import threading
from contextlib import suppress

import msgspec

from agent.calibration import measurement
from agent.calibration.assignment import Alone, Board, Round
from agent.calibration.calibrate import CalibrationPlan
from agent.calibration.section_times import Needless, Patience
from agent.faults import passing
from agent.net.mesh import ASK
from agent.protocol import Part
from agent.worker.peers import PeerWorker
from agent.world import Interrupted

WORD = "survey"
ASKED = f"{ASK}/{WORD}"
HELPERS_MAX = 16


class Call(msgspec.Struct, frozen=True, tag=True):
    instance_type: str
    key: str  # see `agent.calibration.calibrate.key_of`


class HelperWork(msgspec.Struct, frozen=True, tag=True):
    task: int
    plan: CalibrationPlan


class SurveyOver(msgspec.Struct, frozen=True, tag=True):
    pass


Word = Call | HelperWork | SurveyOver
Found = Round | Alone | None
_decode = msgspec.msgpack.Decoder(Word).decode
_decode_found = msgspec.msgpack.Decoder(Found).decode


class Helpers:
    """The helpers, as the leader sees them; threads of the mesh answer their questions."""

    def __init__(self, crew: PeerWorker) -> None:
        self._crew = crew
        self.waiting = False  # whether the workers of the layout wait for a word
        self._lock = threading.Lock()
        self._early: list[str] | None = None  # workers that asked before there was a task
        self._desk: tuple[CalibrationPlan, Board, Patience] | None = None

    def call(self, instance_type: str, key: str) -> None:
        if not self.waiting:
            return
        with self._lock:
            self._early, self._desk = [], None
        for peer in self._peers()[:HELPERS_MAX]:
            self._say(peer, Call(instance_type, key))

    def open(self, plan: CalibrationPlan, board: Board) -> None:
        """Give tasks to the workers that were called."""
        if not self.waiting:
            return
        with self._lock:
            early, self._early = self._early or [], None
            self._desk = plan, board, Patience(lambda: None, plan.limit_s)
        for peer in early:
            self._say(peer, self._next(peer, None))

    def dismiss(self) -> None:
        if not self.waiting:
            return
        with self._lock:
            self._early, self._desk = None, None
        for peer in self._peers():
            self._say(peer, SurveyOver())
        self.waiting = False

    def answer(self, peer: str, part: Part) -> None:
        with self._lock:
            if self._early is not None:
                self._early.append(peer)
                return
        found = _decode_found(part.extra)
        with suppress(Interrupted):  # then the asking worker is interrupted too
            self._say(peer, self._next(peer, found), part)

    def _next(self, peer: str, found: Found) -> Word:
        with self._lock:
            desk = self._desk
        if desk is None:
            return SurveyOver()
        plan, board, patience = desk
        if found is not None:
            board.put(found)
        task = None if patience.left_s < 0 else board.take(peer)
        if task is None:
            return SurveyOver()
        return HelperWork(task, msgspec.structs.replace(plan, limit_s=patience.left_s))

    def _peers(self) -> list[str]:
        return [worker for worker in self._crew.layout.workers if worker != self._crew.me]

    def _say(self, peer: str, word: Word, asked: Part | None = None) -> None:
        entered = self._crew.entered
        assert entered is not None
        part = Part(
            generation=entered.layout.generation if asked is None else asked.generation,
            step=entered.version if asked is None else asked.step,
            tag=WORD,
            extra=msgspec.msgpack.encode(word),
        )
        self._crew.send(peer, part, [])


class Helping:
    """A worker that helps the leader of its layout."""

    def __init__(self, crew: PeerWorker) -> None:
        entered = crew.entered
        assert entered is not None
        self._crew, self._leader = crew, entered.layout.workers[0]
        self._step = entered.version  # the step that the whole layout begins with
        self.able = False

    def help(self) -> None:
        """Measure until there is no task left."""
        word = self._hear()
        kind = measurement.machine_kind(self._crew.replica.space.device)
        if not isinstance(word, Call) or word.instance_type != kind:
            return
        passing("survey: called")
        recording = self._crew.replica.recorder.recording()
        replica = self._crew.replica
        if measurement.key_of(recording, self._crew.code, replica.adding) != word.key:
            return
        self.able = True
        word = self._ask(None)
        if not isinstance(word, HelperWork):
            return
        patience = Patience(self._crew.go_on, word.plan.limit_s)
        patience.needless = self._heard
        with measurement.gauging(recording, word.plan, patience) as gauge:
            while isinstance(word, HelperWork):
                try:
                    found = gauge.do(word.task)
                except Needless:
                    word = self._hear()
                else:
                    word = self._ask(found)
                    passing("survey: part sent")

    def _heard(self) -> bool:
        return self._crew.has(self._leader, self._step, WORD)

    def _hear(self) -> Word:
        extra, _ = self._crew.take(self._leader, self._step, WORD)
        word: Word = _decode(extra)
        return word

    def _ask(self, found: Found) -> Word:
        part = Part(
            generation=self._crew.generation,
            step=self._step,
            tag=ASKED,
            extra=msgspec.msgpack.encode(found),
        )
        self._crew.send(self._leader, part, [])
        return self._hear()
