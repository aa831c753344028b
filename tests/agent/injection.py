"""What may go wrong at the points that `agent.faults` names, and how a test arms a process with it.

A process is armed by the variable SPOT_FAULTS (an encoded `Plan`) if it imports this. Every passing is written into the
plan's ledger, and at the n-th one the fault happens.
"""

import errno
import os
import signal
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, Never

import msgspec

from agent import faults

VARIABLE = "SPOT_FAULTS"
HANG_S = 120.0

Kind = Literal[
    "kill",
    "stop",
    "term",
    "hang",
    "exception",
    "memory",
    "nan",
    "corrupt",
    "reset",
    "full",
    "unavailable",
]

STEP = (
    "step: share opened",
    "step: microbatch computed",
    "step: stage played",
    "step: sums sent",
    "step: sums taken",
    "step: slice sent",
    "step: prepared",
    "step: commit heard",
    "step: installed",
)
MORPH = (
    "morph: entered",
    "morph: cuts told",
    "morph: hand-over begun",
    "morph: part sent",
    "morph: state received",
    "morph: holding said",
)
HELP = ("help: asked", "help: answered", "help: begun", "help: computed")
SAVE = ("save: snapshot begun", "save: share sent")
SURVEY = ("survey: called", "survey: round begun", "survey: section begun", "survey: part sent")
KEEPER = (
    "keeper: assembled",
    "keeper: part drafted",
    "keeper: mark drafted",
    "keeper: manifest written",
    "keeper: pruned",
)
POINTS = (*STEP, *MORPH, *HELP, *SAVE, *SURVEY, *KEEPER)
UNHEARD = ("Beat", "Lines")  # messages that may be lost without anyone noticing


class Injected(Exception):  # noqa: N818 - it says what it is
    """Something that nobody has foreseen, at a point that a test chose."""


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """At the n-th passing of a point, counted from 1, this happens."""

    point: str
    passing: int
    kind: Kind

    def __post_init__(self) -> None:
        if self.point not in POINTS or self.passing < 1:
            raise ValueError(f"no such fault: {self.point!r}, passing {self.passing}")


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What shall happen in one process, and the file that tells of it."""

    who: str
    ledger: str
    faults: tuple[Fault, ...] = ()


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """Of the ledger: a point was passed, and what was done to the process there."""

    who: str
    pid: int
    point: str
    kind: Kind | None = None


class Trap:
    """Damages the next message that somebody would miss, or breaks off in the middle of it."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind

    def spring(self, message: object, sock: socket.socket, pieces: list[memoryview]) -> None:
        if type(message).__name__ in UNHEARD or faults.trap is not self:
            return
        faults.trap = None
        if self._kind == "corrupt":
            last = bytearray(pieces[-1])
            last[-1] ^= 0x10
            pieces[-1] = memoryview(last)
            return
        sock.send(pieces[0][: len(pieces[0]) // 2])
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))


class Armed:
    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._lock = threading.Lock()
        self._passed: Counter[str] = Counter()
        self._ledger = os.open(plan.ledger, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def passed(self, point: str, params: Mapping[str, Any] | None) -> Callable[[], object] | None:
        """What happens there, if anything does."""
        assert point in POINTS, point
        with self._lock:
            self._passed[point] += 1
            due = [
                fault
                for fault in self._plan.faults
                if fault.point == point and fault.passing == self._passed[point]
            ]
        kind = due[0].kind if due else None
        line = Line(who=self._plan.who, pid=os.getpid(), point=point, kind=kind)
        os.write(self._ledger, msgspec.json.encode(line) + b"\n")
        if kind == "hang":
            return partial(threading.Event().wait, HANG_S)
        return None if kind is None else partial(_happen, kind, point, params)


def _happen(kind: Kind, point: str, params: Mapping[str, Any] | None) -> None:
    match kind:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "term":
            os.kill(os.getpid(), signal.SIGTERM)
        case "stop":
            # To this thread, which stops all at once: another one would have to wake first.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        case "exception":
            _fail(f"a test wanted it at {point!r}")
        case "memory":
            raise MemoryError(f"a test wanted it at {point!r}")
        case "nan":
            assert params, f"there is no gradient at {point!r}"
            for param in params.values():
                if param.grad is not None:
                    param.grad.fill_(float("nan"))
        case "corrupt" | "reset":
            faults.trap = Trap(kind)
        case "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        case "unavailable":
            raise OSError(errno.EIO, "503 Service Unavailable")


def _fail(why: str) -> Never:
    raise Injected(why)


def arm(plan: str | bytes) -> None:
    """From now on this process does what the plan says."""
    faults.passed = Armed(msgspec.json.decode(plan, type=Plan)).passed


if VARIABLE in os.environ:
    arm(os.environ[VARIABLE])
