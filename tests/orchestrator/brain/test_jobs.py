"""Jobs: refused with the arithmetic, run, recover, fail for one reason at a time, end, come back."""

import itertools
import re
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from agent.messages import (
    CheckpointFailed,
    CopyFailed,
    Logged,
    OutputFile,
    OutputKept,
    Progress,
    RecallFailed,
    RecordsDamaged,
    Regrouped,
    Rewound,
    StateSeen,
    SumsKept,
    TablesNode,
    TablesServed,
    WorkerFailed,
    WorkerLost,
)
from orchestrator import wishes
from orchestrator.actions import (
    CloseJob,
    Launch,
    OpenJob,
    Regroup,
    StartWorker,
    Stop,
    StopWorker,
    Terminate,
    WriteCheckpoint,
)
from orchestrator.brain.decide import decide
from orchestrator.brain.handlers import jobs
from orchestrator.brain.holdings.ledger import committed_usd, spent_usd
from orchestrator.events import (
    JobBranched,
    JobCancelled,
    JobChanged,
    ManagerStarted,
    ShutdownAsked,
)
from orchestrator.settings import Settings
from orchestrator.state import State
from orchestrator.view_builder import job_view, view_of

# --- submission ------------------------------------------------------------------------------


def test_a_budget_too_small_for_one_step_is_refused_with_the_arithmetic(hand):
    """Which machines, at which price, for how long, what that is, and what is left."""
    h = hand()
    h.start()
    h.submit(budget_usd=0.001, slots_min=2)
    assert h.job.status == "FAILED"
    pattern = (
        r"has to be \$(0\.\d+) at least: the cheapest way to 2 slots is 1 x large at up to \$0\.0900/h, of which (\d+) s .*"
        r": (\d+) s are held back until it is given back, and .* (\d+) s before we hear of it; \$0\.0010 are left"
    )
    found = re.search(pattern, h.job.because)
    assert found, h.job.because
    assert float(found[1]) == pytest.approx(0.09 * float(found[2]) / 3600, abs=1e-4)
    assert int(found[2]) == int(found[3]) + int(found[4])


@pytest.mark.parametrize(
    ("settings", "spec", "says"),
    [
        ({}, {"budget_usd": 0.0}, "it buys no step"),
        ({"budget_usd": 0.001}, {}, "budget.total_usd is too small for one step"),
        ({}, {"slots_min": 3, "slots_max": 2}, "slots_min must not be above slots_max"),
        ({}, {"depth": 3, "slots_max": 2}, "every stage needs a worker"),
        ({}, {"deadline_s": 400.0}, "its deadline passed 10 min 0 s ago"),
    ],
)
def test_a_job_that_cannot_run_is_refused_in_one_line(hand, settings, spec, says):
    """Budgets, limits that contradict each other and deadlines that have passed: nothing is bought."""
    h = hand(**settings)
    h.start()
    out = h.submit(**spec)
    assert h.job.status == "FAILED"
    assert says in h.job.because
    assert "\n" not in h.job.because
    assert not h.only(out, Launch)


def test_a_budget_that_pays_for_too_few_stages_ends_the_job_with_the_arithmetic(hand):
    """Once a worker has told that the model can be cut as deep as was asked, waiting for that is useless."""
    h = hand(on_demand_allowed=False)
    h.stages = 4
    h.begun(slots_min=1, slots_max=4, depth=4, budget_usd=0.012)
    h.served_after(5.0, times=60)
    assert h.job.status == "FAILED"
    assert "the cheapest way to 4 slots is" in h.job.because
    assert not h.leases


def test_a_budget_has_to_pay_for_no_more_workers_than_have_work(hand):
    """A step has 8 microbatches, so a job that asked for 12 workers goes on with money for 8."""
    h = hand(on_demand_allowed=False)
    h.steps_total = 10**6
    h.running(slots_min=12, slots_max=12, budget_usd=0.06)
    h.train(200.0)
    h.cancel()
    h.saved(h.job.progress.step)
    h.serve()
    h.resume()
    assert h.job.status == "PROVISIONING"


def test_jobs_that_are_refused_are_forgotten_like_others(hand):
    """A script that submits again and again what cannot run fills no memory."""
    h = hand()
    h.start()
    for n in range(jobs.JOBS_MAX + 5):
        h.submit(f"job-{n}", budget_usd=0.0)
    assert len(h.state.jobs) == jobs.JOBS_MAX
    assert "job-4" not in h.state.jobs


def test_the_same_submission_twice_is_one_job(hand):
    """The inbox may deliver twice; the second time changes nothing."""
    h = hand()
    h.start()
    assert h.submit(slots_max=1)
    assert not h.submit(slots_max=1)
    assert len(h.only(h.said, OpenJob)) == 1


def test_jobs_beyond_the_machines_wait_in_order(hand):
    """With room for one job the second is pending until the first has ended, and inherits its machines."""
    h = hand(machines_max=2)
    h.running(slots_max=2)
    h.submit("next", slots_max=2)
    assert h.state.jobs["next"].status == "PENDING"
    launches = len(h.only(h.said, Launch))
    h.completed()
    assert h.job.status == "SUCCEEDED"
    assert h.state.jobs["next"].status == "PROVISIONING"
    h.wait(2.0)
    assert len(h.only(h.said, Launch)) == launches
    assert {lease.job for lease in h.leases} == {"next"}


@pytest.mark.parametrize("joined", [False, True])
def test_a_machine_that_is_there_goes_to_who_waits_for_one_to_start(hand, *, joined):
    """The next job has ordered all that it may have. Of that it gives back what has yet to start, for the machines
    of the job that ends; and what has joined it keeps.
    """
    h = hand(on_demand_allowed=False).running(slots_max=2)
    before = {lease.token for lease in h.leases}
    h.submit("next", slots_max=2)
    ordered = [h.launched(launch) for launch in h.only(h.wait(2.0), Launch)]
    assert ordered
    for machine_id in ordered if joined else ():
        h.joined(machine_id)
    h.completed()
    held = {lease.token for lease in h.leases if lease.state != "ending"}
    assert (held == before) == (not joined)
    assert len(h.only(h.said, Launch)) == len(before) + len(ordered)
    if not joined:
        assert "is there for next before it has started" in h.words(h.said)
        h.price(0.0289, 0.06, 0.04, 0.07)  # and it is not exchanged for less than a start costs
        h.wait(20.0)
        assert before == {lease.token for lease in h.leases if lease.state != "ending"}
        assert len(h.only(h.said, Launch)) == len(before) + len(ordered)


def test_every_machine_that_is_there_goes_to_who_waits_for_some_to_start(hand):
    """Both machines of the job that ends are handed over: what the next one gives back for the first of them takes
    no room from the second.
    """
    h = hand(on_demand_allowed=False)
    h.prices = (0.03, 9.0, 0.08, 9.0)
    h.running(slots_max=2)
    before = {lease.token for lease in h.leases}
    h.submit("next", slots_max=2)
    ordered = [h.launched(launch) for launch in h.only(h.wait(2.0), Launch)]
    assert len(before) == len(ordered) == 2
    h.completed()
    assert {lease.token for lease in h.leases if lease.state != "ending"} == before


def test_a_machine_that_starts_is_kept_though_another_is_a_little_cheaper(hand):
    """Prices move by a twentieth while it starts: what that has cost would be paid once more."""
    h = hand(on_demand_allowed=False)
    launch = h.orders()
    machine_id = h.launched(launch)
    h.wait(20.0)
    h.price(0.03, 0.06, 0.0285, 0.07)
    h.wait(10.0)
    h.joined(machine_id)
    h.wait(10.0)
    assert [lease.machine_id for lease in h.leases] == [machine_id]
    assert len(h.only(h.said, Launch)) == 1


# --- running ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "why", "because"),
    [
        (100, "", "all of 100 steps committed, loss 1.5000"),
        (100, "50 s have passed", "50 s have passed: all of 100 steps committed, loss 1.5000"),
        # `break` at a patience: nobody is told that all was trained that had been asked for
        (
            21,
            "",
            "its script's loop ended after 21 of 100 steps had trained: all of these are committed, loss 1.5000",
        ),
        # `submit --from` of a state that has had more steps than the script asks for
        (
            200,
            "",
            "nothing was left to do: what it began from has 200 steps, and its script asks for 100",
        ),
    ],
)
def test_a_job_that_has_succeeded_says_after_how_many_steps(hand, step, why, because):
    """Each change of its status is a sentence, and its machines go back."""
    h = hand().running(slots_max=2)
    assert h.job.status == "RUNNING"
    out = h.completed(step, why=why)
    assert (h.job.status, h.job.because) == ("SUCCEEDED", because)
    assert h.only(out, CloseJob)
    assert {t.machine_id for t in h.only(out, Terminate)} == {le.machine_id for le in h.leases}
    h.serve()
    assert not h.state.leases
    words = h.words(h.said)
    for status in ("PENDING", "PROVISIONING", "RUNNING", "SUCCEEDED"):
        assert f"Note: {status}: " in words


def test_a_lost_worker_is_regrouped_around_at_once_and_replaced(hand):
    """The next layout comes in the same turn, with a new generation, and a fresh worker soon after. Nobody stops for
    who joins: the layout with it holds from the next step boundary on.
    """
    h = hand().running(slots_max=2)
    layout = h.job.layouts.current
    (regroup,) = h.only(h.lost(layout.workers[0]), Regroup)
    assert regroup.when == "now"
    assert regroup.layout.generation == layout.generation + 1
    assert regroup.layout.workers == layout.workers[1:]
    assert h.job.status == "RECOVERING"
    h.committed(2)
    (fresh,) = h.only(h.wait(2.0), StartWorker)
    assert fresh.worker not in layout.workers
    h.serve()
    (regroup,) = h.only(h.wait(1.0), Regroup)
    assert (regroup.when, len(regroup.layout.workers)) == ("boundary", 2)


def test_growing_again_after_a_loss_is_no_recovery(hand):
    """The layout without the lost one has not told of its first step yet when the one with the new one is asked for: what
    a person sees is how long the loss took, and planned changes are learned apart.
    """
    h = hand().running(slots_max=2)
    h.committed(10)
    h.lost(h.job.layouts.current.workers[0])
    mending = h.job.layouts.generation
    h.served_after(2.0)
    h.wait(1.0)
    growing = h.job.layouts.generation
    assert (h.job.status, growing > mending) == ("RECOVERING", True)
    for generation, step, pause_s in ((mending, 11, 0.1), (growing, 20, 7.0)):
        h.see(Regrouped(at_s=h.at_s, job="job", generation=generation, step=step, pause_s=pause_s))
    (shown,) = view_of(h.state, h.at_s).jobs
    assert (shown.status, shown.recoveries_s) == ("RUNNING", (0.1,))
    assert h.job.layouts.morph_pauses_s[-1] > 6.0


def test_a_large_state_on_its_way_is_not_broken_off(hand):
    """84 GB take 84 s where nothing was measured, and twice that to two by one link."""
    h = hand(stall_s=30.0).running(slots_max=2)
    h.job.layouts.state_bytes = 84 * 10**9
    copies = len(h.job.layouts.current.workers)
    generation = h.job.layouts.generation
    h.wait(84.0 * copies)
    assert h.job.layouts.generation == generation
    h.wait(150.0)
    assert h.job.layouts.generation > generation


def test_a_step_that_takes_longer_than_patience_gets_there(hand):
    """Each time that fresh workers have not been enough they get twice as long; in the end the job fails and says so."""
    h = hand(stall_s=30.0).running(slots_max=1)
    began_s, fresh_at_s = h.at_s, []
    generation = h.job.layouts.generation
    assert "nothing was committed for" in h.words(h.wait(65.0))
    assert h.job.layouts.generation > generation, "it is asked again before any worker is replaced"
    while h.job.active and h.at_s < began_s + 7200.0:
        if h.only(h.wait(5.0), StopWorker):
            fresh_at_s.append(h.at_s)
        h.serve()
    waited = [after - before for before, after in pairwise(fresh_at_s)]
    assert len(waited) == 3
    assert all(after > 1.5 * before for before, after in pairwise(waited))
    assert h.job.status == "FAILED"
    assert "afresh 3 times: its script hangs, or a step takes longer than that" in h.job.because
    assert not h.state.workers


def test_a_job_that_waits_for_machines_says_so_once(hand):
    """A night without capacity is one sentence, and not one a minute that drives older events out."""
    h = hand(stall_s=30.0).running(slots_max=2)
    h.sells()
    h.taken(*h.machines)
    h.machines.clear()
    said = h.words(h.wait(12 * 3600.0))
    assert h.job.status == "RECOVERING"
    assert said.count("waiting: no offer fits the limits") == 1
    assert "nothing was committed" not in said


def unread(h: Any) -> None:
    h.see(RecallFailed(at_s=h.at_s, job="job", error="s3://x/job: 503"))


def test_what_a_job_shall_go_on_from_and_cannot_is_no_fault_of_its_script(hand):
    """It is said while it is tried. Before the first step it is soon given up: nothing is at stake, and machines cost."""
    h = hand(stall_s=30.0)
    h.begun(slots_max=1)
    unread(h)
    assert "cannot be read: s3://x/job: 503" in view_of(h.state, h.at_s).jobs[0].because
    h.wait(65.0)
    assert h.job.status == "FAILED"
    assert "what is stored of the job cannot be read: s3://x/job: 503" in h.job.because


def test_a_job_whose_steps_cannot_be_read_waits_with_the_workers_that_it_has(hand):
    """New ones would read no better. When it goes on nothing is left of it; if it never does, the store is why."""
    h = hand(stall_s=30.0).running(slots_max=1)
    workers = list(h.job.workers)
    unread(h)
    assert not h.only(h.wait(600.0), StopWorker)
    assert (h.job.status, list(h.job.workers)) == ("RECOVERING", workers)
    h.committed(2)
    assert "503" not in view_of(h.state, h.at_s).jobs[0].because
    unread(h)
    h.wait(7200.0)
    assert h.job.status == "FAILED"
    assert "s3://x/job: 503" in h.job.because
    assert "script hangs" not in h.job.because


def test_a_script_that_loads_for_long_gets_the_time_that_it_needs(hand):
    """A worker that was not ready in time is followed by one that has twice as long."""
    h = hand(worker_timeout_s=120.0)
    h.begun(ready=False, slots_max=1)
    h.wait(125.0)
    (first,) = [worker.started_at_s for worker in h.state.workers.values()]
    h.wait(200.0)
    assert [worker.started_at_s for worker in h.state.workers.values()] == [first]
    h.serve()
    h.wait(2.0)
    h.committed(1)
    assert h.job.status == "RUNNING"


def test_a_script_that_never_comes_to_its_loop_ends_the_job(hand):
    """It waits for a person's answer, for one: a worker that had an hour for it was given enough."""
    h = hand(worker_timeout_s=120.0)
    h.start()
    h.submit(slots_max=2)
    begun_s = h.at_s
    while h.job.active and h.at_s < begun_s + 24 * 3600:
        h.wait(60.0)
        h.serve(ready=False)
    assert h.job.status == "FAILED"
    assert "was not ready after 3600 s: its script has not come to session.steps" in h.job.because
    assert 3600 < h.at_s - begun_s < 3 * 3600


@pytest.mark.parametrize("begun", [False, True])
def test_a_script_that_kills_its_own_process_ends_the_job(hand, *, begun):
    """Wherever it dies, it dies again: machines are not bought for it without end."""
    h = hand()
    if begun:
        h.running(slots_max=1)
    else:
        h.start()
        h.submit(slots_max=1)
    machines = set()
    for _ in range(100):
        h.wait(10.0)
        h.serve(ready=begun)
        machines |= {lease.machine_id for lease in h.leases if lease.machine_id}
        for worker in list(h.job.workers):
            h.lost(worker)
    assert h.job.status == "FAILED"
    what = (
        "workers kept dying on . machines without a step between"
        if begun
        else "before the first step"
    )
    assert re.search(what, h.job.because)
    assert 2 + begun <= len(machines) < 10


@pytest.mark.parametrize("cause", ["connection", "exited"])
def test_a_script_that_crashes_before_its_first_step_soon_ends_the_job(hand, cause):
    """On the second machine, for the first may be to blame. Workers of a machine that die together die once."""
    h = hand()
    h.start()
    h.submit(slots_max=4)
    begun_s = h.at_s
    rounds = []
    while h.job.active and len(rounds) < 100:
        h.wait(2.0)
        h.serve(ready=False)
        rounds.append(list(h.job.workers))
        for worker in rounds[-1]:
            h.see(WorkerLost(at_s=h.at_s, job="job", worker=worker, cause=cause))
    assert h.job.status == "FAILED"
    assert "its processes died 4 times on each of 2 machines before the first step" in h.job.because
    assert h.at_s < begun_s + 60
    assert any(len(at_once) > 1 for at_once in rounds)
    assert all(lease.deaths <= 4 for lease in h.leases)


def test_a_network_that_is_cut_before_the_first_step_is_waited_for(hand):
    """Whoever is silent may be well, and comes back with the network; some break their connections over it."""
    h = hand()
    h.start()
    h.submit(slots_max=4)
    end_s = h.at_s + 200
    causes: Any = itertools.cycle(["silent", "machine", "connection"])
    while h.at_s < end_s:
        h.wait(5.0)
        h.serve(ready=False)
        for worker in list(h.job.workers):
            h.see(WorkerLost(at_s=h.at_s, job="job", worker=worker, cause=next(causes)))
    assert h.job.active
    h.served_after(70.0)
    h.wait(2.0)
    h.committed(1)
    assert h.job.status == "RUNNING"


def test_machines_that_go_before_the_first_step_end_no_job(hand):
    """That a worker has died says nothing of the script when its machine goes too, however often."""
    h = hand()
    h.start()
    h.submit(slots_max=4)
    for _ in range(30):
        h.wait(20.0)
        h.serve(ready=False)
        for worker in list(h.job.workers):
            h.lost(worker)
        for lease in h.leases:
            if lease.machine_id in h.machines:
                h.taken(lease.machine_id)
    assert h.job.active


def test_machines_without_an_agent_are_not_the_scripts_fault(hand):
    """A house that was killed took all agents with it, and the machines may be listed for a while."""
    h = hand().running(slots_max=1)
    for _ in range(30):
        for worker in list(h.job.workers):
            h.see(WorkerLost(at_s=h.at_s, job="job", worker=worker, cause="machine"))
        h.wait(10.0)
        h.serve(ready=False)
    assert h.job.active


def test_deaths_with_steps_between_them_end_nothing(hand):
    """Whoever kills workers for sport finds the job and its machine still there."""
    h = hand().running(slots_max=1)
    for _ in range(20):
        h.lost(next(iter(h.job.workers)))
        h.served_after(70.0)
        h.wait(2.0)
        h.committed(h.job.progress.step + 1)
    assert h.job.status == "RUNNING"
    assert len({lease.machine_id for lease in h.leases}) == 1


def test_the_line_of_a_job_says_who_was_lost_and_how(hand):
    """Who looks at a job that recovers again and again sees why, without reading all that happened."""
    h = hand().running(slots_max=2)
    worker = next(iter(h.job.layouts.serving))
    lost = WorkerLost(at_s=h.at_s, job="job", worker=worker, cause="exited", detail="signal 11")
    h.see(lost)
    assert h.job.status == "RECOVERING"
    assert f"{worker} on " in h.job.because
    assert "(exited: signal 11)" in h.job.because


def test_a_lost_holder_outside_the_layout_has_it_asked_for_again(hand):
    """Its machine was known to be gone; those who wait for its state are told to go on without it."""
    h = hand().running(slots_max=2)
    layout = h.job.layouts.current
    gone = WorkerLost(at_s=h.at_s, job="job", worker="w99", cause="connection", owed_state=True)
    (regroup,) = h.only(h.see(gone), Regroup)
    assert (regroup.when, regroup.layout.workers) == ("now", layout.workers)
    assert regroup.layout.generation == layout.generation + 1
    assert not h.see(msgspec.structs.replace(gone, job="never-heard-of"))


def test_reports_of_old_generations_and_ended_jobs_change_nothing(hand):
    """Late, double and foreign reports are harmless: the step stays, nothing is decided."""
    h = hand().running(slots_max=1)
    h.committed(40)
    old = Progress(
        at_s=h.at_s - 50, job="job", generation=0, step=3, steps_total=100, loss=9.0, step_s=1.0
    )
    assert not h.see(old)
    assert not h.see(msgspec.structs.replace(old, job="never-heard-of"))
    assert h.job.progress.step == 40
    h.completed()
    assert not h.completed()
    assert not h.see(msgspec.structs.replace(old, generation=99, step=500))
    again = Regrouped(at_s=h.at_s, job="job", generation=99, step=500, pause_s=1.0)
    assert not h.see(again)
    assert (h.job.status, h.job.progress.step) == ("SUCCEEDED", 100)


def test_the_same_loss_twice_counts_once(hand):
    """The worker is forgotten with the first report; the second finds nobody."""
    h = hand().running(slots_max=2)
    worker = h.job.layouts.current.workers[0]
    h.lost(worker)
    generation, deaths = h.job.layouts.generation, [lease.deaths for lease in h.leases]
    assert not h.lost(worker)
    assert (h.job.layouts.generation, [lease.deaths for lease in h.leases]) == (generation, deaths)


# --- failing ---------------------------------------------------------------------------------


def test_failures_of_the_script_are_counted_apart_from_preemptions(hand):
    """Evictions do not use up max_failures, and failures do not use up max_preemptions."""
    h = hand().running(slots_max=1, max_failures=1, max_preemptions=5)
    h.committed(10)
    for _ in range(3):
        out = h.taken(next(lease.machine_id for lease in h.leases if lease.machine_id))
        assert re.search(r"was taken by the provider.* for \$", h.words(out))
        assert h.job.status == "RECOVERING"
        h.goes_on()
    assert (h.job.market.preemptions, h.job.trouble.failures) == (3, 0)
    assert h.job.status == "RUNNING"
    h.failed(h.job.layouts.current.workers[0])
    assert (h.job.market.preemptions, h.job.trouble.failures) == (3, 1)
    h.goes_on()
    out = h.failed(h.job.layouts.current.workers[0])
    assert h.job.status == "FAILED"
    assert "bad batch (the 2nd failure, and max_failures allows 1)" in h.job.because
    assert h.only(out, Terminate)
    assert "ValueError: bad batch" in h.words(h.said)


def test_while_a_failure_is_tried_again_the_jobs_line_names_it(hand):
    """What and where, until the job runs again; a step by the script's own count, and by that of those committed."""
    h = hand().running(slots_max=2, max_failures=3)
    h.committed(8)
    for worker in h.job.layouts.current.workers:
        h.failed(worker, step=7)
    why = "failure 1 of 3 allowed: exception in step 7 (the 8th): ValueError: bad batch"
    assert (h.job.status, h.job.because) == ("RECOVERING", why)
    h.wait(3.0)
    for worker in list(h.state.workers):  # fails anew while it is brought up
        h.failed(worker)
    again = "failure 2 of 3 allowed: exception outside of the loop, 8 steps committed: ValueError"
    assert h.job.because.startswith(again)
    h.wait(3.0)
    h.goes_on(9)
    assert h.job.status == "RUNNING"
    assert "failure" not in h.job.because


@pytest.mark.parametrize(
    ("detail", "shown"),
    [
        ("ValueError: " + "7" * 60_000, "ValueError: 777"),
        ('  File "train.py", line 9\nagent.errors.Misuse: a sentence', "committed: a sentence"),
    ],
)
def test_the_reason_is_what_a_failure_says_in_its_last_line(hand, detail, shown):
    """Some have a tensor in them, and every table shows it; our own sentences need no class."""
    h = hand().running(slots_max=1, max_failures=0)
    worker = h.job.layouts.current.workers[0]
    h.see(WorkerFailed(at_s=h.at_s, job="job", worker=worker, kind="exception", detail=detail))
    assert h.job.status == "FAILED"
    assert shown in h.job.because
    assert len(h.job.because) < 1000


def test_the_limit_of_preemptions_begins_anew_when_a_job_is_resumed(hand):
    """What people see is what the job has been through."""
    h = hand().running(slots_max=1, max_preemptions=0)
    h.taken(h.leases[0].machine_id)
    assert h.job.status == "FAILED"
    h.resume()
    h.served_after(2.0)
    assert h.job.active
    h.taken(h.leases[-1].machine_id)
    assert h.job.because == "preempted: 1 machine was taken away and max_preemptions is 0"
    assert h.job.market.preemptions == 2


def test_the_time_in_which_a_job_lay_cancelled_is_none_that_it_took(hand):
    """A person compares how long it ran; a night until somebody resumes it says nothing about that."""
    h = hand().running(slots_max=1)
    h.committed(10)
    h.cancel()
    h.wait(60.0)
    assert h.job.status == "CANCELLED"
    took_s = view_of(h.state, h.at_s).jobs[0].took_s
    assert took_s == h.job.ended_at_s - h.job.submitted_at_s
    h.wait(1000.0)
    assert view_of(h.state, h.at_s).jobs[0].took_s == took_s
    h.resume()
    assert view_of(h.state, h.at_s + 5.0).jobs[0].took_s == pytest.approx(took_s + 5.0)


@pytest.mark.parametrize("kind", ["nan", "no_session", "refused", "unsupported"])
def test_what_would_only_repeat_fails_at_once(hand, kind):
    """A NaN loss under the policy `fail`, or a script that never calls the session: no second try."""
    h = hand().running(slots_max=1)
    out = h.failed(h.job.layouts.current.workers[0], kind)
    assert h.job.status == "FAILED"
    assert h.job.because.startswith(kind)
    assert h.only(out, Terminate)


@pytest.mark.parametrize("kind", ["exception", "exit"])
def test_a_script_that_fails_before_its_first_step_fails_at_once(hand, kind):
    """It never worked: its own traceback is kept, the machines go back."""
    h = hand()
    h.begun(slots_max=1)
    out = h.failed(next(iter(h.state.workers)), kind)
    assert h.job.status == "FAILED"
    assert "no step was committed" in h.job.because
    assert "ValueError: bad batch" in h.words(h.said)
    assert h.only(out, Terminate)


def test_machines_are_not_held_without_end_for_a_model_that_cannot_be_stored(hand):
    """All steps are done: that is said once and shown, a person has time to make room, and then the job ends."""
    h = hand().running(slots_max=1)
    h.committed(100)

    def failed() -> list[Any]:
        return h.see(CheckpointFailed(at_s=h.at_s, job="job", step=100, error="Not a directory"))

    what = "all of 100 steps are done, but the trained model cannot be stored: Not a directory"
    assert what in h.words(failed())
    assert what in h.job.because
    h.wait(590.0)
    assert failed() == []
    assert h.job.status == "RUNNING"
    h.wait(20.0)
    out = failed()
    assert h.job.status == "FAILED"
    assert what in h.job.because
    assert h.only(out, CloseJob)
    assert h.only(out, Terminate)
    h.resume()
    failed()
    assert h.job.active


def test_what_fails_to_be_stored_is_said_with_what_becomes_of_the_training(hand):
    """A full disk is a sentence with its step, not an end."""
    h = hand().running(slots_max=1)
    full = CheckpointFailed(at_s=h.at_s, job="job", step=9, error="No space left on device")
    assert "the checkpoint of step 9 failed: No space left" in h.words(h.see(full))
    assert h.job.status == "RUNNING"
    failed = CopyFailed(at_s=h.at_s, job="job", step=9, error="503")
    assert "it is on this machine's disk, training goes on, and the" in h.words(h.see(failed))
    elsewhere = CopyFailed(at_s=h.at_s, job="job", step=9, error="503", on_disk=False)
    assert "it is not on this machine's disk, training goes on" in h.words(h.see(elsewhere))
    h.completed()
    assert h.job.ended
    assert "disk, and the copy is tried again" in h.words(h.see(failed))


# --- going back ------------------------------------------------------------------------------


def rewound(h: Any, before: int, after: int) -> Rewound:
    return Rewound(at_s=h.at_s, job="job", from_step=before, to_step=after)


def test_only_the_loss_of_the_keepers_memory_takes_steps_back(hand):
    """The step goes back to the checkpoint, once per loss; what the old generation says is fenced off."""
    h = hand().running(slots_max=1)
    h.saved(30)
    h.committed(50)
    old = h.job.layouts.generation
    h.wait(1.0)
    event = rewound(h, 52, 30)
    out = h.see(event)
    assert (h.job.progress.step, h.job.progress.steps_lost) == (30, 22)
    said = "22 steps lost with what the keeper had in memory or on its disk: back to step 30"
    assert said in h.words(out)  # a job that is resumed is read from the disk, which may be damaged
    assert h.only(out, Regroup)
    assert not h.see(event)
    late = Progress(
        at_s=h.at_s, job="job", generation=old, step=51, steps_total=100, loss=1.0, step_s=0.5
    )
    h.see(late)
    assert h.job.progress.step == 30
    h.committed(31)
    assert (h.job.progress.step, h.job.status) == (31, "RUNNING")


def test_steps_that_could_be_lost_are_announced_once(hand):
    """So is what was lost, if it was."""
    h = hand().running(slots_max=1)
    h.committed(50)
    kept = SumsKept(
        at_s=h.at_s,
        job="job",
        kept=False,
        copies=3,
        sum_bytes=400 << 20,
    )
    said = h.words(h.see(kept))
    assert "(400.00 MiB)" in said
    assert "if all 3 machines go at once" in said
    assert not job_view(h.state, h.job, h.at_s).sums_kept
    assert not h.see(kept)
    assert "12 steps lost with all machines that had the model" in h.words(
        h.see(rewound(h, 50, 38))
    )
    again = msgspec.structs.replace(kept, kept=True, copies=1)
    assert "one machine has the model" in h.words(h.see(again))
    assert job_view(h.state, h.job, h.at_s).sums_kept


@pytest.mark.parametrize(
    ("spec", "then", "says"),
    [
        ({}, {"kept": True, "sum_bytes": 0}, "every step again: their size is not known yet"),
        ({"sums": "never"}, {"sum_bytes": 1}, '(job.sums = "never")'),
    ],
)
def test_why_sums_are_sent_or_not_is_said(hand, spec, then, says):
    """A restarted keeper has them sent until it knows their size; who has asked for it is told so."""
    h = hand().running(slots_max=1, **spec)
    h.committed(50)
    kept = SumsKept(at_s=h.at_s, job="job", kept=False, copies=2, sum_bytes=400 << 20)
    said = h.words(h.see(kept))
    later = replace(kept, **then)
    assert says in said + h.words(h.see(later))
    assert h.job.progress.sums_kept == later.kept


def test_a_state_that_passes_the_manager_by_is_announced_once(hand):
    """Also where sums had stayed with the workers before; and so is its return."""
    h = hand().running(slots_max=1, max_replay_s=90.0)
    h.committed(50)
    kept = SumsKept(at_s=h.at_s, job="job", kept=False, copies=2, sum_bytes=400 << 20)
    h.see(kept)
    stored = msgspec.structs.replace(kept, stored=True)
    assert "about 1 min 30 s at most are trained again" in h.words(h.see(stored))
    assert not h.see(stored)
    assert "the state goes there beside the training" in h.words(h.see(kept))


def test_nobody_pays_for_all_of_it_again_unasked(hand):
    """There were checkpoints, and none is left: the job ends, says what to do, and gives its machines back. Whoever
    resumes it wants that, also from step 0. Where none had been stored, it begins anew by itself."""
    h = hand().running(slots_max=1)
    h.see(rewound(h, 9, 0))
    assert (h.job.progress.step, h.job.status) == (0, "RECOVERING")
    h.committed(31)
    h.saved(30)
    out = h.see(rewound(h, 31, 0))
    assert (h.job.progress.step, h.job.status) == (0, "FAILED")
    assert "a checkpoint of step 30 was stored" in h.words(out)
    assert h.only(out, CloseJob)
    assert h.only(out, Terminate)
    h.resume()
    h.see(rewound(h, 3, 0))
    assert h.job.status not in {"FAILED", "CANCELLED"}


def test_what_redis_has_of_a_job_is_damaged(hand):
    """It ends, says which key it is and what to do, and gives its machines back. Whoever resumes it goes on from its newest
    checkpoint, and steps behind that are heard of."""
    h = hand().running(slots_max=1)
    h.committed(31)
    h.saved(20)
    damaged = RecordsDamaged(at_s=h.at_s, job="job", error="orch:commit:job in Redis is gone")
    out = h.see(damaged)
    assert (h.job.progress.step, h.job.progress.steps_lost, h.job.status) == (20, 11, "FAILED")
    assert "orch:commit:job in Redis is gone" in h.words(out)
    assert "resume, which goes on from the checkpoint of step 20" in h.words(out)
    assert h.only(out, Terminate)
    assert h.see(damaged) == []


def test_a_loss_that_has_been_overtaken_takes_nothing_back(hand):
    """The report comes after commits that are newer than it: they stand. Nor does one of a keeper whose memory reaches
    further than Redis: it writes down how far it is.
    """
    h = hand().running(slots_max=1)
    h.committed(20)
    assert h.see(rewound(h, 20, 22)) == []
    assert (h.job.progress.step, h.job.progress.steps_lost) == (20, 0)
    event = rewound(h, 20, 10)
    h.wait(5.0)
    h.committed(25)
    assert not h.see(event)
    assert h.job.progress.step == 25


def test_the_keeper_is_heard_although_its_clock_was_set_back(hand):
    """A house starts an hour before what the journal has seen: a loss takes steps back, and who was
    cancelled ends with its checkpoint."""
    h = hand().running(slots_max=1)
    h.committed(50)
    h.at_s -= 3600.0
    h.start(epoch=2)
    h.see(rewound(h, 50, 30))
    assert h.job.progress.step == 30
    h.cancel()
    h.saved(30)
    assert h.job.status == "CANCELLED"


# --- stopping and coming back ----------------------------------------------------------------


def test_cancel_saves_then_gives_back_and_resume_goes_on(hand):
    """A checkpoint first, then the end; resume buys again and goes on from the newest step of all."""
    h = hand().running(slots_max=1)
    h.committed(42)
    out = h.cancel()
    assert h.only(out, WriteCheckpoint)
    assert h.job.status == "DRAINING"
    assert not h.only(out, Terminate)
    h.wait(1.0)
    h.saved(40)
    assert h.job.status == "DRAINING", "that one was on its way already, and has less in it"
    out = h.saved(43)
    assert h.job.status == "CANCELLED"
    assert "cancelled by ann; resume continues from the last committed step" in h.job.because
    h.saved(44)
    assert h.job.progress.step == 44, "two more were committed before the keeper closed it"
    assert h.only(out, Terminate)
    h.serve()
    assert not h.cancel()
    h.resume()
    assert (h.job.status, h.job.progress.step) == ("PROVISIONING", 44)
    assert "resumed by bob from step 44" in h.words(h.said)
    assert h.only(h.wait(2.0), Launch)


def come_back(h: Any) -> None:
    """The job is cancelled, its checkpoint is there at once, and it is resumed and runs."""
    h.cancel()
    h.wait(1.0)
    step = h.job.progress.step + 1
    h.saved(step)
    h.serve()
    h.resume()
    h.served_after(2.0)
    h.wait(2.0)
    h.committed(step + 1)
    assert h.job.status == "RUNNING"


@pytest.mark.parametrize("away_s", [2.0, 100.0])
def test_a_manager_that_restarts_while_a_job_is_saved_asks_for_the_checkpoint_again(hand, away_s):
    """The order may not have been carried out; and the job is not ended before the keeper could be heard."""
    h = hand(on_demand_allowed=False).running(slots_max=1)
    h.cancel()
    h.at_s += away_s
    out = h.see(ManagerStarted(at_s=h.at_s, epoch=2, settings=h.settings))
    assert h.only(out, WriteCheckpoint)
    assert h.job.status == "DRAINING"
    h.wait(60.0)
    assert h.job.status == "CANCELLED"


def test_a_job_that_is_cancelled_again_has_all_its_time_to_save_its_state(hand):
    h = hand().running(slots_max=1)
    h.committed(42)
    whole_s = 0.75 * h.settings.drain_s
    h.see(SumsKept(at_s=h.at_s, job="job", kept=False, copies=2, sum_bytes=400 << 20))
    come_back(h)
    h.wait(whole_s - 10.0)
    h.committed(90)
    h.cancel()
    h.wait(whole_s - 1.0)
    assert h.job.status == "DRAINING"
    h.wait(2.0)
    assert h.job.status == "CANCELLED"


def test_a_job_that_was_resumed_is_as_patient_with_silence_as_any_other(hand):
    def stalls(resumes: int) -> list[float]:
        h = hand().running(slots_max=1)
        h.committed(42)
        for _ in range(resumes):
            come_back(h)
        from_s, said = h.at_s, len(h.said)
        found: list[float] = []
        while h.job.active:
            h.served_after(1.0)
            heard = h.words(h.said[said:]).count("nothing was committed")
            found += [h.at_s - from_s] * (heard > len(found))
        assert "its script hangs" in h.job.because
        return found

    assert stalls(3) == pytest.approx(stalls(0), abs=20.0)


def test_an_order_tells_how_many_microbatches_a_step_of_that_job_has(hand):
    """The next keeper has not heard it. A job of the same script learns it anew: its data may be others."""
    h = hand().running(slots_max=1)
    h.committed(42)
    assert jobs.order_of(h.job).microbatches == h.job.layouts.microbatches > 0
    h.submit("next")
    assert h.state.jobs["next"].layouts.microbatches
    assert jobs.order_of(h.state.jobs["next"]).microbatches == 0


def branched(h: Any) -> JobBranched:
    url = "file:///c/job#40"
    return JobBranched(at_s=h.at_s, job="job", name="job-2", step=40, from_url=url, by="ann")


def test_a_new_job_begins_from_a_step_that_another_one_has_stored(hand):
    """It has the same order but for its name and where it begins; the other one goes on, and asking twice makes one."""
    h = hand().running(slots_max=1, budget_usd=9.0, deadline_s=1e9)
    h.committed(42)
    asked = branched(h)
    out = h.see(asked)
    made = h.state.jobs["job-2"]
    assert made.spec == replace(h.job.spec, job="job-2", from_url="file:///c/job#40")
    assert (made.account.cap_usd, made.status) == (9.0, "PROVISIONING")
    assert h.job.status == "RUNNING"
    assert "its step 40 is where job-2 begins, asked by ann" in h.words(out)
    (opened,) = h.only(out, OpenJob)
    assert opened.order.from_url == "file:///c/job#40"
    assert not h.see(asked)
    h.see(replace(asked, name="job-3", job="nobody"))
    assert set(h.state.jobs) == {"job", "job-2"}


def test_the_step_of_a_branch_is_kept_while_it_waits_for_its_turn(hand):
    """The keeper knows the branch from the wish on, and forgets it if it ends before its turn."""
    h = hand(machines_max=1).running(slots_max=1)
    asked = branched(h)
    (opened,) = h.only(h.see(asked), OpenJob)
    assert h.state.jobs["job-2"].status == "PENDING"
    assert opened.order.from_url == "file:///c/job#40"
    out = h.see(JobCancelled(at_s=h.at_s, job="job-2", by="ann"))
    assert [closed.job for closed in h.only(out, CloseJob)] == ["job-2"]


def test_a_deadline_that_has_passed_does_not_hinder_a_new_job(hand):
    h = hand().running(slots_max=1, deadline_s=hand().at_s + 5.0)
    h.wait(10.0)
    h.see(branched(h))
    assert h.state.jobs["job-2"].spec.deadline_s is None


def test_a_job_that_is_late_goes_on_though_a_launch_is_refused(hand):
    """Its machine is taken after the deadline, and the next one is refused once: it waits, as before the deadline."""
    h = hand()
    h.steps_total = 10**5
    h.running(slots_max=1, deadline_s=h.at_s + 30.0)
    h.train(60.0)
    for lease in h.leases:
        if lease.machine_id in h.machines:
            h.taken(lease.machine_id)
    for launch in h.only(h.said[h.served :], Launch):
        if launch.request.token in h.state.leases:
            h.refused(launch)
    h.wait(4.0)
    assert h.job.active
    h.serve()
    h.served_after(200.0)
    assert h.leases


def changed(h: Any, budget_usd: float | None, deadline_s: float | None = None) -> Any:
    return JobChanged(
        at_s=h.at_s, job="job", budget_usd=budget_usd, deadline_s=deadline_s, by="ann"
    )


def test_another_budget_holds_from_now_on(hand):
    """The sentence names both bounds and who set them; a lower budget ends the job in time, and a higher one lets it
    be resumed."""
    h = hand().running(slots_max=1, budget_usd=10.0)
    h.committed(10)
    h.see(changed(h, None, h.at_s + 7200.0))
    assert (h.job.account.cap_usd, h.job.spec.deadline_s) == (None, h.at_s + 7200.0)
    said = h.words(h.said)
    assert "has no budget and a deadline in 2 h 0 min from now on, set by ann" in said
    owed = spent_usd(h.job.account, h.at_s) + committed_usd(h.job.account, h.at_s)
    h.see(changed(h, owed + 1e-6))
    assert h.job.status == "DRAINING"
    h.saved(43)
    assert (h.job.status, h.job.spec.deadline_s) == ("FAILED", None)
    h.see(changed(h, 10.0))
    h.resume()
    assert h.job.active
    assert job_view(h.state, h.job, h.at_s).budget_usd == 10.0


def test_who_raises_the_budget_of_a_job_that_ends_hears_that_it_ends_all_the_same(hand):
    """The wish says it before and the note says it after; the budget holds once it is resumed."""
    h = hand().running(slots_max=1, budget_usd=10.0)
    h.committed(10)
    owed = spent_usd(h.job.account, h.at_s) + committed_usd(h.job.account, h.at_s)
    h.see(changed(h, owed + 1e-6))
    assert h.job.status == "DRAINING"
    asker, told = wishes.Asker(by="ann", at_s=h.at_s), "it ends all the same: resume it then"
    wish = wishes.change(job_view(h.state, h.job, h.at_s), 10.0, "kept", asker)
    assert told in wish.would
    assert told in h.words(h.see(wish.event))
    h.wait(h.settings.drain_s)
    assert (h.job.status, h.job.account.cap_usd) == ("FAILED", 10.0)
    assert told not in wishes.change(job_view(h.state, h.job, h.at_s), 9.0, "kept", asker).would
    assert told not in h.words(h.see(changed(h, 9.0)))


def test_bounds_that_are_over_already_change_nothing(hand):
    """What is spent or reserved cannot be taken back, and no deadline lies in the past."""
    h = hand().running(slots_max=1, budget_usd=10.0)
    h.committed(10)
    for event, why in (
        (changed(h, 1e-6), "its budget stays as it was"),
        (changed(h, 5.0, h.at_s - 1.0), "its deadline stays as it was"),
        (changed(h, 5.0, h.at_s - 1.0), "its budget is not changed, either"),
    ):
        h.see(event)
        assert why in h.words(h.said)
        assert (h.job.account.cap_usd, h.job.spec.deadline_s) == (10.0, None)
        assert h.job.status == "RUNNING"
    assert not h.see(msgspec.structs.replace(changed(h, 1.0), job="nobody"))


def test_a_keeper_that_never_answers_does_not_hold_a_cancelled_job(hand):
    """The checkpoint is waited for only so long as it was reserved for."""
    h = hand(drain_s=40.0).running(slots_max=1)
    h.cancel()
    out = h.wait(11.0)
    assert h.job.status == "CANCELLED"
    assert h.only(out, Terminate)


def test_a_budget_ends_the_job_while_it_can_still_pay_for_the_end(hand):
    """At every moment spent + committed stays within the cap, and the machines are back before it."""
    h = hand().running(slots_max=2, budget_usd=0.03)
    account, cap = h.job.account, 0.03
    for _ in range(5000):
        h.wait(2.0)
        assert spent_usd(account, h.at_s) + committed_usd(account, h.at_s) <= cap + 1e-9
        h.serve()
        if h.job.ended:
            break
        h.committed(h.job.progress.step)
    assert h.job.status == "FAILED"
    assert re.match(r"budget: \$0\.0\d+ of \$0\.0300 are spent", h.job.because)
    assert not h.state.leases


@pytest.mark.parametrize("period_s", [2.0, 3600.0])
@pytest.mark.parametrize("cancelled", [False, True])
def test_shutting_down_gives_back_everything_and_then_stops(hand, *, cancelled, period_s):
    """Stop comes only when no lease is left and a list that was asked for afterwards is empty, however seldom a manager
    looks that is not ending.
    """
    h = hand(control_period_s=period_s).running(slots_max=2)
    if cancelled:
        h.cancel()  # so it is being saved already
    out = h.see(ShutdownAsked(at_s=h.at_s, by="ann"))
    assert not h.only(out, Stop)
    for _ in range(20):
        h.wait(2.0)
        h.resume()  # nothing is: it would wait for ever, and the manager for it
        h.serve()
    assert not h.state.leases
    assert h.only(h.said, Stop)
    assert h.job.status == "CANCELLED"
    h.submit("late")
    assert h.state.jobs["late"].status == "FAILED"
    assert "shutting down" in h.state.jobs["late"].because


# --- what people see -------------------------------------------------------------------------


def test_the_view_shows_it_all_and_encodes(hand):
    """Job, machines, pools, money and the newest sentences, carried on to the moment of looking."""
    h = hand(manager_usd_per_h=0.01).running(slots_max=2, budget_usd=5.0)
    h.committed(10)
    view = view_of(h.state, h.at_s + 3600.0)
    (job,) = view.jobs
    assert (job.status, job.step, job.workers, job.eta_s) == ("RUNNING", 10, 2, 45.0)
    assert job.budget_usd == 5.0
    spent = sum(machine.cost_usd for machine in view.machines)
    assert view.cost.spent_usd == pytest.approx(spent + view.cost.manager_usd)
    assert view.cost.saved_usd == pytest.approx(view.cost.on_demand_usd - spent)
    assert view.cost.saved_usd > 0
    assert {pool.pool for pool in view.pools if pool.held} == {m.pool for m in view.machines}
    assert view.events[-1].because
    assert msgspec.json.decode(msgspec.json.encode(view), type=type(view)) == view


def test_each_job_has_its_own_money_in_the_view(hand):
    """Of two jobs each shows what its own machines cost and saved; the two together are the total."""
    h = hand().running(slots_max=1)
    h.submit("other", slots_max=2)
    h.served_after(4.0)
    view = view_of(h.state, h.at_s + 3600.0)
    one, other = view.jobs
    assert (one.machines, other.machines) == (1, len(view.machines) - 1)
    assert one.now_usd_per_h < other.now_usd_per_h
    for name in ("spent_usd", "reserved_usd", "now_usd_per_h", "on_demand_usd", "saved_usd"):
        together = getattr(one, name) + getattr(other, name)
        assert together == pytest.approx(getattr(view.cost, name)), name
    for job in (one, other):
        own = [machine for machine in view.machines if machine.job == job.id]
        assert job.spent_usd == pytest.approx(sum(machine.cost_usd for machine in own))
        assert job.saved_usd == pytest.approx(job.on_demand_usd - job.spent_usd)


def test_ended_machines_stay_visible_with_their_reason_and_bounded(hand):
    """The newest of what was given back is shown with why and what it cost."""
    h = hand().running(slots_max=2)
    h.wait(60.0)
    h.completed()
    h.serve()
    view = view_of(h.state, h.at_s)
    assert view.machines
    assert all(machine.state == "ended" and machine.why_ended for machine in view.machines)
    assert all(machine.cost_usd > 0 for machine in view.machines)
    assert len(view.events) <= 100


@pytest.mark.parametrize(
    "wrong",
    [
        {"control_period_s": 0.0},
        {"budget_usd": -1.0},
        {"machines_max": 0},
        {"drain_s": 400.0},
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong):
    """One line that names the setting and the value."""
    with pytest.raises(ValueError, match=rf"^settings: {next(iter(wrong))}[^\n]+$"):
        Settings(**wrong)  # type: ignore[arg-type]


def test_another_house_is_not_the_one_that_was_told_to_stop():
    """A house that was killed while it gave everything back: the next one works; its own restart goes on."""
    state, _ = decide(State(), ManagerStarted(at_s=0.0, epoch=1, house="first"))
    state, _ = decide(state, ShutdownAsked(at_s=1.0, by="a test"))
    state, _ = decide(state, ManagerStarted(at_s=2.0, epoch=2, house="first"))
    assert state.stopping
    state, _ = decide(state, ManagerStarted(at_s=3.0, epoch=3, house="second"))
    assert not state.stopping
    state, _ = decide(state, ShutdownAsked(at_s=4.0, by="a test", house="first"))  # it waited
    assert not state.stopping
    assert "an earlier house" in state.sentences[-1].because
    state, _ = decide(state, ShutdownAsked(at_s=5.0, by="a test", house="second"))
    assert state.stopping


def test_machines_lost_together_cost_one_layout(hand):
    """All but one are missing in one list: the job is laid out once, without any of them."""
    h = hand().running(slots_max=8)
    first, *gone = sorted(h.machines)
    assert len(gone) > 2
    left = set(h.state.leases[h.state.machines[first]].workers.values())
    before = h.job.layouts.generation
    for machine_id in gone[1:]:
        h.ends(machine_id, h.at_s)
    (regroup,) = h.only(h.taken(gone[0]), Regroup)
    assert (regroup.when, set(regroup.layout.workers)) == ("now", left)
    assert h.job.layouts.generation == before + 1
    assert h.state.unsettled == {}


def test_a_job_whose_script_ran_before_buys_no_more_slots_than_it_has_microbatches(hand):
    """The first does not know how many there are, and says so; the second of the same script does."""
    h = hand(machines_max=64).running(slots_max=12)
    assert "machines for 12 slots are bought; its first worker tells" in h.words(h.said)
    assert sum(lease.type.slots for lease in h.leases) >= 8  # of microbatches
    h.completed()
    h.serve()
    h.served_after(30.0)
    assert h.leases == []
    h.wait(0.0)
    h.submit("again", slots_max=12)
    bought = h.only(h.wait(3.0), Launch)
    slots = sum(h.state.types[launch.request.pool.type].slots for launch in bought)
    assert slots == 8
    h.submit("other", slots_max=12, argv=("--wide",))
    assert len(h.only(h.wait(3.0), Launch)) > len(bought)


def test_a_job_that_wants_more_workers_than_can_compute_trains_with_those_that_can(hand):
    """Twelve slots at least, for eight microbatches: it says so once, with the remedy, and runs on eight."""
    h = hand(on_demand_allowed=False)
    h.running(slots_min=12, slots_max=16)
    h.train(120.0)
    assert (h.job.status, len(h.job.layouts.current.workers)) == ("RUNNING", 8)
    said = h.words(h.said)
    assert said.count("slots_min is 12, but a step has 8 microbatches") == 1
    assert "lower slots_min" in said


def test_what_a_script_logs_and_writes_is_on_its_row(hand):
    """The newest; the last files may come behind the end, and of a job that nobody knows nothing is kept."""
    h = hand()
    h.start()
    h.submit()
    for job in ("job", "unknown"):
        h.see(Logged(at_s=h.at_s, job=job, step=3, numbers={"loss": 0.5, "norm": None}))
        kept = (("best", "0.25"),)
        h.see(StateSeen(at_s=h.at_s, job=job, step=3, entries=kept, count=4))
        file = OutputFile(path="plots/a.png", size=10, step=3)
        h.see(OutputKept(at_s=h.at_s, job=job, files=2, total_bytes=30, newest=(file,)))
    generation, step = h.job.layouts.generation, h.job.progress.step
    told = Progress(
        at_s=h.at_s,
        job=h.job.id,
        generation=generation,
        step=step,
        steps_total=100,
        loss=1.0,
        step_s=0.5,
        given=2,
        computed=24,
    )
    h.see(told)
    view = job_view(h.state, h.job, h.at_s)
    assert (view.given, view.computed) == (2, 24)
    assert (view.logged_step, view.logged) == (3, {"loss": 0.5, "norm": None})
    assert (view.state_step, view.state, view.state_count) == (3, kept, 4)
    assert (view.output_files, view.output_bytes, view.output) == (2, 30, (file,))


def test_who_serves_the_tables_of_a_job_is_on_its_row(hand):
    """Each worker under its machine; who is gone says so; a job that has ended serves nothing."""
    h = hand().running(slots_max=1)
    (worker,) = h.job.workers
    nodes = (
        TablesNode(worker="keeper", reliable=True, serves=0, copies=8, blocks=0),
        TablesNode(worker=worker, reliable=False, serves=5, copies=0, blocks=4),
        TablesNode(worker="w-gone", reliable=False, serves=3, copies=0, blocks=0),
    )
    for job in (h.job.id, "unknown"):
        h.see(TablesServed(at_s=h.at_s, job=job, stage=3, partitions=8, nodes=nodes))
    view = job_view(h.state, h.job, h.at_s)
    assert (view.tables_stage, view.partitions) == (3, 8)
    (lease,) = h.leases
    assert [(one.machine, one.serves, one.copies, one.blocks) for one in view.servers] == [
        ("", 0, 8, 0),
        (lease.machine_id, 5, 0, 4),
        ("gone", 3, 0, 0),
    ]
    h.cancel()
    h.wait(200.0)
    ended = job_view(h.state, h.job, h.at_s)
    assert (h.job.ended, ended.tables_stage, ended.servers) == (True, 0, ())


def test_a_job_of_served_tables_has_no_loop_to_speak_of(hand):
    """Neither where its script fails between two steps, nor where it ends before its last one."""
    h = hand().running(slots_max=1)
    h.see(TablesServed(at_s=h.at_s, job=h.job.id, stage=1, partitions=2, nodes=()))
    h.committed(8)
    h.failed(h.job.layouts.current.workers[0])
    assert "exception, 8 steps committed: ValueError" in h.job.because
    h.completed(21)
    assert h.job.because.startswith("its training ended after 21 of 100 steps")
