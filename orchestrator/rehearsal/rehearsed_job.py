"""One job of a rehearsal, with a class that takes the manager's part for it."""

import time
from collections.abc import Callable
from typing import Any

import msgspec

from agent.keys import INBOX
from agent.layout import Layout, data_parallel
from agent.messages import (
    SERVED,
    UNRECORDED,
    AnyReport,
    JobCompleted,
    JobOrder,
    Progress,
    When,
    WorkerFailed,
    WorkerLost,
    WorkerReady,
)
from orchestrator.errors import OrchestratorError
from orchestrator.formatting import plural, reason_of
from orchestrator.rehearsal.bench import Stage

LOOK_MS = 30
# Without any report. It is long because a script may take long to load its data.
PATIENCE_S = 900.0
REPLACED_MAX = 4
# The keeper looks ten times a second whether a worker waits for a step.
LACKING_S = 0.5
COUNT = 200
# A refusal is a sentence; Python puts the name of its class before it.
SENTENCES = ("refused", "unsupported")  # kinds of failure whose detail is a sentence


class Fault(OrchestratorError):  # noqa: N818 - it names what was found
    """The script failed; the message is for the person, and `detail` is a traceback or empty."""

    def __init__(self, line: str, detail: str = "") -> None:
        super().__init__(line)
        self.line, self.detail = line, detail


class TooShort(Fault):
    """The script is at its end before anything can happen to it."""


class Troupe:
    """The workers of one job, with the decisions that a manager would make.

    It reads reports while it waits for something. Every worker that is ready or lost leads to a
    new layout, as in a house.
    """

    def __init__(self, stage: Stage, order: JobOrder, script: bytes, depth: int) -> None:
        assert stage.keeper is not None
        self._stage, self._keeper, self._order, self._script = stage, stage.keeper, order, script
        self.job, self._depth = order.job, depth
        self._after, self._generation = _end(stage), 0
        self._workers: set[str] = set()
        # How many workers must be ready before there is a first layout, and whether there is one.
        self._wanted, self._layouts = 0, False
        self._leaving: set[str] = set()
        self._replaced = 0
        self._heard_s = time.monotonic()
        self.ready: list[str] = []
        self.step = 0
        self.facts: WorkerReady | None = None  # the last report of a worker about the script
        self.uncut = ""  # why the model could not stay in stages
        self.completed: JobCompleted | None = None
        self.said: Callable[[], None] = lambda: None

    # --- what is done to it -----------------------------------------------------------------------

    def open(self, hold: int | None) -> None:
        """Begin the job, or go on with it; the keeper does not commit step `hold`."""
        self._keeper.open_job(self._order, self._script)
        self._keeper.hold(self.job, hold)

    def start(self, count: int) -> None:
        """Start `count` more workers. If there are none yet, the job waits until all are ready."""
        self._wanted = len(self.ready) + count
        for _ in range(count):
            self._start()

    def _start(self) -> None:
        slot = len(self._workers)
        worker = f"w{slot + 1}"
        self._workers.add(worker)
        self._stage.start(self.job, worker, slot)

    def kill(self, *workers: str) -> None:
        """Kill workers at once and without notice, as a cloud does."""
        self._leaving |= {*workers}
        # One that ends by itself meanwhile is replaced; those that were killed are not waited for.
        self._wanted = max(1, self._wanted - len(workers))
        for worker in workers:
            self._stage.kill(worker)
        self._until(lambda: not {*workers} & {*self.ready})

    def goes_to(self, step: int) -> None:
        """Commit all steps before this one, and wait until all workers stand in it."""
        self._keeper.hold(self.job, step)
        self._until(lambda: self._keeper.standing(self.job).held)

    def lets_in(self, step: int, last: int) -> int:
        """Go on from `step` step by step until all started workers have passed their proof.

        The result of a step is known only when the next step is prepared, so a joining worker may
        need several steps. Return the step in which all workers stand now.
        """
        lacking_s = 0.0
        while len(self.ready) < self._wanted:
            self._listen()
            standing = self._keeper.standing(self.job)
            if not (standing.held and standing.lacking):
                lacking_s = 0.0
            elif not lacking_s:
                lacking_s = time.monotonic()
            elif time.monotonic() > lacking_s + LACKING_S:
                if step >= last:
                    raise Fault(
                        f"a worker that joined found no step by step {step} that it could reproduce: "
                        f"{more_steps(self.facts, self._order.stop_at)}"
                    )
                step, lacking_s = step + 1, 0.0
                self.goes_to(step)
        return step

    def close(self) -> None:
        """Close the job until it is opened again."""
        self._leaving |= self._workers
        self.ready.clear()
        self._layouts = False
        self._keeper.close_job(self.job)

    def waits(self) -> None:
        """Wait until all started workers have reached the loop and passed their proof, if any."""
        self._until(lambda: len(self.ready) >= self._wanted)

    def ends(self) -> JobCompleted:
        """Let the job go on to its end, and return the report of that."""
        self._keeper.hold(self.job, None)
        self._until(lambda: self.completed is not None)
        assert self.completed is not None
        return self.completed

    @property
    def is_served(self) -> bool:
        """Whether its workers are nodes of a parameter server."""
        return self.facts is not None and self.facts.uncuttable == SERVED

    # --- what is heard ----------------------------------------------------------------------------

    def _until(self, true: Callable[[], bool]) -> None:
        while not true():
            if self.completed is not None:
                raise Fault(
                    f"the loop ended after {self.completed.step} steps, and it did not when the script ran alone: whether "
                    "it stops has to follow from what backward returns and from session.state"
                )
            self._listen()

    def _listen(self) -> None:
        """Read the new reports and act on them; raise `Fault` after `PATIENCE_S` without any."""
        rows: Any = self._stage.client.xread({INBOX: self._after}, count=COUNT, block=LOOK_MS)
        for key, fields in (row for _, found in rows or [] for row in found):
            self._after = key
            report = msgspec.json.decode(fields[b"e"], type=AnyReport)
            self._heard_s = time.monotonic()
            if getattr(report, "job", None) == self.job:
                self._hear(report)
        if time.monotonic() > self._heard_s + PATIENCE_S:
            raise Fault(
                f"nothing has happened for {PATIENCE_S / 60:.0f} minutes in step {self.step}"
            )

    def _hear(self, report: AnyReport) -> None:
        match report:
            case WorkerReady() if report.worker not in self._leaving:
                self._on_ready(report)
            case WorkerFailed():
                raise _fault(report)
            case WorkerLost():
                self._on_lost(report)
            case Progress():
                self.step = max(self.step, report.step)
                self.said()
            case JobCompleted():
                self.completed = report
            case _:
                pass

    def _on_ready(self, report: WorkerReady) -> None:
        self.facts = report
        if report.worker not in self.ready:
            self.ready.append(report.worker)
            if self._layouts or len(self.ready) >= self._wanted:
                self._regroup("boundary")
        elif self._depth > 1 and report.uncuttable not in ("", UNRECORDED):
            self._depth, self.uncut = 1, report.uncuttable
            self._regroup("now")

    def _on_lost(self, report: WorkerLost) -> None:
        """Regroup the workers that are left, and replace a worker that ended by itself.

        That is no fault: a worker ends if it cannot go on after an interrupted step.
        """
        if report.worker in self.ready:
            self.ready.remove(report.worker)
            self._layouts = bool(self.ready)
            if self.ready:
                self._regroup("now")
        if report.worker not in self._leaving:
            self._replaced += 1
            if self._replaced > REPLACED_MAX:
                words = self._stage.last_words() or report.detail
                raise Fault(f"workers end by themselves again and again: {words}")
            self._start()

    def _regroup(self, when: When) -> None:
        self._layouts = True
        self._generation += 1
        self._keeper.regroup(self.job, self._layout(), when)

    def _layout(self) -> Layout:
        """Return a layout of chains of `depth` workers, or of one chain if there are fewer."""
        assert self.facts is not None
        depth = min(self._depth, len(self.ready))
        width = min(len(self.ready) // depth, self.facts.microbatches)
        names = tuple(map(str, range(width)))
        even = data_parallel(self._generation, self.facts.microbatches, names)
        replicas = (
            msgspec.structs.replace(one, workers=tuple(self.ready[depth * at : depth * (at + 1)]))
            for at, one in enumerate(even.replicas)
        )
        return msgspec.structs.replace(even, replicas=tuple(replicas))


def more_steps(facts: WorkerReady | None, asked: int) -> str:
    """Say how a rehearsal gets more steps: none of the script's own end comes by asking for more."""
    if facts is not None and 0 < facts.steps_total < asked:
        return f"the script has {plural(facts.steps_total, 'step')}: let it do more"
    return f"give it more, --steps {2 * asked}"


def _end(stage: Stage) -> Any:
    """Return the id of the newest report in the inbox."""
    newest: Any = stage.client.xrevrange(INBOX, count=1)
    return newest[0][0] if newest else "0"


def _fault(failed: WorkerFailed) -> Fault:
    """Return the fault for a failed worker; its detail is a sentence or a Python traceback."""
    detail = failed.detail.strip()
    where = (
        f"in step {failed.step}: "
        if failed.step is not None and failed.kind not in SENTENCES
        else ""
    )
    return Fault(f"{where}{reason_of(detail)}", detail if "\n" in detail else "")
