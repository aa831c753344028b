"""The known answers of the two protocols that need no cluster."""

import pickle

import numpy as np
import pytest

from agent.paramserver import groups
from agent.paramserver import server as servers
from agent.paramserver.api import Application, Stop, even
from agent.paramserver.controller import PUSH_S, Controller, Ledger, Plan, Resumed
from agent.paramserver.help import Helpee, Helper, Settings, Tail
from agent.paramserver.live.plan import KEPT
from agent.paramserver.messages import (
    CONTROLLER,
    Begun,
    Cancel,
    Close,
    Committed,
    Done,
    DoThis,
    Finished,
    Fresh,
    Gone,
    Grant,
    Installed,
    Join,
    Load,
    Loaded,
    Move,
    Passed,
    Progress,
    Push,
    PushUp,
    Received,
    Release,
    Released,
    Report,
    Roll,
    Route,
    Section,
    Span,
    Stage,
    Staged,
    Subscribe,
)
from agent.paramserver.placement import (
    Drain,
    Node,
    Stages,
    actives,
    preloads,
    spread,
    stage_by_ratio,
)
from agent.paramserver.server import AHEAD, Server
from agent.paramserver.tables import Table
from agent.paramserver.worker import Bound, Worker

GRAINS = 80


def tail(clock=4, done=0):
    made = Tail(clock, [Span(7, 0, GRAINS)])
    if done:
        made.advance(done)
    return made


def test_the_ring_gives_worker_14_the_helpers_of_the_example():
    """64 workers round-robin on 8 machines (answer 1)."""
    machines = [[str(worker) for worker in range(machine, 64, 8)] for machine in range(8)]
    helpers = groups.ring(machines, 4)
    assert set(helpers["14"]) == {"6", "11", "12", "13"}
    helpees = groups.inverse(helpers)
    assert set(helpees["14"]) == {"8", "9", "15", "22"}
    for worker, those in helpers.items():
        assert all(worker in helpees[helper] for helper in those)
        assert sum(int(helper) % 8 == int(worker) % 8 for helper in those) == 1
        assert len(set(those)) == 4


def test_fewer_workers_than_a_group_help_as_far_as_they_exist():
    assert groups.ring([["a"], ["b"]], 4) == {"a": ["b"], "b": ["a"]}
    assert groups.ring([["a"]], 4) == {"a": []}


def test_a_report_that_shows_45_percent_gives_the_last_2_5_percent_away():
    """Algorithm 1 with the figures of the example (answer 2)."""
    helpee = Helpee(Settings())
    helpee.helpers, helpee.usual_s = ["fast"], 10.0
    report = Progress(clock=4, share=0.75, time_s=100.0)
    mine = tail(done=32)  # 40 %
    assert helpee.difference(report, mine, 101.0, 10.0) == pytest.approx(0.45)
    ((to, order),) = helpee.heard("fast", report, mine, 101.0, 0.0)
    assert (to, order.spans) == ("fast", [Span(7, 78, 80)])
    near = tail(done=56)
    assert helpee.heard("fast", report, near, 100.5, 0.0) == []  # 10 % behind


def test_pieces_are_2_5_then_5_percent_from_the_end():
    """They abut, descend, and stop before the work in progress (answer 3)."""
    helpee = Helpee(Settings())
    helpee.helpers, helpee.usual_s = ["fast"], 10.0
    mine, cut = tail(done=32), []
    out = helpee.heard("fast", Progress(clock=4, share=0.75, time_s=0.0), mine, 9.0, 0.0)
    while out:
        cut += out[0][1].spans
        out = helpee.begun(Begun(piece=out[0][1].piece), mine, 9.0)
    sizes = [span.last - span.first for span in cut]
    assert sizes == [2] + [4] * (len(sizes) - 1)
    assert [span.last for span in cut] == [80, *(span.first for span in cut[:-1])]
    assert 0 < mine.left <= 4
    assert mine.spans[0].first == 32


@pytest.mark.parametrize(
    ("clock", "own_done", "now", "kept"),
    [
        (3, False, True, True),
        (4, False, False, True),
        (4, True, True, True),
        (5, True, False, False),
    ],
)
def test_a_helper_decides_as_algorithm_2_does(clock, own_done, now, kept):
    """Older: now; same and unfinished: later; same and finished: now; newer: never (answer 4)."""
    helper = Helper(Settings())
    helper.asked("slow", DoThis(piece=1, clock=clock, spans=[Span(0, 0, 1)], time_s=0.0), 4, {0})
    assert (helper.next(4, own_done, 99) is not None) == now
    if not now:
        assert (helper.next(99, True, 99) is not None) == kept


def test_a_cancelled_order_is_not_done_whichever_comes_first():
    order = DoThis(piece=1, clock=4, spans=[Span(0, 0, 1)], time_s=0.0)
    late, early = Helper(Settings()), Helper(Settings())
    late.asked("slow", order, 4, {0})
    assert [answer.begun for answer in late.cancelled("slow", Cancel(pieces=[1]))] == [False]
    early.cancelled("slow", Cancel(pieces=[1]))
    early.asked("slow", order, 4, {0})
    assert late.next(4, True, 99) is early.next(4, True, 99) is None
    begun = Helper(Settings())
    begun.asked("slow", order, 4, {0})
    begun.next(4, True, 99)
    assert [answer.begun for answer in begun.cancelled("slow", Cancel(pieces=[1]))] == [True]


def test_what_a_helper_knows_of_closed_clocks_is_forgotten():
    """An order that comes after its clock is closed is wasted work, so it is not taken."""
    helper = Helper(Settings())
    first_size = len(pickle.dumps(helper))
    for clock in range(200):
        order = DoThis(piece=2 * clock, clock=clock, spans=[Span(0, 0, 1)], time_s=0.0)
        helper.asked("slow", order, clock, {0})
        assert helper.next(clock, True, 999) is not None
        helper.cancelled("slow", Cancel(clock=clock, pieces=[2 * clock + 1]))
        helper.drop_old(clock)
    assert len(pickle.dumps(helper)) < first_size + 100
    helper.asked("slow", order, 200, {0})
    assert helper.next(200, True, 999) is None


def test_work_of_data_that_is_not_held_is_not_taken():
    helper = Helper(Settings())
    helper.asked("slow", DoThis(piece=1, clock=4, spans=[Span(3, 0, 1)], time_s=0.0), 4, {0})
    assert helper.next(4, True, 99) is None


@pytest.mark.parametrize(
    ("transient", "reliable", "stage"),
    [(0, 4, 1), (100, 100, 1), (101, 100, 2), (15, 1, 2), (1501, 100, 3), (63, 1, 3), (7, 1, 2)],
)
def test_the_stage_goes_by_the_ratio(transient, reliable, stage):
    """Answer 20."""
    assert stage_by_ratio(transient, reliable) == stage


def test_a_machine_that_comes_and_goes_changes_the_stage_once_in_a_dwell():
    stages, changes = Stages(dwell=10), 0
    for clock in range(60):
        after = stages.next(clock, 8 + clock % 2, 8)
        changes += after.stage != stages.stage
        stages = after
    assert changes <= 6
    assert Stages(stage=3).next(0, 0, 4).stage == 1  # nothing serves any more: at once


def test_stages_without_transient_machines_let_the_first_ones_change_the_stage_at_once():
    """A dwell counts from the last change; clocks without transient machines are none."""
    stages = Stages()
    for clock in range(10):
        stages = stages.next(clock, 0, 2)
    assert stages.next(10, 60, 4).stage == 2
    back = stages.next(10, 60, 4).next(11, 0, 4)
    assert back.next(12, 60, 4).stage == 1
    assert back.next(14, 60, 4).stage == 2


def test_measured_load_moves_the_stage_between_two_thresholds():
    stages = Stages(stage=2, since=-9)
    assert stages.next(5, 40, 4, nic=0.95).stage == 3
    assert stages.next(5, 40, 4, nic=0.7).stage == 2
    assert Stages(stage=3, since=-9).next(5, 40, 4, nic=0.7).stage == 3
    assert Stages(stage=3, since=-9).next(5, 40, 4, nic=0.2).stage == 2


def nodes(reliable, transient, allocations=1):
    made = [Node(f"r{at}", True, f"r{at}", "own", at) for at in range(reliable)]
    return made + [
        Node(f"t{at}", False, f"t{at}", f"a{at % allocations}", 100 + at) for at in range(transient)
    ]


def test_half_of_all_machines_serve_those_that_run_longest():
    """Answer 18: 32 at 4 + 60, with 32 partitions for at most 64 machines."""
    serving = actives(nodes(4, 60), 2, 32, set())
    assert serving == [f"t{at}" for at in range(32)]
    assert len(actives(nodes(4, 60), 2, 16, set())) == 16
    assert len(actives(nodes(1, 6), 2, 16, set())) == 4
    assert actives(nodes(4, 60), 1, 32, set()) == ["r0", "r1", "r2", "r3"]


def test_a_new_server_is_the_longest_running_machine_without_a_partition():
    serving = {"t5", "t6"}
    assert actives(nodes(1, 7), 2, 3, serving)[:2] == ["t5", "t6"]
    assert actives(nodes(1, 7), 2, 3, serving)[2] == "t0"


def test_partitions_are_spread_within_one_and_hardly_move():
    first = spread(dict.fromkeys(range(32)), [f"n{at}" for at in range(5)])
    counts = [list(first.values()).count(f"n{at}") for at in range(5)]
    assert sorted(counts) == [6, 6, 6, 7, 7]
    second = spread(first, [f"n{at}" for at in range(6)])
    assert sum(first[at] != second[at] for at in first) == 5
    assert set(second) == set(range(32))


def test_the_toy_loads_twenty_and_works_on_ten_and_an_eviction_loads_nothing():
    """Answer 19, figure 4.4."""
    old = {f"t{at}": Node(f"t{at}", False, f"t{at}", "old", at) for at in (1, 2)}
    new = {f"t{at}": Node(f"t{at}", False, f"t{at}", "new", at) for at in (3, 4)}
    owners = spread(dict.fromkeys(range(40)), list(old))
    holders = {block: {owner} for block, owner in owners.items()}
    after = spread(owners, [*old, *new], holders)
    assert sorted(list(after.values()).count(name) for name in after.values())[::10] == [10] * 4
    loads = {name: [b for b, o in after.items() if o == name] for name in new}
    for name, more in preloads(after, holders, old | new).items():
        loads[name] = loads.get(name, []) + more
    assert {name: len(those) for name, those in loads.items()} == {"t3": 20, "t4": 20}
    for name, those in loads.items():
        for block in those:
            holders[block].add(name)
    gone = {block: owner if owner in new else None for block, owner in after.items()}
    left = {block: those & set(new) for block, those in holders.items()}
    last = spread(gone, list(new), left)
    assert all(owner in holders[block] for block, owner in last.items())
    assert sorted(list(last.values()).count(name) for name in new) == [20, 20]


def test_two_gigabytes_leave_within_30_s_and_not_within_10():
    """Answer 28: one reliable machine, 1 Gbit/s, and five seconds until the notice is read."""
    assert Drain().fits(30, {"r": 2e9}, 1.25e8)
    assert not Drain().fits(10, {"r": 2e9}, 1.25e8)
    assert Drain().fits(10, {f"r{at}": 5e8 for at in range(4)}, 1.25e8)


def test_no_struct_of_the_protocol_lacks_an_epoch():
    assert Roll(clock=0, owners=[], replicas=[], version=0, lost=[]).epoch == 0
    assert Fresh(partition=0, age=0, sections=[Section("a", np.zeros(1), np.zeros(1))]).epoch == 0


def test_grains_that_a_helper_did_count_once_and_only_in_clocks_that_close():
    """Whoever finishes a clock names the batches of its helpers; what is gone back from is not counted."""
    work = even(8, 2, 4, 1)
    ledger = Ledger(work)

    def finish(worker, block, clock, helped=0):
        spans = [Span(block, 0, 4 - helped), Span(block, 4 - helped, 4)][: 1 + bool(helped)]
        done = [
            Done(span, name) for span, name in zip(spans, (f"{worker}/1", "b/c/9"), strict=False)
        ]
        return ledger.enter(worker, Finished(clock=clock, done=done, measured=0.0))

    assert [finish("a", 0, 0, helped=1), finish("a", 0, 0, helped=1)] == ["", ""]
    assert ledger.take_worked() == (0, 0)
    finish("b/c", 1, 0)
    assert ledger.close() is not None
    assert [ledger.take_worked(), ledger.take_worked()] == [(1, 8), (0, 0)]
    finish("a", 0, 1, helped=3)
    ledger.roll_back(0)
    finish("a", 0, 1)
    finish("b/c", 1, 1)
    assert ledger.close() is not None
    assert ledger.take_worked() == (0, 8)


def test_the_time_of_a_job_goes_on_when_all_its_machines_were_gone():
    """Only the time in which it was served counts, by earlier controllers, too."""
    plan = Plan(even(8, 2, 2), Stop(seconds=100.0), 2, 2, save_every=1, apart=True)
    controller = Controller(plan, Resumed(elapsed_s=20.0))

    def join(name, now_s):
        joins = Join(reliable=name == "keeper", machine=name, allocation=name)
        for to, order in controller.handle(name, joins, now_s):
            if isinstance(order, Load):
                controller.handle(to, Loaded(blocks=order.blocks), now_s)

    for name in ("keeper", "first"):
        join(name, 5.0)
    controller.lost(["first"], 45.0)
    assert controller.elapsed_s(1000.0) == 60.0
    join("second", 1000.0)
    assert controller.begun_s == 1000.0
    assert controller.elapsed_s(1010.0) == 70.0


def test_a_job_begins_without_a_machine_that_is_gone_while_it_loads():
    """The others are here already, so nothing that comes would begin it."""
    controller = Controller(Plan(even(8, 2, 2), Stop(clocks=2), 1, 2, apart=True))
    for name in ("keeper", "first", "second"):
        joins = Join(reliable=name == "keeper", machine=name, allocation=name)
        out = controller.handle(name, joins, 0.0)
        assert name == "first" or out == []
    out = dict(controller.lost(["first"], 1.0))
    assert out["second"] == Load(blocks=[0, 1])


class Plain(Application):
    """Four items that change one row."""

    tables = (Table("rows", 2, 1),)
    items = 4
    stop = Stop(clocks=9)

    def process_range(self, lo, hi, params):
        params.update("rows", [0, 1], np.ones((2, 1)))


def test_a_block_of_an_older_clock_goes_before_the_present_one():
    """Or none would end, if rows of the older clock are what the present one waits for."""
    worker = Worker("a", Plain(), even(4, 2, 2), Bound(1), Settings(size=0), 1)
    worker.handle("c", Roll(clock=0, owners=["s"], replicas=["s"], version=0, lost=[]), 0.0)
    worker.handle("s", Fresh(partition=0, age=0, sections=[]), 0.0)
    worker.handle("c", Grant(clocks={0: 2}), 0.0)
    assert worker.next_run(0.0)[0].clock == 2
    worker.handle("c", Grant(clocks={1: 1}), 0.0)
    run, _ = worker.next_run(0.0)
    assert (run.clock, run.span) == (1, Span(1, 0, 2))


def test_blocks_that_leave_after_a_clock_and_at_once_are_released_together():
    """The turn that held the first one up is given up for the second: nothing says it later."""
    worker = Worker("a", Plain(), even(4, 2, 2), Bound(0), Settings(size=0), 1)
    orders = {"owners": ["s"], "replicas": ["s"], "version": 0, "lost": []}
    worker.handle("c", Roll(clock=-1, blocks=[0, 1], **orders), 0.0)
    worker.handle("s", Fresh(partition=0, age=-1, sections=[]), 0.0)
    assert worker.next_run(0.0)[0] is not None
    assert worker.handle("c", Release(blocks=[0]), 0.0) == []
    out = worker.handle("c", Release(blocks=[1], now=True), 0.0)
    assert [one.clocks for _, one in out if isinstance(one, Released)] == [{0: 0, 1: 0}]


@pytest.mark.parametrize(("age", "asked"), [(0, True), (1, False)])
def test_rows_that_a_former_owner_sends_more_slowly_are_asked_for(age, asked):
    """What the next owner says of a later clock has no row of the clock that is on its way."""

    class Reading(Plain):
        def process_range(self, lo, hi, params):
            params.read("rows", [0, 1])

    def rows(*keys):
        return [Section("rows", np.array(keys), np.ones((len(keys), 1)))]

    worker = Worker("a", Reading(), even(4, 1, 2), Bound(None), Settings(size=0), 1)
    orders = {"replicas": ["s"], "version": 0, "lost": [], "blocks": [0]}
    worker.handle("c", Roll(clock=-1, owners=["s"], **orders), 0.0)
    worker.handle("s", Fresh(partition=0, age=-1, sections=rows(0, 1), asked=True), 0.0)
    worker.handle("c", Route(version=1, owners=["t"], replicas=["s"]), 0.0)
    late = Fresh(partition=0, age=age, sections=rows(1), asked=asked)
    ((to, again),) = worker.handle("t", late, 0.0)
    assert (to, again.keys["rows"].tolist()) == ("t", [0])
    run, _ = worker.next_run(0.0)
    assert worker.finish(run, 1, lambda: 0.0, 0.0) == []
    assert worker.next_run(0.0) == (None, [])
    worker.handle("t", Fresh(partition=0, age=age, sections=rows(0), asked=True), 0.0)
    assert worker.next_run(0.0)[0] is not None


def test_a_dry_run_is_of_one_clock_and_none_is_needed_to_go_back():
    """A pass over the data may take hours, in which nothing is answered."""

    ranges = []

    class Watched(Plain):
        def process_range(self, lo, hi, params):
            ranges.append((lo, hi))
            params.read("rows", [lo // 8])

    worker = Worker("a", Watched(), even(16, 2, 2, batches=4), Bound(1), Settings(size=0), 1)
    orders = {"owners": ["s"], "replicas": ["s"], "version": 0, "lost": []}
    worker.handle("c", Roll(clock=-1, blocks=[0], **orders), 0.0)
    worker.handle("c", Grant(clocks={1: 1}), 0.0)
    tried = [(0, 2), (10, 12)]
    assert ranges == tried
    ((_, asked),) = worker.handle("c", Roll(clock=2, blocks=[0, 1], **orders), 0.0)
    assert asked.keys["rows"].tolist() == [0, 1]
    assert ranges == tried


def finished(block=0):
    return Finished(clock=0, done=[Done(Span(block, 0, 2), "a/1")])


def stage(partition, **more):
    rows = Section("rows", np.array([partition]), np.ones((1, 1)))
    return Stage(partition=partition, batch="a/1", clock=0, sections=[rows], **more)


@pytest.mark.parametrize("whole", [True, False])
def test_a_server_passes_on_what_is_finished_only_when_it_has_all_of_the_batch(whole):
    server = Server("s", {"rows": Plain.tables[0]}, 2, None)
    owners = ["s", "s" if whole else "other"]
    server.handle("c", Roll(clock=-1, owners=owners, replicas=owners, version=0, lost=[]))
    first = server.handle("a", stage(0, together=[0, 1]))
    assert first == [("a", Staged(partition=0, batch="a/1", waits=True))]
    both = server.handle("a", stage(1, together=[0, 1], finished=finished()))
    receipt = Staged(partition=1, batch="a/1", passed=True, waits=True)
    told = (CONTROLLER, Passed(worker="a", finished=finished()))
    assert both == ([("a", receipt), told] if whole else [])  # it has to come here first


def all_here(blocks):
    """A server with both partitions, and a reader of both."""
    server = Server("s", {"rows": Plain.tables[0]}, 2, None, blocks)
    owners = ["s", "s"]
    server.handle("c", Roll(clock=-1, owners=owners, replicas=owners, version=0, lost=[]))
    for at in (0, 1):
        server.handle("a", Subscribe(partition=at, keys={"rows": np.array([at])}))
    return server


def passed_on(server, block, worker="a"):
    """Have a worker finish a block; return what the controller is told, and what the reader gets."""
    rows = [Section("rows", np.array([at]), np.ones((1, 1))) for at in (0, 1)]
    one = Done(Span(block, 0, 2), f"{worker}/{block}")
    said = Finished(clock=0, done=[one])
    more = {"batch": one.batch, "clock": 0, "together": [0, 1]}
    server.handle(worker, Stage(partition=0, sections=rows[:1], **more))
    out = server.handle(worker, Stage(partition=1, sections=rows[1:], finished=said, **more))
    (told,) = [message for to, message in out if to == CONTROLLER]
    return told.closed, [float(m.sections[0].values[0, 0]) for _, m in out if isinstance(m, Fresh)]


def first_row(server):
    return float(server.parts[0].rows["rows"].get(np.array([0]))[0, 0])


def test_a_server_with_every_partition_closes_a_clock_when_all_blocks_are_finished():
    """It does not wait for the controller, which is told, and whose own order changes nothing."""
    server = all_here(blocks=2)
    assert passed_on(server, 0) == (-1, [])
    assert passed_on(server, 1) == (0, [2.0, 2.0])
    assert server.handle("c", Close(clock=0, batches=["a/0", "a/1"])) == []
    server.handle("c", Roll(clock=-1, owners=["s"] * 2, replicas=["s"] * 2, version=1, lost=[]))
    assert first_row(server) == 0.0


@pytest.mark.parametrize("heard", [(), (0,), (0, 1)])
def test_a_push_that_a_former_owner_sends_late_once_more_sets_no_copy_back(heard):
    """It was ordered again when somebody left, and the next owner has pushed a later clock since."""
    server = Server("r", {"rows": Plain.tables[0]}, 1, None)
    server.handle("c", Roll(clock=-1, owners=["s"], replicas=["r"], version=0, lost=[]))

    def push(clock):
        rows = [Section("rows", np.array([0]), np.full((1, 1), float(clock)))]
        (answer,) = server.handle("s", Push(partition=0, clock=clock, sections=rows))
        assert answer == (CONTROLLER, Received(partition=0, clock=clock))

    push(0)
    push(1)
    for clock in heard:
        server.handle("c", Committed(clock=clock))
    push(0)
    server.handle("c", Committed(clock=1))
    copy = server.replicas[0]
    assert (copy.committed, copy.rows["rows"].get(np.array([0])).item()) == (1, 1.0)


def test_a_later_controller_without_a_clock_begins_anew_also_with_who_had_committed_ones():
    """A keeper that was killed before a clock was on its disk has told workers of it."""
    server = all_here(blocks=1)
    passed_on(server, 0)
    server.handle("c", Committed(clock=0))
    server.handle("c", Roll(clock=-1, owners=["s"] * 2, replicas=["s"] * 2, version=1, lost=[]))
    assert first_row(server) == 0.0
    assert server.parts[0].closed == -1


@pytest.mark.parametrize("why", ["a block comes twice", "a worker is gone"])
def test_a_clock_that_may_not_be_what_the_controller_counts_is_left_to_it(why):
    """A batch counts as a whole, so of two that have the same block none can be chosen here."""
    server = all_here(blocks=2)
    passed_on(server, 0)
    if why == "a worker is gone":
        server.handle("c", Gone(nodes=["a"]))
        passed_on(server, 0)  # which came late
    else:
        passed_on(server, 0, worker="b")
    assert passed_on(server, 1, worker="b") == (-1, [])
    assert server.parts[0].closed == -1
    server.handle("c", Close(clock=0, batches=["a/0", "b/1"]))
    assert first_row(server) == 2.0


@pytest.mark.parametrize(("kept", "alone"), [(1 << 24, AHEAD), (100, 6)])
def test_a_server_closes_no_clock_itself_that_is_far_from_the_committed_one(
    monkeypatch, kept, alone
):
    """Or what it keeps for going back, of 16 bytes a clock, would grow until one is committed."""
    monkeypatch.setattr(servers, "KEPT_BYTES", kept)
    server, closed = all_here(blocks=1), []
    for clock in range(alone + 2):
        name = f"a/{clock}"
        said = Finished(clock=clock, done=[Done(Span(0, 0, 2), name)])
        for at in (0, 1):
            rows = [Section("rows", np.array([at]), np.ones((1, 1)))]
            more = {"together": [0, 1], "finished": said if at else None}
            one = Stage(partition=at, batch=name, clock=clock, sections=rows, **more)
            out = server.handle("a", one)
        closed += [message.closed for to, message in out if to == CONTROLLER]
    assert closed == [*range(alone), alone - 1, alone - 1]
    server.handle("c", Close(clock=alone, batches=[f"a/{alone}"]))
    assert server.parts[0].closed == alone


def begun(*names, clocks=9):
    """A controller of as many blocks as there are workers, whose partition has its copy."""
    work, stop = even(4, len(names), 2), Stop(clocks=clocks)
    controller = Controller(Plan(work, stop, 1, len(names) + 1, apart=True))
    for name in (KEPT, *names):
        out = controller.handle(
            name, Join(reliable=name == KEPT, machine=name, allocation=name), 0.0
        )
        for to, order in out:
            if isinstance(order, Load):
                out += controller.handle(to, Loaded(blocks=order.blocks), 0.0)
    for _, order in out:
        if isinstance(order, Move):
            copied = Installed(partition=order.partition, mirror=True, epoch=controller.epoch)
            controller.handle(KEPT, copied, 0.0)
    return controller


def test_a_clock_that_its_server_has_closed_is_not_ordered_again():
    for closed in (-1, 0):
        controller = begun("a")
        out = controller.handle("a", Passed(worker="a", finished=finished(), closed=closed), 0.0)
        assert controller.ledger.closed == 0
        kinds = [type(message) for to, message in out if to == "a"]
        assert kinds == ([PushUp] if closed == 0 else [Close, PushUp])


def test_a_push_begins_a_while_after_the_former_one_or_at_the_end():
    """Of clocks that take less, one push has the rows of many."""
    controller = begun("a", clocks=6)

    def finish(clock, now_s):
        done = [Done(Span(0, 0, 2), f"a/{clock}")]
        passed = Passed(worker="a", finished=Finished(clock=clock, done=done), closed=clock)
        return pushed(controller.handle("a", passed, now_s))

    def pushed(out):
        return [message.clock for to, message in out if isinstance(message, PushUp) and to == "a"]

    assert finish(0, 1.0) == [0]
    assert controller.handle(KEPT, Received(partition=0, clock=0), 1.0) != []
    assert [finish(1, 1.0), finish(2, 1.0 + PUSH_S / 2)] == [[], []]
    assert pushed(controller.tick(1.0 + 0.9 * PUSH_S)) == []
    assert pushed(controller.tick(1.0 + PUSH_S)) == [2]
    controller.handle(KEPT, Received(partition=0, clock=2), 1.0 + PUSH_S)
    assert [finish(clock, 1.0 + PUSH_S) for clock in (3, 4, 5)] == [[], [], [5]]


def test_a_clock_that_a_server_closed_with_a_lost_workers_batch_takes_everybody_back():
    """The server heard the worker before it was lost, and the controller only after that."""
    controller = begun("a", "b")
    blocks = {owner: block for block, owner in controller.blocks.items()}
    (server,) = set(controller.owners)
    other = next(name for name in ("a", "b") if name != server)
    passed = Passed(worker=server, finished=finished(blocks[server]))
    controller.handle(server, passed, 0.0)
    controller.lost([other], 0.0)
    epoch = controller.epoch
    late = Passed(worker=other, finished=finished(blocks[other]), closed=0)
    out = controller.handle(server, late, 0.0)
    assert (controller.ledger.closed, controller.rolls) == (-1, 1)
    assert [message.epoch for to, message in out if isinstance(message, Roll)] == [epoch + 1] * 2
    assert controller.handle(server, late, 0.0) == []  # which is of the older epoch


def test_a_machine_that_leaves_serves_what_the_last_one_to_stay_had():
    """All others are warned when the one that serves is killed; new ones come later."""
    controller = begun("a", "b")
    (server,) = set(controller.owners)
    (other,) = {"a", "b"} - {server}
    controller.evicted([other], 30.0, 0.0)
    controller.lost([server], 1.0)
    assert controller.owners == [other]


def test_what_is_passed_on_counts_after_its_server_has_left_and_once():
    controller = begun("a")
    passed = Passed(worker="a", finished=finished())
    for sender in ("gone", "gone"):
        controller.handle(sender, passed, 0.0)
    controller.handle("a", finished(), 0.0)
    assert controller.ledger.closed == 0


@pytest.mark.parametrize("passed", [True, False])
def test_a_worker_says_what_nobody_has_passed_on(passed):
    """It also says it again to a controller that was away, and before it releases the block."""
    said = {}
    for case in ("usual", "report", "release"):
        worker = Worker("a", Plain(), even(4, 1, 2), Bound(0), Settings(size=0), 2)
        blocks = {"owners": ["s", "s"], "replicas": ["s", "s"], "blocks": [0]}
        worker.handle("c", Roll(clock=-1, version=0, lost=[], **blocks), 0.0)
        for at in (0, 1):
            rows = Section("rows", np.array([at]), np.zeros((1, 1)))
            worker.handle("s", Fresh(partition=at, age=-1, sections=[rows]), 0.0)
        stages = []
        while (run := worker.next_run(0.0)[0]) is not None:
            stages += worker.finish(run, 1, lambda: 0.0, 0.0)
        assert [to for to, _ in stages] == ["s", "s"]
        assert stages[-1][1].finished.clock == 0
        if case == "report":
            worker.handle("c", Report(), 0.0)
        if case == "release":
            worker.handle("c", Release(blocks=[0]), 0.0)
        batch = stages[0][1].batch
        assert worker.handle("s", Staged(partition=0, batch=batch), 0.0) == []
        out = worker.handle("s", Staged(partition=1, batch=batch, passed=passed), 0.0)
        said[case] = [type(one) for to, one in out if to == CONTROLLER]
    own = [] if passed else [Finished]
    assert said == {"usual": own, "report": [Finished], "release": [*own, Finished, Released]}
