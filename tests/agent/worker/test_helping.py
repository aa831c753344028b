"""The workers of a job's first layout measure its model together, and whatever happens to one of them, the job trains on.

The leader hands out work and waits, before it measures anything itself, until the others have begun with theirs.
"""

from pathlib import Path

import msgspec
import pytest
from crews import Crew, played_alone, until
from deep_toy import Tied
from injection import Fault, Kind, Line, Plan
from test_unbuilt import unbuilt_toy

from agent.messages import JobProfiled, WorkerLost
from agent.profile import Profile

pytestmark = pytest.mark.processes

TOY = Path(__file__).parents[1].joinpath("deep_toy.py")
STEPS = 12
BEGUN = ("survey: round begun", "survey: section begun")
SLOW = """
import json
from agent import session as ours
from agent.calibration import section_times
from agent.worker.survey import helper
from agent.calibration import measurement

me, helpers, ledger = ours._world.me, HELPERS, Path(LEDGER)
section_times.SECONDS_LEAST = 40.0
opened = helper.Helpers.open


def others():
    return {
        line["who"]
        for line in map(json.loads, ledger.read_text().splitlines())
        if line["point"] in BEGUN and line["who"] != me
    }


def open_and_wait(self, plan, board):
    opened(self, plan, board)
    while self.waiting and len(others()) < helpers:
        self._crew.go_on()
        time.sleep(0.01)


helper.Helpers.open = open_and_wait
"""
SESSION = "\nfrom orchestrator import Session"


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return played_alone(TOY, tmp_path_factory.mktemp("alone") / "out.pt", str(STEPS))[1]


class Trial:
    """A job with a ledger of who measured what. The first worker leads; the second is armed."""

    def __init__(self, crew: Crew, helpers: int, more: str = "", script: str | None = None) -> None:
        self.crew, self.helpers = crew, helpers
        self.ledger, self.out = crew.folder / "ledger", crew.folder / "out.pt"
        self.ledger.touch()
        slow = SLOW.replace("HELPERS", str(helpers)).replace("LEDGER", repr(str(self.ledger)))
        slow = slow.replace("BEGUN", repr(BEGUN)) + more + SESSION
        self.script = (script or TOY.read_text()).replace("from orchestrator import Session", slow)

    def begin(self, workers: int, *armed: Fault, who: str = "w2") -> list[str]:
        self.crew.settle = workers
        self.crew.open(self.script, str(STEPS), str(self.out))
        for number in range(1, workers + 1):
            faults = armed if who == f"w{number}" else ()
            plan = Plan(who=f"w{number}", ledger=str(self.ledger), faults=faults)
            (name,) = self.crew.start(1, msgspec.json.encode(plan).decode())
            until(f"{name} to be ready", lambda name=name: name in self.crew.ready)
        return list(self.crew.ready)

    def profiled(self) -> Profile:
        return until("a profile", lambda: self.crew.of(JobProfiled))[0].profile

    def lines(self) -> list[Line]:
        return [
            msgspec.json.decode(line, type=Line) for line in self.ledger.read_bytes().splitlines()
        ]

    def passed(self, *points: str) -> set[str]:
        return {line.who for line in self.lines() if line.point in points}

    def ends_as(self, bits: bytes) -> None:
        assert self.crew.completed().step == STEPS
        assert self.out.read_bytes() == bits


def whole(profile: Profile) -> None:
    """All of the model, and times for each section."""
    weights = sum(param.nbytes for param in Tied().parameters())
    assert sum(section.parameter_bytes for section in profile.sections) >= weights
    assert [section.after for section in profile.sections][-1] == -1
    for section in profile.sections:
        assert section.forward_s[0] > 0
        assert section.backward_s[0] > 0
        assert len(section.untraced_s) == len(section.fresh_s) == 1
    assert any(section.stash_bytes for section in profile.sections)
    assert profile.send_s > 0
    assert profile.reserved_bytes > 0


def test_each_measures_a_part(crew: Crew, alone: bytes) -> None:
    """One profile, of what all of them have measured. Of two helpers one begins with rounds, as the leader does."""
    trial = Trial(crew, 2)
    names = trial.begin(3)
    whole(trial.profiled())
    trial.ends_as(alone)
    assert trial.passed(*BEGUN) == set(names)
    assert trial.passed("survey: part sent") == set(names[1:])
    first = {line.who: line.point for line in reversed(trial.lines()) if line.point in BEGUN}
    assert sorted(first[name] for name in names[1:]) == list(BEGUN)
    assert [report.worker for report in crew.of(JobProfiled)] == ["w1"]
    assert crew.of(WorkerLost) == []


def test_a_model_that_nobody_has_is_measured_in_parts(crew: Crew, alone: bytes) -> None:
    """Handed over unbuilt: each worker measures sections, with zeros standing in, and nobody a whole round."""
    trial = Trial(crew, 1, script=unbuilt_toy())
    crew.depth, crew.owned = 2, True
    names = trial.begin(2)
    whole(trial.profiled())
    trial.ends_as(alone)
    assert trial.passed("survey: section begun") == set(names)
    assert trial.passed("survey: round begun") == set()


@pytest.mark.parametrize(
    ("point", "kind"),
    [
        ("survey: called", "kill"),
        ("survey: section begun", "stop"),
        ("survey: part sent", "term"),
    ],
)
def test_a_helper_that_is_lost(crew: Crew, alone: bytes, point: str, kind: Kind) -> None:
    """The layout is another one then, and its leader measures alone."""
    trial = Trial(crew, 1)
    trial.begin(2, Fault(point=point, passing=1, kind=kind))
    whole(trial.profiled())
    trial.ends_as(alone)
    assert len(crew.of(WorkerLost)) == 1
    assert [line.kind for line in trial.lines() if line.kind is not None] == [kind]


def test_a_helper_that_cannot_do_it(crew: Crew, alone: bytes) -> None:
    """The leader takes over what it had, and nobody is lost."""
    trial = Trial(crew, 1)
    trial.begin(2, Fault(point="survey: section begun", passing=1, kind="memory"))
    whole(trial.profiled())
    trial.ends_as(alone)
    assert crew.of(WorkerLost) == []
    assert trial.passed("survey: part sent") == set()


def test_a_helper_that_hangs(crew: Crew, alone: bytes) -> None:
    """Its heartbeats go on, so nobody is told; the leader does not wait for it, and its profile is whole."""
    trial = Trial(crew, 1)
    trial.begin(2, Fault(point="survey: section begun", passing=1, kind="hang"))
    whole(trial.profiled())
    assert crew.step == 0
    crew.kill("w2")
    trial.ends_as(alone)


def test_a_leader_that_is_lost(crew: Crew, alone: bytes) -> None:
    """Whoever helped it knows that nobody has measured the model, and does."""
    trial = Trial(crew, 1)
    trial.begin(2, Fault(point="survey: round begun", passing=1, kind="kill"), who="w1")
    whole(trial.profiled())
    trial.ends_as(alone)
    assert [report.worker for report in crew.of(JobProfiled)] == ["w2"]


UNLIKE = """
if me != "w1":
    measurement.machine_kind = lambda _: "another kind of machine"
"""
CANNOT = """
from agent.pipeline.tracing.recorder import Recorder
if me != "w1":
    Recorder.recording = lambda self: 1 // 0
"""


@pytest.mark.parametrize("more", [UNLIKE, CANNOT])
def test_who_cannot_help_goes_on(crew: Crew, alone: bytes, more: str) -> None:
    """A machine of another kind has no part in this kind's profile, and a loop may not be recordable everywhere."""
    trial = Trial(crew, 0, more)
    trial.begin(2)
    whole(trial.profiled())
    trial.ends_as(alone)
    assert trial.passed(*BEGUN) == {"w1"}
    assert trial.passed("survey: called") == (set() if more == UNLIKE else {"w2"})
    assert crew.of(WorkerLost) == []
