"""The fault menu at every point of a step, a morph and a save: no committed step is lost or applied twice.

A job runs on while one fault after the other happens to it, each in a newcomer of its own that is armed for it. A
gate in the script sees to it that the job does not end before.
"""

import ast
import contextlib
import itertools
import os
import random
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import injection
import msgspec
import pytest
from crews import Crew, KeeperProcess, Nursery, RedisProcess, played_alone, until
from explain import state_of
from injection import Fault, Kind, Line, Plan
from waiting import write_whole

import agent
from agent import faults
from agent.keeper import roster
from agent.messages import (
    AnyReport,
    CheckpointFailed,
    CheckpointWritten,
    JobCompleted,
    Rewound,
    WorkerFailed,
    WorkerLost,
    WorkerReady,
)

HERE = Path(__file__).parent
STEPS = 240
SEED = 20261121
WORKERS = {
    1: 3,
    2: 4,
    3: 3,
}  # by depth, the armed one included; of three, each keeps its own stage only

# A job goes through twenty faults, one after the other.
pytestmark = pytest.mark.timeout(400, func_only=True)

HANDED = ("morph: hand-over begun", "morph: part sent")  # passed when yet another one joins
BESIDE = ("save: share sent",)  # on a thread beside the script's
REDUCED = ("step: sums sent", "step: sums taken")  # among the replicas of a stage
PHASES = (injection.STEP, injection.MORPH, injection.SAVE)
NOT_PASSED = {
    1: {"step: stage played", "morph: cuts told"},
    2: {"step: microbatch computed"},
    3: {"step: microbatch computed", *REDUCED, *HANDED},
}
PLACES = {
    depth: [point for points in PHASES for point in points if point not in out]
    for depth, out in NOT_PASSED.items()
}
# Two chains that have all layers differ from one by what is among replicas only.
MENUS = {1: PHASES, 2: ((*REDUCED, *HANDED),), 3: PHASES}
# The points of deaths that chains of sole owners do not pass.
KILLED = {
    1: ("step: microbatch computed", "step: sums sent", "morph: hand-over begun"),
    2: ("step: sums taken", "morph: part sent"),
    3: (),
}
SILENT: tuple[Kind, ...] = ("stop", "term", "hang", "corrupt", "reset", "exception", "memory")
# Where nobody else is needed, and no code of the script's or of torch's runs.
UNAIDED = (
    *(point for point in injection.MORPH if point != "morph: cuts told"),
    "step: prepared",
    "step: commit heard",
    "step: installed",
    "save: snapshot begun",
)
BETWEEN = (*REDUCED, "step: slice sent")  # in deep chains amid what computes
GRADIENTS = {1: "step: microbatch computed", 2: "step: stage played", 3: "step: stage played"}


def keeper_faults() -> list[Fault]:
    """What a keeper can meet at each of its points; those that end its process come last at each."""
    writes: tuple[Kind, ...] = ("full", "unavailable", "exception", "memory", "kill")
    menu: dict[str, tuple[Kind, ...]] = {
        "keeper: assembled": ("exception", "memory", "stop", "corrupt", "reset", "kill"),
        "keeper: part drafted": (*writes[:-1], "stop", "kill"),
        "keeper: mark drafted": (*writes[:-1], "stop", "term"),
        "keeper: manifest written": (*writes[:-1], "stop", "kill"),
        "keeper: pruned": (*writes[:-1], "stop", "term"),
    }
    return [
        Fault(point=point, passing=number, kind=kind)
        for point, kinds in menu.items()
        for number, kind in enumerate(kinds, start=1)
    ]


def of_every_kind(depth: int) -> list[Fault]:
    """Everything of the menu in every phase, and every point at least once, as a seed has it; and some kills."""
    dice, found = random.Random(SEED + depth), list[Fault]()
    for phase in MENUS[depth]:
        points = [point for point in phase if point in PLACES[depth]]
        kinds = list(SILENT)
        dice.shuffle(points)
        dice.shuffle(kinds)
        pairs = zip(itertools.cycle(points), itertools.cycle(kinds), strict=False)
        count = max(len(points), len(kinds))
        found += [_fault(dice, *pair) for pair in itertools.islice(pairs, count)]
    found += [_fault(dice, point, "kill") for point in KILLED[depth]]
    dice.shuffle(found)
    return found


def twenty_kills(depth: int) -> list[Fault]:
    """Every point at least once."""
    dice = random.Random(SEED - depth)
    points = [*PLACES[depth], *dice.choices(PLACES[depth], k=20)][:20]
    dice.shuffle(points)
    return [_fault(dice, point, "kill") for point in points]


def _fault(dice: random.Random, point: str, kind: Kind) -> Fault:
    often = point.startswith("step:")
    return Fault(point=point, passing=dice.randint(1, 2) if often else 1, kind=kind)


class Trial(Crew):
    """A crew in which newcomers take any place of the layout, and failures are looked at by the test."""

    dice = random.Random(SEED)

    def _well(self) -> None:
        """Whoever fails is one of them."""

    def _decide(self, report: AnyReport) -> None:
        if isinstance(report, WorkerReady) and report.worker not in self.ready:
            super()._decide(report)
            self.ready.remove(report.worker)
            self.ready.insert(self.dice.randrange(WORKERS[self.depth]), report.worker)
            if len(self.ready) >= self.settle:
                self.regroup("boundary")
        else:
            super()._decide(report)


class Job:
    """A job whose steps pass a gate, and the ledger of what happened to it."""

    def __init__(self, crew: Trial, depth: int, **options: object) -> None:
        self.crew, self.depth = crew, depth
        self.out = crew.folder / "out.pt"
        self.gate = crew.folder / "out.pt.hold"
        self.ledger = crew.folder / "ledger"
        self.ledger.touch()
        self.open_to(2)
        script, *argv = command(depth, crew.folder, self.out)
        crew.depth, crew.owned = depth, depth == 3
        self.steady = WORKERS[depth] - 1
        self.hangs_are_found = False  # by the keeper, before a manager gets impatient
        crew.begin(self.steady, Path(script).read_text(), *argv, **options)
        crew.reach(2)
        crew.settle = 1

    def open_to(self, step: int) -> None:
        write_whole(self.gate, step)
        self.opened = step

    def go(self, steps: int) -> None:
        self.open_to(self.crew.step + steps)

    def go_on(self) -> None:
        """A state is not asked for at every step: whoever waits for one to be sent has more of them played."""
        if self.crew.step >= self.opened:
            self.go(1)

    def lines(self) -> list[Line]:
        return [
            msgspec.json.decode(line, type=Line)
            for line in self.ledger.read_bytes().split(b"\n")[:-1]
        ]

    def saves(self) -> int:
        """How many the keeper has told of."""
        return len(self.crew.of(CheckpointWritten)) + len(self.crew.of(CheckpointFailed))

    def happened(self) -> list[Line]:
        return [line for line in self.lines() if line.kind is not None]

    def plan(self, who: str, *armed: Fault) -> str:
        plan = Plan(who=who, ledger=str(self.ledger), faults=armed)
        return msgspec.json.encode(plan).decode()

    # --- faults of workers ----------------------------------------------------------------------------

    def newcomer(self, plan: str = "") -> str:
        """One more, who takes part from the next boundary on."""
        (name,) = self.crew.start(1, plan)
        ready = f"{name} to be ready"
        # It proves itself first, for which the job has to go on.
        self.crew.step_on(self.gate, ready, lambda: name in self.crew.ready, name)
        self.opened = int(self.gate.read_text())
        return name

    def suffer(self, number: int, fault: Fault) -> None:
        while len(self.crew.ready) < self.steady:
            self.newcomer()
        name = self.newcomer(self.plan(str(number), fault))
        self.go(3)
        if fault.point in HANDED:
            self.crew.reach(self.opened)
            self.newcomer()
            self.go(3)
        until(f"{fault}", lambda: len(self.happened()) > number or self.go_on())
        self.face(name, fault)
        self.crew.reach(self.opened)
        self.dismiss(name)

    def face(self, name: str, fault: Fault) -> None:
        """What must be seen of it, as a manager sees it."""
        beside = fault.point in BESIDE
        match fault.kind:
            case "kill" | "term":
                assert self.lost(name).cause == "connection"
            case "stop":
                assert self.lost(name).cause == "silent"
                self.crew.kill(name, how=signal.SIGCONT)
            case "hang" if self.hangs_are_found:
                lost = self.lost(name)
                assert (lost.cause, lost.detail[:8]) == ("silent", "it hangs")
            case "hang" if not beside:
                self.crew.kill(name)  # it lives and does nothing: a manager ends such a one
                self.lost(name)
            case "exception" | "memory" if not beside:
                kind = "Injected" if fault.kind == "exception" else "MemoryError"
                failed = until("the failure", lambda: self.of(WorkerFailed, name))
                assert failed.kind == "exception"
                assert f"{kind}: a test wanted it at {fault.point!r}" in failed.detail
            case _:
                pass  # whoever is lost by it, if anybody, is asked no further

    def lost(self, name: str) -> WorkerLost:
        return until(f"the loss of {name}", lambda: self.of(WorkerLost, name))

    def of(self, kind: type, name: str) -> AnyReport | None:
        return next((report for report in self.crew.of(kind) if report.worker == name), None)

    def dismiss(self, *armed: str) -> None:
        """Whoever is over, the armed one before others, is ended: the next fault meets as many as this one."""
        for name in [*armed, *self.crew.ready[self.steady :]]:
            if name in self.crew.ready and len(self.crew.ready) > self.steady:
                # By what happened to it, it may be gone already, and its loss on the way to us.
                with contextlib.suppress(ProcessLookupError):
                    self.crew.kill(name)
                until(f"{name} to be gone", lambda name=name: name not in self.crew.ready)

    # --- the end --------------------------------------------------------------------------------------

    def ends_alike(self) -> None:
        """The end, with the bits of one process; and each step is in Redis's own journal exactly once."""
        end, alone = self.opened + 1, self.crew.folder / "alone" / "out.pt"
        alone.parent.mkdir()
        for out in (self.out, alone):
            write_whole(out.with_name("out.pt.end"), end)
        self.open_to(STEPS)
        assert until("the end", lambda: self.crew.of(JobCompleted))[0].step == end
        script, *arguments = command(self.depth, self.crew.folder, alone)
        lines, weights = played_alone(Path(script), alone, *arguments[:-1])
        # What fails beside the script leaves its traceback in the log as well.
        told = {line for line in self.crew.printed() if line.startswith("step ")}
        assert told <= set(lines)
        assert self.out.read_bytes() == weights
        assert self.crew.of(Rewound) == []
        assert commits(self.crew.redis) == list(range(1, end + 1))


LEAVES = """\
    end = Path(f"{out}.end")
    if end.exists() and step + 1 == int(end.read_text()):
        break
"""


def commits(server: RedisProcess) -> list[int]:
    """The steps of all commits that Redis has taken, in its order: from its append-only file."""
    (file,) = server.socket.parent.rglob("*.incr.aof")
    words = iter(file.read_bytes().split(b"\r\n"))
    found = []
    for count in words:
        if not count.startswith(b"*"):
            continue
        command = [next(words) for _ in range(2 * int(count[1:]))][1::2]
        if command[:2] == [b"HSET", b"orch:commit:job"] and b"step" in command:
            found.append(int(command[command.index(b"step") + 1]))
    return found


def command(depth: int, folder: Path, out: Path) -> list[str]:
    """A script of each sort, which leaves its loop at the step in OUT.end, if there is one.

    The one that is cut has half its blocks, to be recorded and cut again so often.
    """
    script, text = folder / "train.py", (HERE / ("toy.py", "deep_toy.py")[depth > 1]).read_text()
    text = text.replace("blocks: int = 4", "blocks: int = 2")
    loop, saves = text.rindex("for step in"), "if session.leader:\n{}    torch.save"
    indent = " " * (loop - text.rindex("\n", 0, loop) - 1)
    saves = f"{indent}{saves.format(indent)}"
    assert saves in text
    script.write_text(text.replace(saves, textwrap.indent(LEAVES, indent) + saves))
    return [str(script), str(STEPS), *["0"] * (depth == 1), str(out)]


@pytest.fixture(scope="module", params=[1, 2, 3], ids=["flat", "deep", "owned"])
def depth(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture
def trial(redis_process: RedisProcess, nursery: Nursery, tmp_path: Path) -> Iterator[Trial]:
    trial = Trial(redis_process, nursery, tmp_path)
    yield trial
    trial.close()


@pytest.mark.processes
@pytest.mark.parametrize("depth", [3], indirect=True, ids=["owned"])
def test_twenty_kills(trial: Trial, depth: int) -> None:
    """Twenty workers are killed in one run, at every point of a step, of a morph and of a snapshot."""
    job = Job(trial, depth, backup_every_steps=2)
    for number, fault in enumerate(twenty_kills(depth)):
        job.suffer(number, fault)
    job.ends_alike()
    killed = [line.point for line in job.happened()]
    assert len(killed) == 20
    assert set(killed) == set(PLACES[depth])
    points = {point for phase in PHASES for point in phase}
    assert points == {*killed, *KILLED[1], *KILLED[2]}, "every point is one of a death"


@pytest.mark.processes
def test_the_menu(trial: Trial, depth: int) -> None:
    """Stopped, ended, hung, damaged, cut off, failed and out of memory, at every point of a worker; killed at some."""
    job = Job(trial, depth, backup_every_steps=2)
    for number, fault in enumerate(of_every_kind(depth)):
        job.suffer(number, fault)
    job.ends_alike()
    happened = job.happened()
    passed = {point for phase in MENUS[depth] for point in phase} & set(PLACES[depth])
    assert {line.point for line in happened} == passed
    for phase in MENUS[depth]:
        assert {line.kind for line in happened if line.point in phase} >= set(SILENT)
    assert {line.point for line in happened if line.kind == "kill"} == set(KILLED[depth])


@pytest.mark.processes
@pytest.mark.parametrize("depth", [1, 3], indirect=True, ids=["flat", "owned"])
def test_the_keeper_finds_who_hangs(
    trial: Trial, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after the other hangs in a hand-over, or between a step's sum and the next step, and says that it is alive. It
    is given up, and nobody else; the others commit on."""
    monkeypatch.setattr(roster, "HUNG_S", 1.0)
    job = Job(trial, depth, backup_every_steps=2)
    job.hangs_are_found = True
    due = UNAIDED if depth > 1 else (*UNAIDED, *BETWEEN)
    points = [point for point in due if point in PLACES[depth]]
    for number, point in enumerate(points):
        job.suffer(number, Fault(point=point, passing=1, kind="hang"))
    job.ends_alike()
    assert [line.point for line in job.happened()] == points
    found = [lost for lost in trial.of(WorkerLost) if lost.detail.startswith("it hangs")]
    assert len(found) == len(points)


@pytest.mark.processes
@pytest.mark.parametrize("depth", [1, 3], indirect=True, ids=["flat", "owned"])
def test_a_gradient_that_is_not_finite(trial: Trial, depth: int) -> None:
    """One microbatch's NaN on one worker: all fail with the step's number, and it is not committed."""
    job = Job(trial, depth)
    fault = Fault(point=GRADIENTS[depth], passing=2, kind="nan")
    job.newcomer(job.plan("one", fault))
    job.go(3)
    failed = until("a failure", lambda: trial.of(WorkerFailed))[0]
    assert failed.kind == "nan"
    assert failed.detail.startswith(f"step {trial.step}: the loss is ")
    assert "one of its gradients is not finite" in failed.detail
    assert commits(trial.redis) == list(range(1, trial.step + 1))
    assert [line.kind for line in job.happened()] == ["nan"]


@pytest.mark.processes
def test_a_keeper_that_fails(redis_process: RedisProcess, nursery: Nursery, tmp_path: Path) -> None:
    """Full disks, a store that refuses, what nobody foresaw, and death, at every point of a save."""
    keeper = KeeperProcess(redis_process, tmp_path)
    trial = Trial(redis_process, nursery, tmp_path, keeper)
    try:
        job = Job(trial, 1, backup_every_steps=2, checkpoint_every_s=0.1)
        suffered = 0
        for _, group in itertools.groupby(keeper_faults(), lambda fault: fault.point):
            suffered = _keeper_suffers(job, keeper, suffered, list(group))
        _renew(keeper, "")
        job.ends_alike()
    finally:
        trial.close()
    assert {line.point for line in job.happened()} == set(injection.KEEPER)


def _keeper_suffers(job: Job, keeper: KeeperProcess, suffered: int, due: list[Fault]) -> int:
    """A new keeper meets one after the other; the last of them ends it."""
    _renew(keeper, job.plan(due[0].point, *due))
    for number, fault in enumerate(due, start=1):
        while len(job.happened()) < suffered + number:
            saves = job.saves()
            job.go(2)
            until(f"{fault}, or two steps", lambda n=number: _moved(job, suffered + n))
            if fault.point != "keeper: assembled":  # the others are met while something is saved
                until(
                    f"{fault}, or a save",
                    lambda n=number, saves=saves: (
                        len(job.happened()) >= suffered + n or job.saves() > saves
                    ),
                )
            if len(job.crew.ready) < job.steady:  # who does not understand the keeper is lost
                (name,) = job.crew.start(1)
                until(
                    f"{fault}, or {name}",
                    lambda n=number, name=name: (
                        len(job.happened()) >= suffered + n or name in job.crew.ready
                    ),
                )
        if fault.kind == "stop":
            until("the keeper to be stopped", lambda: state_of(keeper.process.pid) == "T")
            keeper.process.send_signal(signal.SIGCONT)
    assert keeper.process.ended(30.0)
    return suffered + len(due)


def _moved(job: Job, happened: int) -> bool:
    return len(job.happened()) >= happened or job.crew.step >= job.opened or not job.crew.ready


def _renew(keeper: KeeperProcess, plan: str) -> None:
    keeper.kill()
    keeper.faults = plan
    keeper.start()


def test_every_point_is_in_a_test_and_in_the_code() -> None:
    """A point that is registered and passed nowhere, or that no test lets fail, is found here.

    That each of them has been passed, armed, is asserted by the tests that go through these very lists.
    """
    places = {point for points in PLACES.values() for point in points}
    keepers = {fault.point for fault in keeper_faults()}
    elsewhere = {*injection.SURVEY, *injection.HELP}
    assert places | keepers | elsewhere == set(injection.POINTS)
    assert len(set(injection.POINTS)) == len(injection.POINTS)
    passed = set()
    for path in Path(agent.__path__[0]).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "passing":
                words = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant)]
                passed |= {word for word in words if isinstance(word, str) and ": " in word}
    assert passed == set(injection.POINTS)


def test_what_is_not_armed_does_nothing() -> None:
    """In a process that nobody has armed, points are passed and nothing happens."""
    for point in injection.POINTS:
        faults.passing(point)


STOPS = """
import threading
import injection
from agent import faults

def run():
    while True:
        faults.passing("step: prepared")

threading.Thread(target=run).start()
"""


@pytest.mark.processes
def test_who_is_stopped_at_a_point_does_not_run_on(tmp_path: Path) -> None:
    """The system wakes some other thread to stop a process, and the one that asked for it might pass a thousand points
    before that: it would be dead, and not stopped, where the next of them kills it."""
    stop, kill = (
        Fault(point="step: prepared", passing=number, kind=kind)
        for number, kind in enumerate(("stop", "kill"), start=1)
    )
    for number in range(5):
        plan = Plan(who=str(number), ledger=str(tmp_path / str(number)), faults=(stop, kill))
        armed = {**os.environ, injection.VARIABLE: msgspec.json.encode(plan).decode()}
        stopped = subprocess.Popen([sys.executable, "-c", STOPS], env=armed, cwd=HERE)
        until("it to be stopped", lambda pid=stopped.pid: state_of(pid) in "TZ")
        assert state_of(stopped.pid) == "T"
        stopped.send_signal(signal.SIGCONT)
        assert stopped.wait(60) == -signal.SIGKILL


def test_a_fault_is_of_a_point_that_exists() -> None:
    """A misspelt point would never happen."""
    with pytest.raises(ValueError, match="no such fault: 'step: sum sent', passing 1"):
        Fault(point="step: sum sent", passing=1, kind="kill")
