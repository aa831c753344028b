"""The recoveries of a job as traces, from the entries of the journal. Pure.

A recovery leads from one layout that works to the next. It is one trace: the root begins with what
caused it, and ends with the first step that is committed under the new layout.

    loss     the job stood still: a worker or its machine was lost, or the script failed
             (it begins with the notice, if there was one)
    notice   the cloud announced that it will take a machine of the layout
    resume   a person had an ended job go on
    change   the manager meant it: it begins with the order of what is new in the layout

Ids are digests of the journal's name, the job and the generation, so they are the same whenever a
recovery is derived. Parts that began before the root are shown from its beginning on.
"""

import hashlib
from collections.abc import Sequence
from typing import Literal, get_args

import msgspec

from agent.layout import Layout
from agent.messages import (
    AgentJoined,
    NoticeSeen,
    Progress,
    Recalled,
    Regrouped,
    Rewound,
    WorkerReady,
)
from cloud.model import LaunchRequest, Machine
from orchestrator.actions import (
    AnyAction,
    CloseJob,
    Launch,
    Note,
    Regroup,
    StartWorker,
    StopWorker,
)
from orchestrator.events import AnyEvent, JobBranched, JobSubmitted, Launched, Listed
from orchestrator.world import Entry

Kind = Literal["loss", "notice", "resume", "change"]
KINDS: tuple[Kind, ...] = get_args(Kind)  # of several causes, the first one names the recovery
STATUSES: dict[str, Kind] = {"RECOVERING": "loss", "PENDING": "resume"}
PARTS_MAX = 64  # of each kind in a trace; it says how many workers there were
BIRTHS_MAX = 10_000
TEXT_CHARS_MAX = 500

Attributes = dict[str, str | int | float]


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a trace; the root has no parent."""

    trace: str
    id: str
    parent: str
    name: str
    from_s: float
    to_s: float
    attributes: Attributes


class _Cause(msgspec.Struct, frozen=True, kw_only=True):
    kind: Kind
    at_s: float
    because: str
    behind: int  # the generation that had been asked for last
    machine: str = ""


class _Ask(msgspec.Struct, frozen=True):
    at_s: float
    order: Regroup


class _Birth(msgspec.Struct):
    """A machine or a worker from its order until it can be used; told of once."""

    asked_s: float
    attributes: Attributes
    there_s: float | None = None
    told: bool = False


class Recoveries:
    """Hears the entries of a journal in order, and tells each recovery of one job."""

    def __init__(self, journal: str, job: str) -> None:
        self._journal, self._job = journal, job
        self._now_s = self._worked_s = 0.0
        self._begun = True  # a job whose submission was not heard began before
        self._worked: Layout | None = None
        self._generation = self._fence = self._steps_lost = 0
        self._causes: list[_Cause] = []
        self._asks: list[_Ask] = []
        self._recalled: list[Recalled] = []
        self._requests: dict[str, _Birth] = {}
        self._machines: dict[str, _Birth] = {}
        self._workers: dict[str, _Birth] = {}

    def hear(self, entry: Entry) -> tuple[Span, ...]:
        """Return the trace of the recovery that this entry ends, the root first; else nothing."""
        self._now_s = max(self._now_s, entry.event.at_s)
        ended = self._see(entry.event, entry.actions)
        for action in entry.actions:
            self._follow(action, entry.event)
        return ended

    def _see(self, event: AnyEvent, actions: Sequence[AnyAction]) -> tuple[Span, ...]:
        match event:
            case Regrouped(job=self._job) | Progress(job=self._job):
                return self._works(event)
            case JobSubmitted(spec=spec) if spec.job == self._job:
                self._begun = self._generation > 0  # a name that is taken begins nothing
            case JobBranched(name=self._job):
                self._begun = self._generation > 0
            case Launched():
                self._born(event.machine)
            case Listed():
                for machine in event.listing.machines:
                    self._born(machine)
            case AgentJoined(machine_id=name) if name in self._machines:
                _arrive(self._machines[name], event.at_s)
            case WorkerReady(worker=name) if name in self._workers:
                _arrive(self._workers[name], event.at_s)
            case Recalled(job=self._job):
                self._recalled = [*self._recalled, event][-PARTS_MAX:]
            case Rewound(job=self._job) if _notes(actions, self._job):
                self._steps_lost += event.from_step - event.to_step
                self._fence = self._generation
        return ()

    def _follow(self, action: AnyAction, event: AnyEvent) -> None:
        match action:
            case Note():
                self._look_for_cause(action, event)
            case Launch(request=request) if request.tags.get("job") == self._job:
                self._requests[request.token] = _Birth(self._now_s, _sold(request))
                _bound(self._requests)
            case StartWorker(job=self._job):
                known: Attributes = {
                    "spot.worker": action.worker,
                    "spot.machine": action.machine_id,
                }
                self._workers.setdefault(action.worker, _Birth(self._now_s, known))
                _bound(self._workers)
            case StopWorker(job=self._job):
                self._workers.pop(action.worker, None)
            case Regroup(job=self._job, layout=layout) if layout.generation > self._generation:
                self._generation = layout.generation
                self._asks.append(_Ask(self._now_s, action))
                del self._asks[1:-PARTS_MAX]
            case CloseJob(job=self._job):
                self._causes, self._asks, self._workers = [], [], {}

    def _look_for_cause(self, note: Note, event: AnyEvent) -> None:
        """Keep what makes another layout necessary: the manager's own sentence about it says so."""
        status, _, why = note.because.partition(": ")
        if note.who == self._job and status in STATUSES:
            self._add(STATUSES[status], event, why)
        elif isinstance(event, NoticeSeen) and event.notice.kind == "terminate":
            machine = event.notice.machine_id
            waits = any(cause.machine == machine for cause in self._causes)
            if note.who == machine and not waits and self._has_part(machine, self._newest()):
                self._add("notice", event, note.because, machine)

    def _add(self, kind: Kind, event: AnyEvent, because: str, machine: str = "") -> None:
        cause = _Cause(
            kind=kind,
            at_s=max(event.at_s, self._worked_s),
            because=because,
            behind=self._generation,
            machine=machine,
        )
        self._causes.append(cause)

    def _newest(self) -> Layout | None:
        return self._asks[-1].order.layout if self._asks else self._worked

    def _has_part(self, machine: str, layout: Layout | None) -> bool:
        """Return whether a worker of the layout is on this machine."""
        inside = () if layout is None else layout.workers
        births = (self._workers[name] for name in inside if name in self._workers)
        return any(birth.attributes["spot.machine"] == machine for birth in births)

    def _born(self, machine: Machine) -> None:
        request = self._requests.get(machine.token)
        if request is not None and machine.id not in self._machines:
            known = {"spot.machine": machine.id, **request.attributes}
            self._machines[machine.id] = _Birth(request.asked_s, known)
            _bound(self._machines)

    # --- the end of a recovery ------------------------------------------------------------------

    def _works(self, event: Regrouped | Progress) -> tuple[Span, ...]:
        """Return the trace, if this is the first step under the newest layout."""
        if not self._asks or not self._fence < event.generation == self._generation:
            return ()
        layout = self._asks[-1].order.layout
        over = [
            cause
            for cause in self._causes
            if cause.behind < self._generation and not self._has_part(cause.machine, layout)
        ]
        trace = self._trace(event, layout, over)
        self._causes = [cause for cause in self._causes if cause not in over]
        self._asks, self._recalled, self._steps_lost = [], [], 0
        begins, self._begun = not self._begun, True
        self._worked, self._worked_s = layout, event.at_s
        return () if begins else trace

    def _trace(
        self, event: Regrouped | Progress, layout: Layout, causes: list[_Cause]
    ) -> tuple[Span, ...]:
        births = self._newcomers(layout)
        if not causes:
            first_s = min([self._asks[0].at_s, *(birth.asked_s for _, birth in births)])
            why = self._asks[-1].order.because
            causes = [_Cause(kind="change", at_s=first_s, because=why, behind=self._generation)]
        cause = min(causes, key=lambda one: (KINDS.index(one.kind), one.at_s))
        from_s = min(one.at_s for one in causes)
        made = _Trace(self._journal, self._job, layout.generation, from_s, event.at_s)
        made.add(cause.kind, from_s, event.at_s, self._facts(event, layout, cause))
        made.add("decide", from_s, self._asks[0].at_s, {})
        until = [*(ask.at_s for ask in self._asks[1:]), event.at_s]
        for ask, to_s in zip(self._asks, until, strict=True):
            made.add("regroup", ask.at_s, to_s, _asked(ask.order))
        for recalled in self._recalled:
            known: Attributes = {"spot.step": recalled.step, "spot.because": recalled.because}
            made.add("restore", from_s, recalled.at_s, known)
        if isinstance(event, Regrouped):
            made.add("pause", event.at_s - event.pause_s, event.at_s, {})
        for name, birth in births:
            birth.told = True
            there_s = event.at_s if birth.there_s is None else birth.there_s
            made.add(name, birth.asked_s, there_s, birth.attributes)
        return tuple(made.spans)

    def _newcomers(self, layout: Layout) -> list[tuple[str, _Birth]]:
        """Return the births of the workers that are new in the layout, and of their machines."""
        if self._worked is not None:
            before = self._worked.workers
        else:
            before = layout.workers if self._begun else ()
        workers = [
            self._workers[w] for w in layout.workers if w not in before and w in self._workers
        ]
        names = dict.fromkeys(str(birth.attributes["spot.machine"]) for birth in workers)
        machines = [self._machines[name] for name in names if name in self._machines]
        births = [("machine", birth) for birth in machines if not birth.told][:PARTS_MAX]
        return births + [("worker", birth) for birth in workers if not birth.told][:PARTS_MAX]

    def _facts(self, event: Regrouped | Progress, layout: Layout, cause: _Cause) -> Attributes:
        facts: Attributes = {
            "spot.job": self._job,
            "spot.generation": layout.generation,
            "spot.layout": layout.describe(),
            "spot.workers": len(layout.workers),
            "spot.cause": cause.because,
            "spot.decision": self._asks[-1].order.because,
            "spot.step": event.step,
            "spot.steps_lost": self._steps_lost,
        }
        if self._worked is not None:
            now, before = set(layout.workers), set(self._worked.workers)
            facts |= {
                "spot.workers_new": len(now - before),
                "spot.workers_gone": len(before - now),
            }
        if isinstance(event, Regrouped):
            facts["spot.pause_s"] = event.pause_s
        return facts


class _Trace:
    """The spans of one recovery; every one lies within the first."""

    def __init__(self, journal: str, job: str, generation: int, from_s: float, to_s: float) -> None:
        self._id = _digest(32, journal, job, generation)
        self._from_s, self._to_s = from_s, max(from_s, to_s)
        self.spans: list[Span] = []

    def add(self, name: str, from_s: float, to_s: float, attributes: Attributes) -> None:
        from_s = min(max(from_s, self._from_s), self._to_s)
        span = Span(
            trace=self._id,
            id=_digest(16, self._id, len(self.spans)),
            parent=self.spans[0].id if self.spans else "",
            name=name,
            from_s=from_s,
            to_s=min(max(from_s, to_s), self._to_s),
            attributes={
                key: value[:TEXT_CHARS_MAX] if isinstance(value, str) else value
                for key, value in attributes.items()
            },
        )
        self.spans.append(span)


def _arrive(birth: _Birth, at_s: float) -> None:
    birth.there_s = at_s if birth.there_s is None else birth.there_s


def _asked(order: Regroup) -> Attributes:
    return {
        "spot.generation": order.layout.generation,
        "spot.layout": order.layout.describe(),
        "spot.when": order.when,
        "spot.because": order.because,
    }


def _sold(request: LaunchRequest) -> Attributes:
    return {"spot.pool": request.pool.key, "spot.market": request.market}


def _notes(actions: Sequence[AnyAction], who: str) -> bool:
    return any(isinstance(action, Note) and action.who == who for action in actions)


def _bound(births: dict[str, _Birth]) -> None:
    """Forget the oldest ones beyond the bound."""
    while len(births) > BIRTHS_MAX:
        del births[next(iter(births))]


def _digest(chars: int, *parts: str | int) -> str:
    """Return so many hexadecimal digits that are the same for the same parts."""
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:chars]
