"""The scenes of a rehearsal: a script alone, then with all that can happen to a job.

The state at the end must be the same in both cases.

    alone       one worker does all of the steps: its state is the reference
    join        one worker begins, a second worker joins
    kill        the first worker is killed, the second goes on
    all lost    all workers are killed, and new ones go on
    resume      the job is closed, and other workers go on with it
    end         the state after the last step has the same bits as the reference

A job whose tables are served is played alone, and by two workers that share its blocks; what more may
happen to it does not touch its script, and its clocks are not held.

The other scenes after the first are played with the whole model on each worker, and again with the model
in two stages, if it can be cut.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from agent.errors import AgentError
from agent.keeper.proofs import aside
from agent.keeper.storage.backup import Backup
from agent.keys import log_key
from agent.messages import UNRECORDED, JobOrder
from orchestrator.formatting import plural
from orchestrator.rehearsal import comparison
from orchestrator.rehearsal.bench import Stage, Unready
from orchestrator.rehearsal.rehearsed_job import Fault, TooShort, Troupe

STEPS_MIN = 8
# The second worker joins after JOINS_AT steps; at least the last LEFT steps are kept for the later scenes, which share them
# evenly.
JOINS_AT, LEFT = 1, 4
BACKUP_STEPS = 2
LINES = 10_000
ALONE, SHARED, JOIN, KILL, ALL_LOST, RESUME, END = (
    "alone",
    "two workers share its blocks",
    "a second worker joins",
    "the first one is killed",
    "all are killed, fresh ones come",
    "closed, and resumed by others",
    "the same weights and session.state",
)

SERVED_LINE = (
    "it runs alone, and by two workers that share its blocks; its tables are served, so a loss does not "
    "touch the script, and none was tried"
)


class Scene(msgspec.Struct, frozen=True, kw_only=True):
    """One scene at a depth. A scene was `left_out` if it cannot be played, which is no fault."""

    name: str
    depth: int
    seconds: float = 0.0
    passed: bool = True
    left_out: bool = False
    why: str = ""


class SceneVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """What a rehearsal came to; if the script is too short for one, nothing was `tried`.

    `aside` names what the script keeps for itself and changes.
    """

    passed: bool
    tried: bool = True
    line: str
    steps: int
    scenes: tuple[Scene, ...]
    traceback: str = ""
    aside: tuple[str, ...] = ()


class Rehearsal:
    """A rehearsal of one script.

    `order` is the order of a job with this script. `says` is called after every scene, and `shows`
    gets a line about the present one.
    """

    def __init__(
        self,
        stage: Stage,
        order: JobOrder,
        script: bytes,
        says: Callable[[Scene], None],
        shows: Callable[[str], None],
    ) -> None:
        self._stage, self._order, self._script = stage, order, script
        self._says, self._shows = says, shows
        self._scenes: list[Scene] = []
        self._steps = order.stop_at
        self._near = False
        self._aside: tuple[str, ...] = ()

    def play(self) -> SceneVerdict:
        try:
            alone, troupe = self._alone()
            if troupe.is_served:
                self._shared()
                return self._verdict(passed=True, line=SERVED_LINE)
            self._with_losses(1, alone, troupe)
            why = self._uncut(troupe)
            if why:
                self._add(Scene(name="cut into two stages", depth=2, left_out=True, why=why))
            else:
                self._with_losses(2, alone, troupe)
        except (Fault, Unready, AgentError) as error:
            traceback = error.detail if isinstance(error, Fault) else ""
            verdict = self._verdict(passed=False, line=str(error), traceback=traceback)
            return msgspec.structs.replace(verdict, tried=not isinstance(error, TooShort))
        near = ", but for rounding" if self._near else ""
        line = f"it comes to the same{near}, whoever joins and whoever is lost"
        return self._verdict(passed=True, line=line)

    def _verdict(self, *, passed: bool, line: str, traceback: str = "") -> SceneVerdict:
        return SceneVerdict(
            passed=passed,
            line=line,
            steps=self._steps,
            scenes=tuple(self._scenes),
            traceback=traceback,
            aside=self._aside,
        )

    def _alone(self) -> tuple[Backup, Troupe]:
        troupe = self._troupe("alone", 1)
        with self._scene(ALONE, 1, troupe):
            troupe.open(None)
            troupe.start(1)
            completed = troupe.ends()
            self._steps, self._aside = completed.step, completed.aside
            if self._steps < STEPS_MIN and not troupe.is_served:
                raise TooShort(
                    f"the script trains in {plural(self._steps, 'step')}, and {STEPS_MIN} are needed for all that is tried: "
                    "let it do more"
                )
            return self._ended(troupe), troupe

    def _shared(self) -> None:
        troupe = self._troupe("shared", 1)
        with self._scene(SHARED, 1, troupe):
            troupe.open(None)
            troupe.start(2)
            troupe.ends()
            troupe.close()

    def _uncut(self, alone: Troupe) -> str:
        facts = alone.facts
        assert facts is not None
        if facts.stages_max > 1 and not facts.uncuttable:
            return ""
        told = facts.uncuttable if facts.uncuttable != UNRECORDED else ""
        return told or "its model has no place to be cut at"

    def _with_losses(self, depth: int, alone: Backup, before: Troupe) -> None:
        troupe = self._troupe(f"depth-{depth}", depth)
        with self._scene(JOIN, depth, troupe):
            troupe.open(JOINS_AT)
            troupe.start(1)
            troupe.goes_to(JOINS_AT)
            troupe.start(1)
            step = troupe.lets_in(JOINS_AT, self._steps - LEFT)
            # What a script comes to late, as an epoch's end, has a loss behind it, too.
            between = (self._steps - step - 1) // 3
            troupe.goes_to(step := step + between)
        with self._scene(KILL, depth, troupe):
            troupe.kill(troupe.ready[0])
            troupe.goes_to(step := step + between)
        with self._scene(ALL_LOST, depth, troupe):
            troupe.kill(*troupe.ready)
            troupe.start(2)
            troupe.waits()
            troupe.goes_to(step := step + between)
        with self._scene(RESUME, depth, troupe):
            troupe.close()
            troupe.open(step)
            troupe.start(2)
            troupe.waits()
            done = troupe.ends().step
        with self._scene(END, depth, troupe):
            self._compare(troupe, alone, before, done)
        if troupe.uncut:
            why = f"it did not stay in stages: {troupe.uncut}"
            self._add(Scene(name="cut into two stages", depth=depth, left_out=True, why=why))

    def _compare(self, troupe: Troupe, alone: Backup, before: Troupe, done: int) -> None:
        if done != self._steps:
            raise Fault(f"the loop ended after {done} steps, and after {self._steps} alone")
        other = self._ended(troupe)
        if not (differs := comparison.difference(alone, other)):
            return
        if not (self._rounds(troupe, before) and comparison.nearly(alone, other)):
            raise Fault(
                f"after {done} steps {differs} came out otherwise than alone, and no worker was seen to do anything "
                "otherwise: something that the script keeps outside of its session, or reads from its machine, decides it"
                + aside(self._aside)
            )
        self._near = True

    def _rounds(self, *troupes: Troupe) -> bool:
        """Return whether runs of this script may differ by rounding."""
        from agent.proof.evidence import UNSTEADY

        beginning = UNSTEADY.partition("{")[0].encode()
        for troupe in troupes:
            if troupe.facts is not None and not troupe.facts.exact:
                return True
            rows = self._stage.client.xrange(log_key(troupe.job), count=LINES)
            if any(fields[b"line"].startswith(beginning) for _, fields in rows):
                return True
        return False

    # --- one scene --------------------------------------------------------------------------------

    def _troupe(self, name: str, depth: int) -> Troupe:
        order = msgspec.structs.replace(
            self._order, job=name, backup_every_steps=BACKUP_STEPS, begins_with=0, sums="always"
        )
        return Troupe(self._stage, order, self._script, depth)

    def _ended(self, troupe: Troupe) -> Backup:
        found = comparison.ended(self._stage.checkpoints, troupe.job)
        troupe.close()
        return found

    @contextmanager
    def _scene(self, name: str, depth: int, troupe: Troupe) -> Iterator[None]:
        def show() -> None:
            stages = f", in {depth} stages" if depth > 1 else ""
            self._shows(f"{name}{stages}: step {troupe.step} of {self._steps}")

        troupe.said = show
        show()
        began_s = time.monotonic()

        def scene(why: str = "") -> Scene:
            took_s = time.monotonic() - began_s
            return Scene(name=name, depth=depth, seconds=took_s, passed=not why, why=why)

        try:
            yield
        except (Fault, Unready, AgentError) as error:
            self._add(scene(str(error)))
            raise
        self._add(scene())

    def _add(self, scene: Scene) -> None:
        self._scenes.append(scene)
        self._says(scene)
