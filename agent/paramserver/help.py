"""Help: a worker that is late gives the end of its work away, and early workers do it.

Of every piece exactly one result counts, because the helpee says which batch holds it, and only
batches that are named count. So a cancel that crosses its helper's start wastes work at worst.
"""

from typing import NamedTuple

from agent.paramserver.messages import (
    Begun,
    Cancel,
    CancelAck,
    Completed,
    Done,
    DoThis,
    Message,
    Out,
    Progress,
    Span,
)

SMOOTHING = 0.3  # of a worker's own time for a clock


class Settings(NamedTuple):
    """The defaults of the FlexRR table; shares are of a worker's work in one clock."""

    size: int = 4  # of a helper group; 0 is without help
    first: float = 0.025
    next: float = 0.05
    trigger: float = 0.20
    checkpoints: tuple[float, ...] = (0.75,)


class Piece:
    """A piece that was given away."""

    def __init__(self, number: int, helper: str, spans: list[Span], clock: int) -> None:
        self.number, self.helper, self.spans, self.clock = number, helper, spans, clock
        self.begun = self.cancelled = self.refused = False
        self.done: list[Done] | None = None
        self.measured = 0.0


class Tail:
    """The own work of one clock that is not begun: taken from the front, cut from the end."""

    def __init__(self, clock: int, spans: list[Span]) -> None:
        self.clock, self.spans = clock, spans
        self.total = sum(span.last - span.first for span in spans)

    @property
    def left(self) -> int:
        return sum(span.last - span.first for span in self.spans)

    @property
    def share(self) -> float:
        """Return how much of the work is done or given away."""
        return 1 - self.left / self.total if self.total else 1.0

    def advance(self, grains: int) -> None:
        span = self.spans[0]
        rest = Span(span.block, span.first + grains, span.last)
        self.spans[:1] = [rest] if rest.first < rest.last else []

    def cut(self, grains: int) -> list[Span]:
        """Take so many grains from the end."""
        found: list[Span] = []
        while grains and self.spans:
            span = self.spans.pop()
            first = max(span.first, span.last - grains)
            grains -= span.last - first
            found.insert(0, Span(span.block, first, span.last))
            if first > span.first:
                self.spans.append(Span(span.block, span.first, first))
        return found


class Helpee:
    """The side of whoever is late."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.helpers: list[str] = []
        self.pieces: dict[int, Piece] = {}
        self._serial = 0
        self.usual_s = 0.0  # own time for a clock, smoothed
        self.total_given = 0  # grains

    def learn(self, own_s: float) -> None:
        before = self.usual_s or own_s
        self.usual_s = before + SMOOTHING * (own_s - before)

    def difference(self, message: Progress, tail: Tail, now_s: float, usual_s: float) -> float:
        """Return how many clocks this worker is behind a reporter (algorithm 1)."""
        done = message.clock + message.share - (tail.clock + tail.share)
        return done + (now_s - message.time_s) / usual_s if usual_s else done

    def heard(
        self, helper: str, message: Progress, tail: Tail | None, now_s: float, first_s: float
    ) -> Out:
        """Answer a report; `first_s` is what a clock seems to take, before one is done."""
        if tail is None or helper not in self.helpers:
            return []
        usual_s = self.usual_s or first_s
        if self.difference(message, tail, now_s, usual_s) <= self._settings.trigger:
            return []
        return self._give(helper, tail, self._settings.first, now_s)

    def begun(self, message: Begun, tail: Tail | None, now_s: float) -> Out:
        piece = self.pieces.get(message.piece)
        if piece is None or piece.refused:
            return []
        piece.begun = True
        if tail is None or piece.cancelled:
            return []
        return self._give(piece.helper, tail, self._settings.next, now_s)

    def _give(self, helper: str, tail: Tail, share: float, now_s: float) -> Out:
        size = max(1, round(share * tail.total))
        if tail.left <= size:
            return []  # what is left is done sooner than it is handed over
        spans = tail.cut(size)
        self._serial += 1
        self.pieces[self._serial] = Piece(self._serial, helper, spans, tail.clock)
        self.total_given += sum(span.last - span.first for span in spans)
        order = DoThis(piece=self._serial, clock=tail.clock, spans=spans, time_s=now_s)
        return [(helper, order)]

    def cancel(self) -> Out:
        """Take back what nobody has begun, because the own work is done."""
        out: Out = []
        for piece in self.pieces.values():
            if not piece.begun and not piece.cancelled:
                piece.cancelled = True
                out.append((piece.helper, Cancel(clock=piece.clock, pieces=[piece.number])))
        return out

    def acknowledged(self, message: CancelAck) -> None:
        piece = self.pieces.get(message.piece)
        if piece is None or piece.refused:
            return
        piece.begun, piece.refused = message.begun, not message.begun

    def completed(self, message: Completed) -> None:
        piece = self.pieces.get(message.piece)
        if piece is not None and not piece.refused:
            piece.begun, piece.done, piece.measured = True, message.done, message.measured

    def forget(self, helper: str) -> None:
        """Take back what a helper had that is gone, if it has not completed it."""
        self.helpers = [name for name in self.helpers if name != helper]
        for piece in self.pieces.values():
            if piece.helper == helper and piece.done is None:
                piece.cancelled = piece.refused = True
                piece.begun = False

    def to_redo(self) -> list[Piece]:
        return [one for one in self.pieces.values() if one.cancelled and not one.begun]


class Order(NamedTuple):
    """A piece of somebody else's."""

    helpee: str
    piece: int
    clock: int
    spans: list[Span]


class Helper:
    """The side of whoever is early."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.helpees: list[str] = []
        self._waiting: list[Order] = []
        self._refused: dict[tuple[str, int], int] = {}  # by helpee and piece: the clock
        self._begun: dict[tuple[str, int], int] = {}
        self._closed = -1
        self._reported = 0
        self.total_reports = 0

    def report(self, tail: Tail, now_s: float) -> Out:
        """Return the reports that are due."""
        out: Out = []
        marks = self._settings.checkpoints if self._settings.size else ()
        while self._reported < len(marks) and tail.share >= marks[self._reported] - 1e-9:
            self._reported += 1
            self.total_reports += len(self.helpees)
            message = Progress(clock=tail.clock, share=tail.share, time_s=now_s)
            out += [(helpee, message) for helpee in self.helpees]
        return out

    def until_report(self, tail: Tail) -> int:
        """Return how many grains there are up to the next report."""
        marks = self._settings.checkpoints if self._settings.size and self.helpees else ()
        if self._reported >= len(marks):
            return tail.left
        left_then = int((1 - marks[self._reported]) * tail.total + 1e-9)
        return max(1, tail.left - left_then)

    def new_clock(self) -> None:
        self._reported = 0

    def asked(self, helpee: str, message: DoThis, clock: int, held: set[int]) -> None:
        """Keep an order unless it is cancelled, newer than our clock, closed, or of data not held."""
        order = Order(helpee, message.piece, message.clock, message.spans)
        if (helpee, message.piece) in self._refused or not self._closed < message.clock <= clock:
            return
        if all(span.block in held for span in message.spans):
            self._waiting.append(order)

    def next(self, clock: int, own_done: bool, newest: int) -> Order | None:
        """Return what to do now (algorithm 2), if anything; the caller says that it has begun.

        Of `newest` and older clocks the rows here are fresh enough.
        """
        for order in self._waiting:
            if order.clock <= newest and (order.clock < clock or own_done):
                self._waiting.remove(order)
                self._begun[order.helpee, order.piece] = order.clock
                return order
        return None

    def cancelled(self, helpee: str, message: Cancel) -> list[Message]:
        answers: list[Message] = []
        for number in message.pieces:
            begun = (helpee, number) in self._begun
            if not begun:
                if message.clock > self._closed:
                    self._refused[helpee, number] = message.clock
                self._waiting = [
                    one for one in self._waiting if (one.helpee, one.piece) != (helpee, number)
                ]
            answers.append(CancelAck(piece=number, begun=begun))
        return answers

    def forget(self, helpee: str) -> None:
        self._waiting = [order for order in self._waiting if order.helpee != helpee]

    def drop_old(self, closed: int) -> None:
        """Forget clocks that are closed: no piece of theirs is waited for any more."""
        self._closed = closed
        self._refused = {one: clock for one, clock in self._refused.items() if clock > closed}
        self._begun = {one: clock for one, clock in self._begun.items() if clock > closed}
        self._waiting = [order for order in self._waiting if order.clock > closed]
