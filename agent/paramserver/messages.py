"""What workers, servers and the controller say to each other. All of it carries the epoch.

What is older than the epoch of its receiver is dropped, because a roll-back came between.
"""

from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="m", tag=True):
    epoch: int = 0


class Section(msgspec.Struct, frozen=True, array_like=True):
    """Rows or changes of one table."""

    table: str
    keys: np.ndarray[Any, Any]
    values: np.ndarray[Any, Any]


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Grains `first` up to `last` of a block."""

    block: int
    first: int
    last: int


class Done(msgspec.Struct, frozen=True, array_like=True):
    """A span, and the batch that holds its changes."""

    span: Span
    batch: str


# A worker's changes.


class Stage(Message, frozen=True, kw_only=True):
    """To a partition: changes that count only if the controller lists their batch.

    If one server has all of a batch, it passes on what is finished with that, and so the worker's
    receipts are not urgent.
    """

    partition: int
    batch: str
    clock: int
    sections: list[Section]
    together: list[int] = []  # all partitions of the batch, if they are of one server
    finished: "Finished | None" = None  # with the last of these


class Staged(Message, frozen=True, kw_only=True):
    partition: int
    batch: str
    passed: bool = False  # whether the controller has been sent what is finished
    waits: bool = False  # until something else is said


class Finished(Message, frozen=True, kw_only=True):
    """To the controller: these spans of a clock are staged everywhere."""

    clock: int
    done: list[Done]
    measured: float = 0.0


class Passed(Message, frozen=True, kw_only=True):
    """To the controller: a worker has finished this, and all of it is staged here."""

    worker: str
    finished: Finished
    closed: int = -1  # the newest clock here, if every partition is here


def listed(by_block: dict[int, list[Done]]) -> list[str]:
    """Return the batches of a whole clock in the order in which they are summed."""
    order = [
        one.batch
        for block in sorted(by_block)
        for one in sorted(by_block[block], key=lambda one: one.span.first)
    ]
    return list(dict.fromkeys(order))


class Close(Message, frozen=True, kw_only=True):
    """To servers: a clock consists of these batches."""

    clock: int
    batches: list[str]


class Subscribe(Message, frozen=True, kw_only=True):
    """To a partition: send these rows now, and whenever a clock closes; or (`stop`) none."""

    partition: int
    keys: dict[str, np.ndarray[Any, Any]]
    stop: bool = False
    serial: int = 0  # of the sender's: a stop that comes late ends nothing that is newer


class Fresh(Message, frozen=True, kw_only=True):
    """To a worker: rows of a partition with every change of clocks up to `age`."""

    partition: int
    age: int
    sections: list[Section]
    asked: bool = False


# The reliable copy.


class PushUp(Message, frozen=True, kw_only=True):
    """To servers: send what changed up to this clock to the replicas."""

    clock: int
    replicas: list[str]


class Push(Message, frozen=True, kw_only=True):
    """To a replica: the rows that changed, as they are at `clock`."""

    partition: int
    clock: int
    sections: list[Section]


class Received(Message, frozen=True, kw_only=True):
    partition: int
    clock: int
    waits: bool = False  # until something else is said


class Committed(Message, frozen=True, kw_only=True):
    """To all: every partition can be had at this clock from reliable machines."""

    clock: int


class Save(Message, frozen=True, kw_only=True):
    """To replicas: write the committed clock to the store."""

    clock: int
    saved: int = -1  # the newest that the store has whole: what is older is deleted


class Saved(Message, frozen=True, kw_only=True):
    partition: int
    clock: int


# Where partitions are.


class Move(Message, frozen=True, kw_only=True):
    """To a server: hand a partition over, or (`mirror`) make a replica there of `committed`."""

    partition: int
    to: str
    mirror: bool = False
    whole: bool = True
    committed: int = -1
    version: int = -1  # of the route that names the replica


class Contents(msgspec.Struct, frozen=True):
    """A partition on its way."""

    closed: int
    committed: int
    sections: list[Section]
    whole: bool  # whether the sections are all rows, or those that changed since `committed`
    before: list[tuple[int, list[Section]]]  # rows as they were before each clock at risk
    staged: list[Stage]
    readers: dict[str, dict[str, np.ndarray[Any, Any]]]
    pushed: int
    later: list[Close | PushUp]
    serials: dict[str, int] = {}


class Copy(Message, frozen=True, kw_only=True):
    partition: int
    contents: Contents
    mirror: bool = False
    version: int = -1


class Forwarded(Message, frozen=True, kw_only=True):
    """A message to a partition that has moved on; an answer goes to `sender`."""

    message: Stage | Subscribe | Close | PushUp
    partition: int
    sender: str = ""


class Installed(Message, frozen=True, kw_only=True):
    partition: int
    mirror: bool = False


class Route(Message, frozen=True, kw_only=True):
    """To all: which node serves each partition."""

    version: int
    owners: list[str]
    replicas: list[str]


# Who works on what.


class Roll(Message, frozen=True, kw_only=True):
    """To all: go back to the end of `clock`, under a new epoch, with these blocks."""

    clock: int
    owners: list[str]
    replicas: list[str]
    version: int
    lost: list[int]  # partitions that come from their replicas
    blocks: list[int] = []
    restore: bool = False  # replicas are as the store has them


class Load(Message, frozen=True, kw_only=True):
    blocks: list[int]


class Loaded(Message, frozen=True, kw_only=True):
    blocks: list[int]


class Grant(Message, frozen=True, kw_only=True):
    """To a worker: these blocks are its, each from a clock on."""

    clocks: dict[int, int]


class Release(Message, frozen=True, kw_only=True):
    """To a worker: give these blocks back after the present clock, or (`now`) at once."""

    blocks: list[int]
    now: bool = False


class Released(Message, frozen=True, kw_only=True):
    clocks: dict[int, int]


class Group(Message, frozen=True, kw_only=True):
    helpers: list[str]
    helpees: list[str]


class Gone(Message, frozen=True, kw_only=True):
    nodes: list[str]


class Join(Message, frozen=True, kw_only=True):
    reliable: bool
    machine: str
    allocation: str


class Beat(Message, frozen=True, kw_only=True):
    pass


class Report(Message, frozen=True, kw_only=True):
    """To all: say again what the controller may have missed."""


class Failed(Message, frozen=True, kw_only=True):
    why: str
    traceback: str = ""  # of the application's own lines


class End(Message, frozen=True, kw_only=True):
    why: str


class Leave(Message, frozen=True, kw_only=True):
    """To a node: nothing depends on it any more."""


# Help.


class Progress(Message, frozen=True, kw_only=True):
    clock: int
    share: float
    time_s: float


class DoThis(Message, frozen=True, kw_only=True):
    piece: int
    clock: int
    spans: list[Span]
    time_s: float


class Begun(Message, frozen=True, kw_only=True):
    piece: int


class Completed(Message, frozen=True, kw_only=True):
    """To a helpee: the changes of the piece are staged everywhere."""

    piece: int
    done: list[Done]
    measured: float = 0.0


class Cancel(Message, frozen=True, kw_only=True):
    clock: int = 0
    pieces: list[int]


class CancelAck(Message, frozen=True, kw_only=True):
    piece: int
    begun: bool


if TYPE_CHECKING:
    AnyMessage = Message
else:  # every message above, so that a decoder takes each
    AnyMessage = reduce(or_, Message.__subclasses__())

Out = list[tuple[str, Message]]  # what a machine says: to whom, and what
CONTROLLER = "controller"
