"""A node: one worker and one server under a name, and the epoch that both are in."""

from msgspec.structs import replace

from agent.paramserver.messages import (
    CONTROLLER,
    Close,
    Committed,
    Copy,
    Forwarded,
    Gone,
    Join,
    Load,
    Message,
    Move,
    Out,
    Push,
    PushUp,
    Report,
    Roll,
    Route,
    Save,
    Stage,
    Subscribe,
)
from agent.paramserver.server import Server
from agent.paramserver.tables import ApplicationError
from agent.paramserver.worker import Worker

FOR_SERVERS = (Stage, Subscribe, Forwarded, Close, PushUp, Push, Move, Copy, Save)
FOR_BOTH = (Roll, Route, Committed, Report, Gone)


class Member:
    """`handle` takes what comes in; what is of a later epoch waits for the roll-back to it."""

    def __init__(self, worker: Worker, server: Server) -> None:
        self.name, self.worker, self.server = worker.name, worker, server
        self.epoch = -1
        self._ahead: list[tuple[str, Message]] = []
        self.dropped = 0

    def handle(self, sender: str, message: Message, now_s: float) -> Out:
        if isinstance(message, Roll):  # there is one in each epoch, and it may come twice
            return self._roll(sender, message, now_s) if message.epoch > self.epoch else []
        if isinstance(message, Load):  # data are the same in every epoch
            return self.marked(self._take(sender, message, now_s))
        if message.epoch > self.epoch:
            self._ahead.append((sender, message))
            return []
        if message.epoch < self.epoch:
            self.dropped += 1
            return []
        return self.marked(self._take(sender, message, now_s))

    def _roll(self, sender: str, message: Roll, now_s: float) -> Out:
        self.epoch = message.epoch
        out = self.marked(self._take(sender, message, now_s))
        waiting, self._ahead = self._ahead, []
        for source, held in waiting:
            out += self.handle(source, held, now_s)
        return out

    def _take(self, sender: str, message: Message, now_s: float) -> Out:
        try:
            return self._handle(sender, message, now_s)
        except ApplicationError as error:  # of sums that are made only here
            return self.worker.fail(f"at {type(message).__name__}", error)

    def _handle(self, sender: str, message: Message, now_s: float) -> Out:
        out: Out = []
        if isinstance(message, FOR_SERVERS + FOR_BOTH):
            out += self.server.handle(sender, message)
        if not isinstance(message, FOR_SERVERS):
            out += self.worker.handle(sender, message, now_s)
        return out

    def marked(self, out: Out) -> Out:
        """Return what is said with our epoch on it."""
        at = self.epoch
        return [
            (to, message if message.epoch == at else replace(message, epoch=at))
            for to, message in out
        ]


def join(reliable: bool, machine: str, allocation: str) -> Out:
    """Return how a node introduces itself."""
    return [(CONTROLLER, Join(reliable=reliable, machine=machine, allocation=allocation))]
