"""How long a worker may be silent before the keeper gives it up."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from commit_logs import MemoryCommitLog

from agent.keeper.commits import Commit
from agent.keeper.job import KeptJob
from agent.keeper.layouts import RECONNECT_S
from agent.keeper.member import Pace
from agent.keeper.roster import SILENT_EARLY_S, SILENT_S, TICK_S
from agent.keeper.storage.vault import Place
from agent.layout import data_parallel
from agent.messages import JobOrder, Report
from agent.protocol import Held


class Said:
    """Where the job says what happens."""

    def __init__(self) -> None:
        self.reports: list[Report] = []

    def report(self, report: Report) -> None:
        self.reports.append(report)

    def numbers(self, job: str, step: int, numbers: dict[str, float]) -> None: ...

    def lines(self, job: str, worker: str, lines: tuple[str, ...]) -> None: ...

    def flush(self, patience_s: float) -> bool:
        return True


def test_who_is_silent_at_the_same_step_again_is_waited_for_longer(tmp_path: Path) -> None:
    """A script that holds up all threads at a step for longer than our patience gets past it in the end."""
    order = JobOrder(job="job", script="train.py", script_sha="")
    job = KeptJob(
        order, b"", MemoryCommitLog(), Said(), Place(checkpoints=tmp_path), lambda _: None
    )
    lives = 0
    while lives < 10:
        silent: Any = SimpleNamespace(
            version=0,
            held=None,
            worker=f"w{lives}",
            ready=object(),
            close=lambda: None,
            noticed=False,
            hung_s=0.0,
            proven=True,
            beats=Pace(1.0),
            silent_s=lambda _: 4.0 * SILENT_S - 0.1,
        )
        job.roster.members[silent.worker] = silent
        job.roster.layout = data_parallel(lives, 1, (silent.worker,))
        job.tick(0.0, 0.0)
        if silent.worker in job.roster.members:
            break
        lives += 1
    assert lives == 3
    job.history.note(Commit(version=1))
    job.roster.members[silent.worker].silent_s = lambda _: 4.0 * SILENT_S + 0.1
    job.tick(0.0, 0.0)
    assert not job.roster.members


def test_nobody_waits_for_whoever_is_outside_the_layout(tmp_path: Path) -> None:
    """A busy machine may keep a spare worker from speaking for a while; once it is in the layout, no longer."""
    order = JobOrder(job="job", script="train.py", script_sha="")
    job = KeptJob(
        order, b"", MemoryCommitLog(), Said(), Place(checkpoints=tmp_path), lambda _: None
    )
    spare: Any = SimpleNamespace(
        version=0,
        held=None,
        worker="w1",
        ready=object(),
        close=lambda: None,
        noticed=False,
        hung_s=0.0,
        beats=Pace(1.0),
        proven=True,
        silent_s=lambda _: 2.0 * SILENT_S,
    )
    job.roster.members["w1"] = spare
    job.tick(0.0, 0.0)
    assert "w1" in job.roster.members
    job.roster.layout = data_parallel(1, 1, ("w1",))
    job.tick(0.0, 0.0)
    assert not job.roster.members


def test_who_records_the_loop_is_waited_for_as_while_it_builds(tmp_path: Path) -> None:
    """To find out whether a script can be cut is done once, and nobody is tried a third time soon: who dies of it is heard of by its
    connection. Once it is told, silence is what it was."""
    order = JobOrder(job="job", script="train.py", script_sha="")
    job = KeptJob(
        order, b"", MemoryCommitLog(), Said(), Place(checkpoints=tmp_path), lambda _: None
    )
    silent: Any = SimpleNamespace(
        version=0,
        held=None,
        worker="w1",
        ready=object(),
        close=lambda: None,
        noticed=False,
        hung_s=0.0,
        proven=True,
        beats=Pace(1.0),
        silent_s=lambda _: 2.0 * SILENT_S,
    )
    job.roster.members["w1"] = silent
    job.roster.layout = data_parallel(1, 1, ("w1",))
    job.roster.recorders.begin("w1")
    job.tick(0.0, 0.0)
    assert "w1" in job.roster.members
    silent.silent_s = lambda _: SILENT_EARLY_S + 0.1
    job.tick(0.0, 0.0)
    assert not job.roster.members
    job.roster.members["w1"], silent.silent_s = silent, lambda _: 2.0 * SILENT_S
    job.roster.recorders.told = True
    job.tick(0.0, 0.0)
    assert not job.roster.members


def test_who_leaves_the_layout_owes_the_layers_that_only_it_has(tmp_path: Path) -> None:
    """From stages to whole states: whoever is lost outside of the new layout, before all layers were fetched, is
    said to owe them, after no more silence than inside; the manager then asks for another layout."""
    said = Said()
    order = JobOrder(job="job", script="train.py", script_sha="")
    job = KeptJob(order, b"", MemoryCommitLog(), said, Place(checkpoints=tmp_path), lambda _: None)
    half = Held(layers=("a",), of=2)
    inside: Any = SimpleNamespace(
        worker="w1",
        ready=object(),
        close=lambda: None,
        silent_s=lambda _: 0.0,
        hung_s=0.0,
        beats=Pace(1.0),
        proven=True,
        version=0,
        held=half,
    )
    outside: Any = SimpleNamespace(
        version=0,
        held=None,
        worker="w2",
        ready=object(),
        close=lambda: None,
        noticed=False,
        hung_s=0.0,
        beats=Pace(1.0),
        silent_s=None,
        proven=True,
    )
    job.roster.layout, job.roster.sources = data_parallel(1, 1, ("w1",)), ("w2",)
    for held, silent_s, owed in ((half, 2 * SILENT_S, True), (None, 2 * SILENT_EARLY_S, False)):
        inside.held, outside.silent_s = held, lambda _, silent_s=silent_s: silent_s
        job.roster.members = {"w1": inside, "w2": outside}
        job.tick(0.0, 0.0)
        assert said.reports[-1].owed_state == owed


def restarted(tmp_path: Path, *workers: str) -> tuple[KeptJob, Said]:
    """A keeper that was restarted while these were in the layout."""
    order, said = JobOrder(job="job", script="train.py", script_sha=""), Said()
    job = KeptJob(order, b"", MemoryCommitLog(), said, Place(checkpoints=tmp_path), lambda _: None)
    job.restore(data_parallel(1, 2, workers))
    return job, said


def ticks(job: KeptJob, since_s: float, until_s: float, late_s: float = 0.0) -> None:
    """Looks of a keeper each of which is late by so much."""
    while since_s < until_s:
        job.tick(since_s, late_s)
        since_s += TICK_S + late_s


def test_a_restarted_keeper_that_stood_still_waits_as_long_again(tmp_path: Path) -> None:
    """A machine that stood still for longer than workers have for coming back: they could not come either."""
    job, said = restarted(tmp_path, "w1")
    ticks(job, 1.0, 2.0)
    job.tick(2.0 + 2.0 * RECONNECT_S, 2.0 * RECONNECT_S)
    assert said.reports == []
    ticks(job, 2.0 + 2.0 * RECONNECT_S, 2.0 + 20 * RECONNECT_S)
    assert [report.worker for report in said.reports] == ["w1"]


def test_a_restarted_keeper_that_is_starved_waits_longer(tmp_path: Path) -> None:
    """Where each look takes three times as long, workers take as long as well."""
    job, said = restarted(tmp_path, "w1")
    ticks(job, 1.0, 1.0 + 2.0 * RECONNECT_S, 2.0 * TICK_S)
    assert said.reports == []
    ticks(job, 1.0 + 2.0 * RECONNECT_S, 10.0 * RECONNECT_S)
    assert [report.worker for report in said.reports] == ["w1"]


def test_who_came_back_to_a_restarted_keeper_knows_who_lives(tmp_path: Path) -> None:
    """Its connection to the other holds, so the other is waited for; it breaks, and the other is lost at once."""
    job, said = restarted(tmp_path, "w1", "w2")
    job.roster.members["w1"] = back = SimpleNamespace(
        worker="w1",
        ready=object(),
        close=lambda: None,
        noticed=False,
        hung_s=0.0,
        proven=True,
        beats=Pace(0.15),
        generation=1,
        version=0,
        held=None,
        step=0,
        silent_s=lambda _: 0.0,
    )
    ticks(job, 1.0, 1.0 + 3.0 * RECONNECT_S)
    assert said.reports == []
    job.roster.suspect("w2", back.worker, 0.0)
    ticks(job, 1.0 + 3.0 * RECONNECT_S, 1.1 + 3.0 * RECONNECT_S)
    assert [report.worker for report in said.reports] == ["w2"]
    assert list(job.roster.members) == ["w1"]


def test_silence_is_measured_by_how_late_others_are(tmp_path: Path) -> None:
    """Where the heartbeats of one come late in a row, another is not presumed dead for a silence of the kind; and it is again
    once they come on time."""
    order = JobOrder(job="job", script="train.py", script_sha="")
    job = KeptJob(
        order, b"", MemoryCommitLog(), Said(), Place(checkpoints=tmp_path), lambda _: None
    )
    job.roster.layout = data_parallel(1, 2, ("w1", "w2"))
    one, other = (
        SimpleNamespace(
            worker=worker,
            ready=object(),
            close=lambda: None,
            noticed=False,
            hung_s=0.0,
            proven=True,
            beats=Pace(0.15),
            generation=1,
            version=0,
            held=None,
            post=lambda _: None,
            fresh=False,
            silent_s=lambda _, s=s: s,
        )
        for worker, s in (("w1", 0.0), ("w2", 1.5 * SILENT_S))
    )
    job.roster.members |= {"w1": one, "w2": other}
    for at in range(1, 10):
        one.beats.come(0.6 * at)
    job.tick(0.0, 0.0)
    assert "w2" in job.roster.members
    for at in range(1, 20):
        one.beats.come(5.4 + 0.15 * at)
    job.tick(0.0, 0.0)
    assert "w2" not in job.roster.members
