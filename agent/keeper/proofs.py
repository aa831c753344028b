"""The records of a job's steps, by which workers are compared and prove themselves.

With each commit, workers send what they computed from one microbatch, and the state that the
script's step began with. For one version all must send the same. They differ if a script keeps
state that the session does not carry from step to step, because a worker that joined later lacks
that state. Before a joining worker counts, it reproduces a committed step whose digests are known
here: that is a `Question`.

Workers that round alike (`Computed.machine`) must have the same bits. For others, and where kernels
are not deterministic, norms are compared: see `Near`. No torch here.
"""

import math
import struct
from collections.abc import Iterable, Mapping

import msgspec

from agent.keeper.storage.backup import Saved
from agent.messages import JobOrder
from agent.proof.turns import is_shown
from agent.protocol import Arrived, Computed, Digest, Prepared, Proved, Reached
from agent.store.encoding.format import REST

VERSIONS_MAX = 256
FORMAT = 3  # what is looked at in a step differs from format 2, and digests from format 1
BATCH, LOSS, GRADIENT, GRAPH = "batch", "loss", "gradient of layer ", "recording of loss_of"
WRITTEN = "change that the forward makes to the buffers of layer "
SESSION_STATE = "session.state"

NEAR_BATCH, NEAR_LOSS, NEAR_GRADIENT, NEAR_STATE = 1e-3, 1e-3, 1e-2, 1e-3
NEAR_CHANGE = 2e-2  # of what a step has changed, where that is known
GRAIN = 1e-6  # of a norm: rounding
FLOOR = 1e-4  # of the largest norm beside it: a smaller difference may be only rounding

UNLIKE = (
    "{} rounds otherwise than {}, because their processors or cards are of different kinds: what they compute is compared "
    "within a tolerance, and the last bits of the weights depend on which of them computes what; with exact = true a job "
    "keeps to machines that round alike"
)


class Fact(msgspec.Struct, frozen=True, array_like=True):
    """One digest, as the first worker that sent it has it."""

    worker: str
    machine: str
    digest: Digest


Facts = dict[str, Fact]


class Known(msgspec.Struct, array_like=True):
    """The records of a version: of its commit's microbatches, and the state it begins with."""

    script_step: int = -1
    phase: int = -1
    worker: str = ""  # the first that sent these two
    computed: dict[int, Facts] = {}
    reached: Facts = {}
    idle: int = -1  # turns of the script's loop before its commit that trained nothing
    aside: tuple[str, ...] = ()  # what the script keeps beside the state, and has changed


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """A step of the script to be reproduced from version `version`, and its records.

    It is complete if the state after the step is known. Otherwise no worker has sent the end of the
    step, and the records are those of the part before it.
    """

    version: int
    script_step: int
    microbatches: tuple[int | None, ...]
    commits: int
    complete: bool
    known: tuple[Known, ...]


class _Records(msgspec.Struct, frozen=True, kw_only=True):
    format: int
    order: str
    question: Question


def mark_of(order: JobOrder) -> str:
    """Return the job, script and arguments of an order; records of others prove nothing."""
    return "\0".join((order.job, order.script_sha, *order.argv))


def encode(question: Question | None, order: JobOrder) -> bytes:
    """Encode records to be stored with a version; empty if there are none."""
    if question is None:
        return b""
    records = _Records(format=FORMAT, order=mark_of(order), question=question)
    return msgspec.msgpack.encode(records)


def decode(records: bytes, order: JobOrder) -> Question | None:
    """Return the question in these records, if it is of this job's script and arguments."""
    try:
        found = msgspec.msgpack.decode(records, type=_Records)
    except ValueError:
        return None
    return found.question if (found.format, found.order) == (FORMAT, mark_of(order)) else None


def read(saved: Saved, order: JobOrder) -> Question | None:
    """Return the question in a version's records, as far as its sums reach.

    The last step of the records may have never been committed.
    """
    question, sums = decode(saved.records, order), len(saved.redo)
    if question is None or question.commits <= sums:
        return question
    return msgspec.structs.replace(
        question,
        microbatches=question.microbatches[: sums + 1],
        commits=sums,
        complete=False,
        known=question.known[: sums + 1],
    )


def commits_of(records: bytes) -> int:
    """Return how many sums these records' question needs, whichever job they are of."""
    try:
        return msgspec.msgpack.decode(records, type=_Records).question.commits
    except ValueError:
        return 0


class Proofs:
    """The records of the last versions of one job."""

    def __init__(self) -> None:
        self._known: dict[int, Known] = {}
        self.phases = 1  # of a step of the script, the most that were seen
        # The step and phase of the newest commit of the keeper before, by its version.
        self._earlier = dict[int, tuple[int, int]]()
        self._kinds: dict[str, str] = {}  # the first worker of each kind of machine
        self.aside: tuple[str, ...] = ()  # what the script keeps for itself, and has changed

    def unlike(self, worker: str, machines: Iterable[str]) -> str:
        """Return a sentence when a worker is the first that rounds so, and others do not."""
        others = list(self._kinds.values())
        for machine in machines:
            if machine and machine not in self._kinds:
                self._kinds[machine] = worker
                if others:
                    return UNLIKE.format(worker, others[0])
        return ""

    def hear(self, worker: str, prepared: Prepared) -> str:
        """Record what a worker sends for the version in flight.

        Return a sentence if others have sent something else, and an empty string otherwise.
        """
        if why := self._place(worker, prepared.step, (prepared.script_step, prepared.phase)):
            return why
        if why := self._idle(worker, prepared):
            return why
        judge = _Judge(worker)
        for computed in prepared.computed:
            known = self._of(computed.version)
            facts = known.computed.setdefault(computed.microbatch, {})
            if why := judge.computed(facts, computed, known):
                return why
            _learn(facts, worker, computed.machine, _told(computed))
        known = self._of(prepared.step)
        return "" if prepared.reached is None else self._reached(worker, prepared.reached, known)

    def arrive(self, worker: str, arrived: Arrived) -> str:
        """Record the state with which a worker's script begins a step.

        Return a sentence if others have sent something else, and an empty string otherwise.
        """
        reached = arrived.reached
        known = self._of(reached.version)
        why = self._place(worker, reached.version, (arrived.script_step, 0))
        return why or self._reached(worker, reached, known)

    def _reached(self, worker: str, reached: Reached, known: Known) -> str:
        if why := _Judge(worker).reached(known.reached, reached, known):
            return why
        _learn(known.reached, worker, reached.machine, reached.layers)
        known.aside = self.aside = known.aside or reached.aside
        return ""

    def _idle(self, worker: str, prepared: Prepared) -> str:
        """Record in which turn of the script's loop a version is made."""
        known, idle = self._of(prepared.step), prepared.idle
        if known.idle >= 0 and idle != known.idle:
            step = prepared.script_step
            return (
                f"step {step + min(idle, known.idle)}: some workers train in turn {step + known.idle} of the script's loop "
                f"and {worker} in turn {step + idle}. {TURNS}"
            )
        known.idle = idle
        return ""

    def _place(self, worker: str, version: int, place: tuple[int, int]) -> str:
        """Record to which step of the script, and which backward call in it, a version belongs."""
        known, (step, phase) = self._of(version), place
        if known.phase >= 0 and place != (known.script_step, known.phase):
            return (
                f"step {known.script_step}: commit {version} is backward call {known.phase} of step {known.script_step} "
                f"on {known.worker} and call {phase} of step {step} on {worker}. {CALLS}"
            )
        known.script_step, known.phase = step, phase
        known.worker = known.worker or worker
        self.phases = max(self.phases, phase + 1)
        return ""

    def learn(self, question: Question) -> None:
        """Add the records of a question to those known here."""
        for offset, known in enumerate(question.known):
            self._known.setdefault(question.version + offset, known)
            self.phases = max(self.phases, known.phase + 1)

    def recall(self, version: int, script_step: int, phase: int, phases: int) -> None:
        """Take note of where in the script the commit is that the keeper before wrote last."""
        self.phases = max(self.phases, phases)
        if script_step >= 0:
            self._earlier = {version: (script_step, phase)}

    def _place_of(self, version: int) -> tuple[int, int] | None:
        known = self._known.get(version)
        if known is not None and known.phase >= 0:
            return known.script_step, known.phase
        return self._earlier.get(version)

    def step_of(self, version: int, *, ended: bool = False) -> int:
        """Return how many steps of the script are done with this version.

        If a step has several commits, this is as exact as the records are.
        """
        if self.phases == 1:
            return version
        if (at := self._place_of(version)) is not None:
            return at[0]
        if (before := self._place_of(version - 1)) is not None:
            step, phase = before
            return step + (ended or phase + 1 >= self.phases)
        places = {v: place for v in (*self._known, *self._earlier) if (place := self._place_of(v))}
        newest = max(places, default=0)
        return version * places[newest][0] // newest if newest else version

    def clear(self) -> None:
        """Drop all records, because a different keeper has gone on with the job meanwhile."""
        self._known.clear()

    def drop(self, version: int) -> None:
        """Drop the records of this version and later ones, because of who is among their sources."""
        self._known = {at: known for at, known in self._known.items() if at < version}

    def forget(self, version: int) -> None:
        """Drop the records of what came after this version, because it is done again."""
        self._known = {at: known for at, known in self._known.items() if at <= version}
        if version in self._known:
            self._known[version] = Known(reached=self._known[version].reached)

    def question(self, base: int, end: int) -> Question | None:
        """Return what a worker shall reproduce from the state of version `base`.

        Sums are there from `base` up to version `end`. None if there are no records of that step.
        """
        first = self._known.get(base)
        if first is None or first.phase != 0:
            return None
        phases = [first]
        while (known := self._known.get(base + len(phases))) and known.phase == len(phases):
            phases.append(known)
        behind = self._known.get(base + len(phases))
        whole = behind is not None and behind.phase == 0 and base + len(phases) <= end
        complete = whole and behind is not None and bool(behind.reached)
        commits = len(phases) if complete else min(len(phases), max(0, end - base))
        if not complete:
            # Uncommitted phases must not be applied; only the first of them can be computed.
            phases = phases[: commits + 1]
        asked = tuple(min(known.computed, default=None) for known in phases)
        if not complete and all(each is None for each in asked) and not first.reached:
            return None
        told = [*phases, behind] if complete and behind is not None else phases
        return Question(
            version=base,
            script_step=first.script_step,
            microbatches=asked,
            commits=commits,
            complete=complete,
            known=tuple(msgspec.structs.replace(known) for known in told),
        )

    def _of(self, version: int) -> Known:
        known = self._known.setdefault(version, Known())
        while len(self._known) > VERSIONS_MAX:
            del self._known[min(self._known)]
        return known


def judge(worker: str, question: Question, proved: Proved) -> str:
    """Compare a worker's answer with the records. Return a sentence on a difference, else ""."""
    known = dict(enumerate(question.known, question.version))
    step, by = question.script_step, _Judge(worker, proved)
    computed = {one.version: one for one in proved.computed}
    reached = {one.version: one for one in proved.reached}
    for version, microbatch in enumerate(question.microbatches, question.version):
        if microbatch is None:
            continue
        one, facts = computed.get(version), known[version].computed[microbatch]
        if one is None or one.microbatch != microbatch:
            return f"step {step}: {worker} was asked to compute microbatch {microbatch} and did not: start the job again"
        if why := by.computed(facts, one, known[version]):
            return why
    end = question.version + len(question.known) - 1
    if question.complete and end not in reached:
        times = "once" if question.commits == 1 else f"{question.commits} times"
        why = (
            f"the job calls session.backward(...) {times}, and {worker} does not. {CALLS}. {COUNT}"
        )
        return f"step {step}: {why}{aside(known[question.version].aside)}"
    for version in (question.version, end) if question.complete else (question.version,):
        if version in reached and (
            why := by.reached(known[version].reached, reached[version], known[version])
        ):
            return why
    return ""


def _told(computed: Computed) -> list[Digest]:
    """Return all digests of a microbatch, in the order in which a difference would arise."""
    loss = [] if computed.loss is None else [_digest(computed.loss)]
    batch = msgspec.structs.replace(computed.batch, name=BATCH)
    shown = ((GRADIENT, computed.gradients), (WRITTEN, computed.written))
    named = (
        msgspec.structs.replace(one, name=what + one.name) for what, each in shown for one in each
    )
    graph = [Digest(GRAPH, computed.graph)] if computed.graph else []
    return [batch, *loss, *named, *graph]


def _digest(loss: float) -> Digest:
    (bits,) = struct.unpack("<Q", struct.pack("<d", loss))
    return Digest(LOSS, bits, (loss,))


def _learn(facts: Facts, worker: str, machine: str, told: Iterable[Digest]) -> None:
    for one in told:
        facts.setdefault(one.name, Fact(worker, machine, one))


class Near:
    """The tolerance for norms of machines that round differently.

    It is relative to the norms, or to what a step has changed.
    """

    def __init__(self, share: float, floor: float, changed: Mapping[str, Digest]) -> None:
        self._share, self._floor, self._changed = share, floor, changed

    def same(self, one: Digest, other: Digest) -> bool:
        if len(one.norms) != len(other.norms):
            return False
        before = self._changed.get(one.name)
        begun = before.norms if before and len(before.norms) == len(one.norms) else None
        return all(
            self._near(a, b, None if begun is None else begun[at])
            for at, (a, b) in enumerate(zip(one.norms, other.norms, strict=True))
        )

    def _near(self, a: float, b: float, before: float | None) -> bool:
        if not (math.isfinite(a) and math.isfinite(b)):
            return a == b or (math.isnan(a) and math.isnan(b))
        if before is None:
            return abs(a - b) <= max(self._share * max(abs(a), abs(b)), self._floor)
        change = max(abs(a - before), abs(b - before))
        return abs(a - b) <= max(NEAR_CHANGE * change, GRAIN * max(abs(a), abs(b)))


class _Judge:
    """Compares what one worker sends with the records."""

    def __init__(self, worker: str, proved: Proved | None = None) -> None:
        self._worker = worker
        begun = (
            min(proved.reached, key=lambda one: one.version) if proved and proved.reached else None
        )
        self._begun = begun
        self._before = {one.name: one for one in begun.layers} if begun else {}

    def computed(self, facts: Facts, computed: Computed, known: Known) -> str:
        told = _told(computed)
        largest = max(
            (norm for one in computed.gradients for norm in one.norms if math.isfinite(norm)),
            default=0.0,
        )
        for one in told:
            share, floor = NEAR_GRADIENT, FLOOR * largest
            if one.name in (BATCH, LOSS):
                share, floor = (NEAR_BATCH, GRAIN) if one.name == BATCH else (NEAR_LOSS, GRAIN)
            near = Near(share, floor, {})
            if (fact := facts.get(one.name)) and not _alike(one, computed.machine, fact, near):
                return self._microbatch_differs(one.name, fact, computed.microbatch, known)
        return ""

    def reached(self, facts: Facts, reached: Reached, known: Known) -> str:
        proves = self._begun is not None and reached.version != self._begun.version
        largest = max(
            (norm for one in reached.layers for norm in one.norms if math.isfinite(norm)),
            default=0.0,
        )
        near = Near(NEAR_STATE, FLOOR * largest, self._before if proves else {})
        for one in reached.layers:
            if (fact := facts.get(one.name)) and not _alike(one, reached.machine, fact, near):
                return self._state_differs(one.name, fact, reached, known)
        return ""

    def _than(self, fact: Fact) -> str:
        other = "before" if fact.worker == self._worker else f"on {fact.worker}"
        return f"is another on {self._worker} than {other}"

    def _microbatch_differs(self, what: str, fact: Fact, microbatch: int, known: Known) -> str:
        phase = f", backward call {known.phase}" if known.phase > 0 else ""
        thing = {BATCH: "the batch", LOSS: "the loss"}.get(what, f"the {what}")
        at = f"step {known.script_step}, microbatch {microbatch}{phase}"
        why = f"{_advice(what, known.script_step)}{aside(known.aside)}"
        return f"{at}: {thing} {self._than(fact)}. {why}"

    def _state_differs(self, name: str, fact: Fact, reached: Reached, known: Known) -> str:
        what = NAMES.get(name, f"the state of {'' if name[:1].isupper() else 'layer '}{name}")
        step = known.script_step
        if self._begun is not None and reached.version == self._begun.version:
            where, why = f"step {step}, as it begins", RESTORED
        elif step < 1 and known.phase == 0:
            where, why = "before step 0", BEFORE
        else:
            where = f"step {step - 1}" if known.phase == 0 else "the step that was proven"
            if known.phase == 0 and self._begun is None and not is_shown(step - 1):
                # It may have arisen in one of the steps before.
                where = f"by {where}"
            why = {SESSION_STATE: BEHIND_STATE, REST: BEHIND_REST}.get(name, BEHIND)
            why = f"{why}{aside((*known.aside, *reached.aside))}"
        return f"{where}: {what} {self._than(fact)}. {why}"


def _alike(one: Digest, machine: str, fact: Fact, near: Near) -> bool:
    if machine and machine == fact.machine:
        return one.bits == fact.digest.bits
    return one.bits == fact.digest.bits or near.same(one, fact.digest)


CALLS = (
    "How often a step calls session.backward(...) has to follow from the step and from what all workers have alike: from "
    "what backward returns, or from session.state"
)
TURNS = (
    "Whether a turn trains has to follow from the step and from what all workers have alike: from what backward returned, "
    "or from session.state"
)
BEFORE = (
    "What a script begins with has to be the same in every process: seed what is drawn before the loop, "
    "`torch.manual_seed(0)`"
)
COUNT = "The count of enumerate(data) begins at 0 on a joining worker: use session.step % len(data), in each step"
BEHIND = (
    "The script does something after session.backward(...) on the leader alone, or it depends there on something that a "
    "joining worker does not have, such as a sum over the steps of an epoch: keep that in session.state, or in an object "
    f"that is given to Session(...). {COUNT}"
)
ASIDE = (
    "The script has changed these, and the session does not keep them: {}. Give Session(...) what has a state_dict, and "
    'for an attribute Variables(object, "attribute"); any other variable belongs into session.state'
)
BEHIND_STATE = (
    "What is written into session.state has to follow from the step, from what backward returns and from session.state "
    "itself, not from this worker's own microbatches, clock or variables"
)
BEHIND_REST = (
    "A buffer that is not saved, as a cache of keys and values, is written to on every worker or on none: call its module "
    "on all, not `if session.leader:`. What session.state or an object given to Session(...) keeps has to follow from the "
    "step, from what backward returns and from itself; if a tensor or list there is data that the script reads as well, "
    "keep a copy of it, tensor.clone(), because loading a state writes into it"
)
NAMES = {
    SESSION_STATE: SESSION_STATE,
    REST: "a tensor of no layer (a buffer with persistent=False, or one of session.state or another object)",
}
RESTORED = "load_state_dict of an object that is given to Session(...) did not restore all that its state_dict had saved"


def aside(names: tuple[str, ...]) -> str:
    """Return a sentence on what a script has changed and nobody keeps, to be appended."""
    return f". {ASIDE.format(', '.join(dict.fromkeys(names)))}" if names else ""


def _advice(what: str, step: int) -> str:
    if what == BATCH and not step:
        return (
            "Microbatches have to be the same in every process: seed what is drawn before the loop, "
            "`torch.manual_seed(0)`, and sort what comes out of a set or a folder, `sorted(set(words))`"
        )
    if what == BATCH:
        return (
            "Microbatches have to depend on the step only, not on what the script drew or counted before, because a joining "
            f"worker has not drawn or counted that. {COUNT}"
        )
    if what.startswith(WRITTEN):
        return (
            "Its modules depend on something that is not given to Session(...), such as a momentum that the script has set: "
            "set it in each step, or at the start of each epoch, from the step or from session.state"
        )
    if what in (LOSS, GRAPH):
        return (
            "loss_of depends on something that is neither in its microbatch nor given to Session(...): a count, an average "
            "or a setting that the script keeps belongs into session.state"
        )
    return (
        "The same loss has other gradients there: by a hook, a model that is not given to Session(...), or a value that the "
        "script keeps for itself; what changes from step to step belongs into session.state"
    )
