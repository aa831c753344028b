"""Each recovery of a job is one trace, with times of the journal and ids that never change."""

from pathlib import Path

import pytest
from journaled import T0, began, entry, growth, loss, notice, regroup, works

from agent.messages import Recalled, Rewound, WorkerLost
from orchestrator.actions import CloseJob, Note, StartWorker
from orchestrator.brain.decide import decide
from orchestrator.events import JobResumed, JobSpec, JobSubmitted, Tick
from orchestrator.history.outside.recoveries import PARTS_MAX, Recoveries, Span
from orchestrator.simulated import simulate
from orchestrator.simulated.restarts import live
from orchestrator.simulated.scenario import wild
from orchestrator.state import State
from orchestrator.world import Entry, MemoryJournal, read_journal

JOB = "gpt-1"
Trace = tuple[Span, ...]


def traces_of(entries: list[Entry], job: str = JOB, journal: str = "ledger") -> list[Trace]:
    recoveries = Recoveries(journal, job)
    return [trace for each in entries if (trace := recoveries.hear(each))]


def told(trace: Trace) -> list[tuple[str, float, float]]:
    return [(span.name, span.from_s - T0, span.to_s - T0) for span in trace]


def test_a_loss_is_a_trace_from_its_report_to_the_first_step_without_the_worker():
    _, trace = traces_of([*began(JOB), *loss(JOB)])
    assert told(trace) == [
        ("loss", 0.0, 5.0),
        ("decide", 0.0, 0.0),
        ("regroup", 0.0, 5.0),
        ("pause", 1.0, 5.0),
    ]
    assert trace[0].attributes == {
        "spot.job": JOB,
        "spot.generation": 3,
        "spot.layout": "1x1",
        "spot.workers": 1,
        "spot.cause": "b on i-b lost (exited)",
        "spot.decision": "1 workers",
        "spot.step": 30,
        "spot.steps_lost": 0,
        "spot.workers_new": 0,
        "spot.workers_gone": 1,
        "spot.pause_s": 4.0,
    }


def test_a_growth_is_a_trace_from_the_order_of_its_machine():
    *_, trace = traces_of([*began(JOB), *loss(JOB), *growth(JOB)])
    assert told(trace) == [
        ("change", 10.0, 70.0),
        ("decide", 10.0, 61.0),
        ("regroup", 61.0, 70.0),
        ("pause", 66.0, 70.0),
        ("machine", 10.0, 50.0),
        ("worker", 50.0, 60.0),
    ]
    assert trace[4].attributes == {
        "spot.machine": "i-c",
        "spot.pool": "aws/us-east-1a/g6.xlarge",
        "spot.market": "spot",
    }


def test_a_notice_is_a_trace_until_a_layout_works_without_the_machine():
    """The change before keeps the machine, so it is a trace of its own."""
    *_, change, trace = traces_of([*began(JOB), *loss(JOB), *growth(JOB), *notice(JOB)])
    assert told(change)[0] == ("change", 90.0, 95.0)
    assert told(trace)[:3] == [
        ("notice", 80.0, 186.0),
        ("decide", 80.0, 180.0),
        ("regroup", 180.0, 186.0),
    ]
    assert trace[0].attributes["spot.cause"] == "i-c will be taken in 120 s"


def test_a_loss_of_everything_shows_the_recall_and_the_lost_steps():
    """The layout asked for before that is behind it: a step of it is from before, too."""
    away = Rewound(at_s=T0 + 1, job=JOB, from_step=25, to_step=20)
    entries = [
        *began(JOB),
        entry(Tick(at_s=T0), regroup(JOB, 3, "b", "a")),
        entry(away, Note(who=JOB, because="5 steps lost"), Note(who=JOB, because="RECOVERING: x")),
        works(2, JOB, 3),
        entry(Recalled(at_s=T0 + 3, job=JOB, step=20, because="from the disk")),
        entry(Tick(at_s=T0 + 4), regroup(JOB, 4, "a", "b")),
        works(9, JOB, 4),
    ]
    _, trace = traces_of(entries)
    assert told(trace)[0] == ("loss", 1.0, 9.0)
    assert ("restore", 1.0, 3.0) in told(trace)
    assert trace[0].attributes["spot.steps_lost"] == 5


def test_a_loss_behind_the_newest_layout_waits_for_the_next_one():
    """Its report was late, so it has the time of the step before; too few workers were left at first."""
    lost = WorkerLost(at_s=T0 - 7, job=JOB, worker="b", cause="exited")
    entries = [
        *began(JOB),
        entry(Tick(at_s=T0), regroup(JOB, 3, "b", "a")),
        entry(lost, Note(who=JOB, because="RECOVERING: b is lost")),
        works(2, JOB, 3),
        entry(Tick(at_s=T0 + 4), regroup(JOB, 4, "a")),
        works(9, JOB, 4),
    ]
    _, change, loss_ = traces_of(entries)
    assert told(change)[0] == ("change", 0.0, 2.0)
    assert told(loss_)[:2] == [("loss", -5.0, 9.0), ("decide", -5.0, 4.0)]


def test_a_machine_is_told_of_once():
    """A fresh worker on it is a newcomer, and the machine is none."""
    start = StartWorker(job=JOB, worker="d", machine_id="i-c", slot=0, because="")
    again = entry(Tick(at_s=T0 + 190), start, regroup(JOB, 7, "a", "d"))
    *_, trace = traces_of([*began(JOB), *growth(JOB), *notice(JOB), again, works(200, JOB, 7)])
    assert [span.name for span in trace] == ["change", "decide", "regroup", "pause", "worker"]


def test_layouts_that_came_to_nothing_are_parts_of_one_trace():
    asks = [entry(Tick(at_s=T0 + n), regroup(JOB, 3 + n, "a")) for n in range(2 * PARTS_MAX)]
    _, trace = traces_of([*began(JOB), *asks, works(500, JOB, 2 + len(asks))])
    regroups = [span for span in trace if span.name == "regroup"]
    assert len(regroups) == PARTS_MAX + 1
    assert (regroups[0].from_s, regroups[-1].to_s) == (T0, T0 + 500)


def test_a_beginning_is_no_recovery_and_a_resume_is_one():
    """A job that was cancelled goes on with the order of a person."""
    spec = JobSpec(job=JOB, script="train.py", script_sha="0")
    first = entry(JobSubmitted(at_s=T0 - 20, spec=spec), Note(who=JOB, because="PENDING: new"))
    assert not traces_of([first, *began(JOB)])
    lost = entry(Tick(at_s=T0), Note(who=JOB, because="RECOVERING: it is lost, and nobody is left"))
    ended = entry(Tick(at_s=T0), CloseJob(job=JOB, because="CANCELLED"))
    asked = JobResumed(at_s=T0 + 20, job=JOB, by="me")
    resumed = entry(asked, Note(who=JOB, because="PENDING: resumed by me from step 20"))
    again = [resumed, entry(Tick(at_s=T0 + 30), regroup(JOB, 3, "z")), works(40, JOB, 3)]
    (trace,) = traces_of([first, *began(JOB), lost, ended, *again])
    assert told(trace)[:2] == [("resume", 20.0, 40.0), ("decide", 20.0, 30.0)]


def test_ids_are_the_same_again_and_others_for_another_journal():
    entries = [*began(JOB), *loss(JOB), *growth(JOB)]
    assert traces_of(entries) == traces_of(entries)
    ours, others = (
        {span.id for trace in traces_of(entries, journal=name) for span in trace} for name in "ab"
    )
    assert len(ours) == sum(len(trace) for trace in traces_of(entries))
    assert not ours & others


def journal_of(seed: int, path: Path) -> list[Entry]:
    """Two small deployments whose manager dies many times; with seed 0, hours with every fault."""
    if not seed:
        simulate(0.1, 12, 7, path, faults="mixed")
        return read_journal(path)
    journal = MemoryJournal()
    live(wild(seed), keep=journal)
    return journal.entries


@pytest.mark.parametrize(
    ("seed", "kinds"),
    [(0, "loss notice change"), (1, "loss notice change"), (4, "loss"), (7, "change")],
)
def test_every_layout_that_worked_is_told_once_in_a_wild_deployment(seed, kinds, tmp_path):
    """The brain decides again, and what it acknowledges is compared: after a loss it is RECOVERING."""
    entries = journal_of(seed, tmp_path / "journal.jsonl")
    state, worked = State(), dict[str, dict[int, str]]()
    for each in entries:
        before = {job.id: job.status for job in state.jobs.values()}
        state, _ = decide(state, each.event)
        for job in state.jobs.values():
            if job.layouts.acknowledged:
                known = worked.setdefault(job.id, {})
                known.setdefault(job.layouts.acknowledged, before[job.id])
    found = set[str]()
    for job_id, generations in worked.items():
        traces = traces_of(entries, job_id)
        told_of = {trace[0].attributes["spot.generation"]: trace[0].name for trace in traces}
        assert [*told_of] == [*generations][1:]
        assert len(told_of) == len(traces)
        for generation, kind in told_of.items():
            assert (kind == "loss") == (generations[generation] == "RECOVERING")
        found |= {*told_of.values()}
        assert_whole(traces)
    assert found == {*kinds.split()}


def assert_whole(traces: list[Trace]) -> None:
    """Every part lies in its root, and no two spans of all traces have one id."""
    for root, *parts in traces:
        assert root.from_s <= root.to_s
        assert not root.parent
        for part in parts:
            assert (part.trace, part.parent) == (root.trace, root.id)
            assert root.from_s <= part.from_s <= part.to_s <= root.to_s
    ids = [span.id for trace in traces for span in trace]
    assert len({*ids}) == len(ids)
