"""Watching a job: a panel on a terminal, plain lines anywhere else, and patience with a Redis that comes back."""

import io
import os
import re
import threading
import time

import msgspec
import pytest
import redis
from rich.console import Console

from cloud.clock import ticks
from orchestrator.cli import tables, watch
from orchestrator.cli.command import CommandError, Screen
from orchestrator.cli.jobs import RESUMABLE, find
from orchestrator.cli.tools.trace import RUNNING
from orchestrator.cli.watch import deadline, ended, follow
from orchestrator.client import House, NoRoom, NotRunning, Silent
from orchestrator.view import CostView, JobView, MachineView, Sentence, View

JOB = JobView(
    id="gpt-1",
    script="gpt.py",
    script_sha="0",
    argv=(),
    slot_step_s=0.4,
    status="RUNNING",
    because="layout 1x2 works",
    step=30,
    steps_total=100,
    loss=1.25,
    step_s=0.2,
    layout="1x2",
    generation=3,
    workers=2,
    preemptions=1,
    failures=0,
    steps_lost=0,
    machines=1,
    spent_usd=0.001234,
    reserved_usd=0.01,
    budget_usd=1.0,
    now_usd_per_h=0.06,
    on_demand_usd=0.004,
    saved_usd=0.002766,
    submitted_at_s=0.0,
    ended_at_s=None,
    took_s=60.0,
    eta_s=14.0,
    recoveries_s=(0.08,),
    backup_step=30,
    checkpoint_step=20,
    export_uri="",
)
MACHINE = MachineView(
    id="i-1",
    token="t-1",
    job="gpt-1",
    pool="local/a/small",
    market="spot",
    state="working",
    price_usd_per_h=0.03,
    on_demand_usd_per_h=0.1,
    cost_usd=0.001,
    launched_at_s=0.0,
    ended_at_s=None,
    why_bought="",
    why_ended="",
)
COST = CostView(
    spent_usd=0.001234,
    reserved_usd=0.01,
    budget_usd=None,
    now_usd_per_h=0.06,
    on_demand_usd=0.004,
    saved_usd=0.002766,
    manager_usd=0.0,
    machines=1,
)
SAID = tuple(
    Sentence(at_s=float(n), who="gpt-1", what="note", because=f"gpt-1 did thing {n}")
    for n in range(9)
)


def seen(**changes):
    job = msgspec.structs.replace(JOB, **changes)
    return View(
        at_s=60.0,
        epoch=1,
        deployment="default",
        jobs=(job,),
        machines=(MACHINE,),
        pools=(),
        cost=COST,
        events=SAID,
    )


class Told:
    """A connection that says one thing after the other; an error is raised, the last one stays."""

    def __init__(self, *views, pid=None):
        self.views = list(views)
        self.pid = os.getpid() if pid is None else pid

    def view(self):
        said = self.views.pop(0) if len(self.views) > 1 else self.views[0]
        if isinstance(said, Exception):
            raise said
        return said

    def house(self):
        return House(
            pid=self.pid,
            redis_url="",
            dashboard_url="",
            ray_address="",
            local_cloud="",
            deployment="default",
            started_at_s=0.0,
        )


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Nobody has to wait between two looks."""
    monkeypatch.setattr(watch, "LOOK_S", 0.0)


def watched(source, **console):
    out = io.StringIO()
    job = follow(source, "gpt-1", ended, Console(file=out, width=100, **console))
    return job, out.getvalue()


def panel(*views):
    """What is on a terminal of these views."""
    return watched(Told(*views), force_terminal=True, color_system=None)[1]


OVER = seen(step=100, status="SUCCEEDED", because="all done", ended_at_s=60.0)


def test_without_a_terminal_there_is_a_line_now_and_then():
    """One at first, one at every change of status, none for every step; the last one says why."""
    running = [seen(step=n) for n in range(30, 90)]
    job, text = watched(Told(*running, OVER))
    assert job.status == "SUCCEEDED"
    first, last = text.splitlines()
    assert "gpt-1 RUNNING step 30/100 · loss 1.2500 · layout 1x2 · 1 machine · $0.0600/h" in first
    assert "SUCCEEDED step 100/100" in last
    assert last.endswith("all done")


def test_line_of_a_job_whose_steps_are_done_says_what_is_waited_for():
    """Its machines cost as long as its script goes on after its loop."""
    waits = seen(step=100, because="all steps are done: its script may take 10 min 0 s")
    first = watched(Told(waits, OVER))[1].splitlines()[0]
    assert "saved $0.002766 · all steps are done: its script may take 10 min 0 s" in first


def test_a_terminal_that_cannot_redraw_gets_lines():
    """What an editor or a CI job calls `dumb` would see nothing of a panel before the job ends."""
    out = io.StringIO()
    dumb = Screen(file=out, width=100, force_terminal=True, _environ={"TERM": "dumb"})
    over = seen(status="SUCCEEDED", because="all done", ended_at_s=60.0)
    follow(Told(seen(), over), "gpt-1", ended, dumb)
    first, last = out.getvalue().splitlines()
    assert "gpt-1 RUNNING step 30/100" in first
    assert last.endswith("all done")


def test_on_a_terminal_there_is_a_panel():
    """Progress, loss, layout, machines, dollars per hour, spent, saved, and the last five sentences."""
    text = panel(seen(), OVER)
    for part in (
        "30/100",
        "1.2500",
        "1x2",
        "1 machine",
        "$0.0600/h",
        "$0.001234 of $1.00",
        "saved $0.002766 (69 %)",
        "reserved $0.0100 · on demand $0.004000",
        "0 steps lost",
        "last recovery 80 ms",
        "14 s left",
        "did thing 8",
        "did thing 4",
    ):
        assert part in text, part
    assert "did thing 3" not in text
    assert "gpt-1 gpt-1" not in text
    assert "faster workers" not in text


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"given": 12, "computed": 1_640},
            "12 of the last 1,640 microbatches were given to faster",
        ),
        ({"given": 1, "computed": 64, "tables_stage": 3}, "1 of the last 64 grains were given to"),
        ({"bits": "exact up to step 12 only", "unlike_step": 12}, "exact up to step 12 only"),
    ],
)
def test_what_is_not_always_so_is_in_the_panel_when_it_is(changes, said):
    """Work that was given to faster workers; and from which step on the bits are those of another kind of machine."""
    assert said in panel(seen(**changes), OVER)
    assert said not in panel(seen(), OVER)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"deadline_s": 7_300.0, "eta_s": 60.0}, "in 2 h 0 min"),
        ({"deadline_s": 700.0, "eta_s": 900.0}, "in 10 min 0 s; at this pace 5 min 0 s too late"),
        ({"deadline_s": 90.0, "eta_s": 60.0}, "passed 10 s ago"),
        ({"deadline_s": 90.0, "ended_at_s": 85.0, "status": "SUCCEEDED"}, "kept"),
        ({"deadline_s": 90.0, "ended_at_s": 95.0, "status": "SUCCEEDED"}, "missed by 5 s"),
    ],
)
def test_what_becomes_of_a_deadline_is_said(changes, words):
    """How near it is, whether the pace keeps it, and at the end whether it was kept."""
    view = msgspec.structs.replace(seen(**changes), at_s=100.0)
    assert deadline(view.jobs[0], view.at_s).endswith(words)
    text = panel(view, OVER)
    assert re.search(rf"deadline .*{words}", text)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"eta_s": 60_000.0}, "spent $0.001234 of $1.00, at this cost $0.0112 too little"),
        ({"eta_s": 59_000.0}, "spent $0.001234 of $1.00"),
        ({"eta_s": None}, "spent $0.001234 of $1.00"),
        ({"eta_s": 60_000.0, "budget_usd": None}, "spent $0.001234"),
    ],
)
def test_budget_that_the_rest_and_the_reserve_would_pass_is_said_to_be_too_little(changes, words):
    """As for a deadline: before it is too late, by how much, in a terminal and in plain lines."""
    assert f"{words} ·" in panel(seen(**changes), OVER)
    assert f"{words} ·" in watched(Told(seen(**changes), OVER))[1]


@pytest.mark.parametrize(
    ("budget_usd", "words"),
    [
        (1.5, "spent $0.001234 of $1.50, at this cost $0.5112 too little ·"),
        (3.0, "spent $0.001234 of $3.00 ·"),
    ],
)
def test_budget_of_all_that_the_rest_of_all_would_pass_is_said_to_be_too_little(budget_usd, words):
    first, second = (
        msgspec.structs.replace(JOB, id=f"gpt-{n}", eta_s=60_000.0, budget_usd=None)
        for n in range(2)
    )
    cost = msgspec.structs.replace(COST, budget_usd=budget_usd)
    view = msgspec.structs.replace(seen(), jobs=(first, second), cost=cost)
    assert words in str(tables.cost_line(view))


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        (
            "file:///tmp/Mein%20%C3%9Cbungs/[b]/model.safetensors",
            "/tmp/Mein \u00dcbungs/[b]/model.safetensors",
        ),
        ("/tmp/100%25/tables.npz", "/tmp/100%25/tables.npz"),
        ("s3://bucket/a%20b/model.safetensors", "s3://bucket/a%20b/model.safetensors"),
    ],
)
def test_where_the_model_is_can_be_typed(uri, shown):
    """A path of this machine as a program takes it, and brackets in it are no markup."""
    over = seen(step=100, status="SUCCEEDED", ended_at_s=60.0, export_uri=uri)
    assert f"model   {shown}" in panel(over)


def test_of_many_jobs_that_have_ended_the_newest_are_listed():
    """Those that run all are, and it is said how many are left out."""
    over = [
        msgspec.structs.replace(JOB, id=f"over-{n:02}", status="FAILED", ended_at_s=100.0 - n)
        for n in range(40)
    ]
    runs = [msgspec.structs.replace(JOB, id=f"runs-{n:02}") for n in range(20)]
    sink = io.StringIO()
    Console(file=sink, width=100).print(tables.jobs([*runs, *over]))
    said = sink.getvalue()
    named = re.findall(r"^(?:runs|over)-\d\d", said, re.MULTILINE)
    assert named == [f"runs-{n:02}" for n in range(20)] + [f"over-{n:02}" for n in range(10)]
    assert "and 30 more have ended: orchestrator status --json" in said


def test_a_panel_of_a_job_that_has_ended_tells_nothing_of_what_came_later():
    """What is bought and refused afterwards is for other jobs, of which the view may not know."""
    later = Sentence(at_s=200.0, who="default-9-9", what="buy", because="for somebody else")
    own = Sentence(at_s=200.0, who="gpt-1", what="note", because="resumed once")
    before = Sentence(at_s=50.0, who="default-1-1", what="buy", because="for this one")
    view = msgspec.structs.replace(seen(ended_at_s=100.0), events=(before, later, own))
    assert [one.because for one in watch.sentences_of(view, "gpt-1")] == [
        "for this one",
        "resumed once",
    ]


def test_a_job_that_has_no_steps_yet_is_shown():
    """Before the script has reached its session nothing is known of it."""
    early = seen(
        steps_total=0, step=0, loss=None, layout="", eta_s=None, recoveries_s=(), status="PENDING"
    )
    over = seen(
        status="FAILED", failures=2, because="[red]no[/] markup", layout="", ended_at_s=60.0
    )
    text = panel(None, early, over)
    assert "none yet" in text
    assert "none any more" in text
    assert "2 script failures" in text
    assert "[red]no[/] markup" in text


@pytest.mark.parametrize(
    ("loss", "shown"),
    [
        (None, "-"),
        (0.0, "0"),
        (1.25, "1.2500"),
        (0.0123, "0.0123"),
        (3.21e-7, "3.21e-07"),
        (4e9, "4e+09"),
    ],
)
def test_a_loss_is_shown_with_the_digits_that_say_something(loss, shown):
    """A tiny one is not 0, and one that is not known is no number."""
    for terminal in (True, False):
        _, text = watched(
            Told(seen(loss=loss, status="SUCCEEDED", ended_at_s=60.0)),
            force_terminal=terminal,
            color_system=None,
        )
        assert re.search(rf"loss {re.escape(shown)}\s", text), text


def test_a_redis_that_comes_back_is_waited_for():
    """The watching goes on by itself when the connection is there again."""
    away = redis.ConnectionError("gone")
    job, _ = watched(Told(seen(), away, away, seen(status="SUCCEEDED", ended_at_s=60.0)))
    assert job.status == "SUCCEEDED"


def test_what_was_seen_last_is_shown_with_its_age_and_why_there_is_nothing_newer():
    """While Redis is away, its last error is what a person reads."""
    away = Silent("the disk takes nothing more")
    text = panel(seen(), away, seen(status="SUCCEEDED", ended_at_s=60.0))
    assert re.search(r"as of \d+ s ago: the disk takes nothing more", text)


def test_an_answer_that_takes_long_does_not_leave_a_person_alone(monkeypatch):
    """What was seen last is shown again meanwhile; the answer is taken when it comes."""
    monkeypatch.setattr(watch, "SILENT_S", 0.01)
    told, goes_on = Told(seen(), seen(status="SUCCEEDED", ended_at_s=60.0)), threading.Event()
    shown = []

    class Slow(Told):
        def view(self):
            if shown:
                goes_on.wait(20)
            return told.view()

    for look in watch.looks(Slow(None), "gpt-1"):
        shown.append(look)
        if len(shown) == 2:
            goes_on.set()
        if ended(look.job):
            break
    first, second = shown[:2]
    assert second.view is first.view
    assert re.fullmatch(r"as of \d+ s ago: Redis does not answer", *second.notes)
    assert ended(shown[-1].job)


def test_a_house_that_waits_for_room_is_waited_for(monkeypatch):
    """However long that is; one that is silent for no such reason is given up."""
    monkeypatch.setattr(watch, "AWAY_S_MAX", -1.0)
    full = NoRoom("the disk takes nothing more")
    job, _ = watched(Told(seen(), full, full, seen(status="SUCCEEDED", ended_at_s=60.0)))
    assert job.status == "SUCCEEDED"
    with pytest.raises(NotRunning, match="went away while gpt-1 was watched"):
        watched(Told(seen(), Silent("gone")))


def test_what_is_waited_for_is_said(monkeypatch):
    """Machines that boot, workers that start, a step that does not come, a manager that says nothing."""
    monkeypatch.setattr(watch, "STILL_S", -1.0)
    boots = msgspec.structs.replace(MACHINE, state="booting", launched_at_s=40.0)
    ready = msgspec.structs.replace(MACHINE, state="ready")

    def notes(*machines, ago_s=0.0, **changes):
        now_s = time.time() - ago_s
        moved = [msgspec.structs.replace(one, launched_at_s=now_s - 20.0) for one in machines]
        view = msgspec.structs.replace(
            seen(**changes), at_s=now_s, tick_s=ticks() - ago_s, machines=tuple(moved)
        )
        looks = watch.looks(Told(view), "gpt-1")
        next(looks)
        return next(looks).notes

    early = {"status": "PROVISIONING", "workers": 0, "layout": ""}
    assert notes(boots, boots, **early) == ("2 machines booting for 20 s",)
    assert notes(boots, ready, **early) == ("1 machine booting for 20 s", "its workers start")
    assert notes(MACHINE, step_s=0.0) == ("no step for 0 s",)
    assert notes(MACHINE, step_s=0.2) == ()
    assert notes(MACHINE, step_s=0.0, step=100) == ()  # there is none to come
    (old,) = notes(MACHINE, ago_s=7200.0)
    assert old == "as of 2 h 0 min ago: the manager has said nothing since"
    assert notes(MACHINE, ago_s=100.0, status="FAILED", ended_at_s=60.0) == ()


def test_a_house_that_is_gone_ends_the_watching():
    """Its process has ended: the line says what becomes of the job and how to go on."""
    with pytest.raises(NotRunning, match=r"went away while gpt-1 was watched; `orchestrator up`"):
        watched(Told(seen(), redis.ConnectionError("gone"), pid=2**22 - 1))


def test_a_job_that_the_manager_does_not_know_is_not_waited_for_forever(monkeypatch):
    """The patience is bounded, and the line says where to look."""
    monkeypatch.setattr(watch, "UNKNOWN_S_MAX", 0.05)
    with pytest.raises(TimeoutError, match="look with: orchestrator status"):
        watched(Told(msgspec.structs.replace(seen(), jobs=())))


def test_a_job_is_shown_with_its_own_money_and_machines():
    """Another job beside it spends, saves and speaks too: none of that is in this job's view."""
    other = msgspec.structs.replace(JOB, id="other", now_usd_per_h=9.0, saved_usd=8.0)
    theirs = msgspec.structs.replace(MACHINE, id="i-2", token="t-2", job="other")
    said = [
        Sentence(at_s=50.0, who=who, what="note", because=f"heard of {who}")
        for who in ("gpt-1", "i-1", "local/a/small", "other", "i-2", "t-2")
    ]
    view = msgspec.structs.replace(
        seen(step=100, status="SUCCEEDED", ended_at_s=60.0),
        jobs=(other, msgspec.structs.replace(JOB, status="SUCCEEDED", ended_at_s=60.0)),
        machines=(MACHINE, theirs),
        cost=msgspec.structs.replace(COST, now_usd_per_h=9.06),
        events=tuple(said),
    )
    for terminal in (True, False):
        _, text = watched(Told(view), force_terminal=terminal, color_system=None)
        assert "1 machine" in text
        assert "$0.0600/h" in text
        assert "saved $0.002766" in text
        assert "$9" not in text
    assert [one.who for one in watch.sentences_of(view, "gpt-1")] == [
        "gpt-1",
        "i-1",
        "local/a/small",
    ]


def test_who_names_no_job_means_the_newest_with_the_wanted_status():
    """For a look at a step that is one that runs, if there is any; else the newest of all."""
    jobs = [
        msgspec.structs.replace(JOB, id=status.lower(), status=status, submitted_at_s=at_s)
        for at_s, status in enumerate(("RECOVERING", "RUNNING", "SUCCEEDED"))
    ]
    client = Told(msgspec.structs.replace(seen(), jobs=tuple(reversed(jobs))))
    assert find(client, None, RUNNING).id == "running"
    assert find(client, None).id == "succeeded"
    assert find(client, None, ("DRAINING",)).id == "succeeded"


def test_of_several_jobs_that_begin_alike_the_one_that_runs_is_meant(capsys):
    """Which, is said beside the answer; where several run, or none does, all of them are named."""
    jobs = [
        msgspec.structs.replace(JOB, id=f"mine-{status.lower()}", status=status)
        for status in ("FAILED", "SUCCEEDED", "RUNNING", "SUCCEEDED")
    ]
    client = Told(msgspec.structs.replace(seen(), jobs=tuple(jobs)))
    assert find(client, "mine").id == "mine-running"
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("mine is taken for mine-running (RUNNING), not for mine-failed (FAILED)")
    assert find(client, "mine", RESUMABLE).id == "mine-failed"
    capsys.readouterr()
    with pytest.raises(CommandError, match="mine-s may be any of: "):
        find(client, "mine-s")
    assert find(client, "mine-failed").id == "mine-failed"
    assert capsys.readouterr().err == ""
