"""What a worker reads is as old as its bound allows, and whole clocks give the same bits."""

import numpy as np
import pytest
from counters import Counter

from agent.paramserver import worker
from agent.paramserver.api import Application, Stop, even, run_alone
from agent.paramserver.controller import Plan
from agent.paramserver.messages import Push, PushUp, Received, Save, Saved
from agent.paramserver.tables import Changes, Table, adagrad, adam, momentum
from agent.paramserver.virtual.cluster import Place, Virtual
from agent.paramserver.virtual.network import Delays
from agent.paramserver.worker import Bound

WORK = even(96, 6, 4)


class Regression(Application):
    """Least squares on generated data, by gradients of the clock's own rows."""

    items, width = 96, 5
    stop = Stop(clocks=9)
    tables = (
        Table("plain", 5, 1, exact=True, own_writes=False),
        Table("momentum", 5, 1, rule=momentum(0.01), exact=True),
        Table("adagrad", 5, 1, rule=adagrad(0.05), exact=True),
        Table("adam", 5, 1, rule=adam(0.01), exact=True),
    )

    def __init__(self):
        draw = np.random.default_rng(1)
        self.points = draw.normal(size=(self.items, self.width))
        self.answers = self.points @ np.arange(1.0, 6.0)

    def process_range(self, lo, hi, params):
        keys = np.arange(self.width)
        points, answers = self.points[lo:hi], self.answers[lo:hi]
        for table in self.tables:
            error = points @ params.read(table.name, keys)[:, 0] - answers
            gradient = points.T @ error / self.items
            step = -0.1 if table.rule is None else 1.0
            params.update(table.name, keys, step * gradient[:, None])
            params.measure(float(error @ error))


def run(slack, *, help_size=2, slow=None, seed=0, mishap=None):
    plan = Plan(WORK, Regression.stop, partitions=3, expected=5, help_size=help_size, save_every=3)
    places = [Place(f"n{at}", f"m{at}", at < 2, f"p{at}") for at in range(5)]
    virtual = Virtual(
        Regression,
        plan,
        places,
        cost=lambda _: 0.01,
        network=lambda made: Delays(made, 0.003, 0.9, seed),
        bound=Bound(slack),
    )
    if slow:
        virtual.slow_down(slow, 6.0)
    if mishap:
        mishap(virtual)
    assert virtual.run() == "9 clocks are done"
    return virtual


def state(virtual):
    found = {table.name: np.zeros((5, table.columns)) for table in Regression.tables}
    for name, whole in found.items():
        for at, owner in enumerate(virtual.brain.owners):
            rows = virtual.hosts[owner].member.server.parts[at].rows[name]
            whole[rows.keys()] = rows.get(rows.keys())
    return found


def alone():
    ran = run_alone(Regression(), WORK)
    return {name: rows.get(rows.keys()) for name, rows in ran.rows.items()}


def assert_same_bits(virtual):
    expected = alone()
    for name, rows in state(virtual).items():
        assert np.array_equal(rows, expected[name]), name


def test_bsp_is_the_same_bits_as_one_process():
    assert_same_bits(run(0))


def test_bsp_with_a_straggler_that_is_helped_is_the_same_bits():
    virtual = run(0, slow="n3")
    given, computed = virtual.controller.ledger.take_worked()
    assert 0 < given < computed
    assert computed == len(virtual.controller.ledger.measures) * WORK.blocks * WORK.grains
    assert_same_bits(virtual)


@pytest.mark.parametrize("names", [["n2"], ["n3", "n4"], ["n2", "n3", "n4"], ["n0", "n3"], ["n1"]])
def test_a_loss_at_any_moment_leaves_the_bits_of_a_run_without_one(names):
    """Answers 21 to 23: optimizer arrays go back with the weights."""
    for moment in (0.13, 0.4, 0.71):
        virtual = run(0, mishap=lambda made, at=moment: made.at(at, lambda: made.kill(names)))
        assert_same_bits(virtual)


@pytest.mark.parametrize("step", [PushUp, Push, Received, Save, Saved])
def test_a_loss_after_the_last_clock_adds_no_clock_to_it(step):
    """Who is left goes back to the last clock, and has nothing to do but write it down."""

    def mishap(made):
        def look(_, __, message):
            if isinstance(message, step) and message.clock == 8:
                made.on_message = None
                made.at(made.now_s, lambda: made.kill(["n2", "n3", "n4"]))

        made.on_message = look
        made.bound = Bound(0)
        for host in made.hosts.values():  # as a worker that does not know of a last clock
            host.member.worker.bound = Bound(0)

    virtual = run(0, mishap=mishap)
    assert virtual.brain.rolls == 1
    assert len(virtual.brain.ledger.measures) == 9
    assert_same_bits(virtual)


@pytest.mark.parametrize("warning_s", [120, 30, 8, 0])
def test_an_eviction_of_all_transient_machines_loads_nothing_and_keeps_the_bits(warning_s):
    loads = []

    def mishap(made):
        def evict():
            counts = {name: len(host.member.worker.held) for name, host in made.hosts.items()}
            loads.append(counts)
            made.evict(["n2", "n3", "n4"], warning_s)

        made.at(0.45, evict)

    virtual = run(0, mishap=mishap, help_size=0)
    assert_same_bits(virtual)
    if warning_s >= 8:
        assert virtual.brain.rolls == 0


@pytest.mark.parametrize("slack", [0, 1, 3])
def test_no_read_is_older_than_its_bound_and_no_start_is_too_early(slack):
    """Answer 7, with a worker that is six times as slow."""
    seen = []

    def watched(made):
        def watch():
            closed = made.brain.ledger.closed
            for host in made.hosts.values():
                part = host.run and host.run.clock
                if part is not None:
                    seen.append(part - closed)
                    assert min(host.member.worker.cache.ages) >= part - 1 - slack

        made.on_event = watch

    run(slack, slow="n4", seed=slack, mishap=watched)
    assert max(seen) <= slack + 1
    assert slack == 0 or max(seen) > 1


@pytest.mark.parametrize("slack", [0, 1, 3, None])
def test_a_machine_that_comes_later_gets_work_whatever_the_bound(slack):
    """Workers that need not wait have always begun their next clock before the last one is flushed."""
    late = Place("late", "late", False, "later")
    virtual = run(slack, help_size=0, mishap=lambda made: made.at(0.15, lambda: made.add(late)))
    assert "late" in virtual.brain.blocks.values()
    assert virtual.hosts["late"].member.worker.computed > 0


@pytest.mark.parametrize("slack", [10**9, None])
def test_nobody_goes_on_beyond_the_last_clock_or_what_memory_holds(slack, monkeypatch):
    """One worker that stands still for long must not fill the memory of all others."""

    class Long(Counter):
        stop = Stop(clocks=40)

    def made():
        plan = Plan(even(Long.items, 6, 4), Long.stop, partitions=2, expected=3)
        return Virtual(
            Long,
            plan,
            [Place(f"n{at}", f"m{at}") for at in range(3)],
            cost=lambda _: 0.01,
            network=lambda made: Delays(made, 0.003),
            bound=Bound(slack),
        )

    def ahead(virtual):
        virtual.slow_down("n2", 1e9)
        virtual.run(lambda: virtual.now_s > 30)
        with monkeypatch.context() as patched:  # clocks of 1 ms leave no time to go through all
            patched.delattr(Changes, "all")
            assert virtual.hosts["n0"].member.worker.next_run(virtual.now_s) == (None, [])
        clocks = [max(host.member.worker.own.values()) for host in virtual.hosts.values()]
        virtual.slow_down("n2", 1.0)
        assert virtual.run() == "40 clocks are done"
        assert virtual.brain.ledger.measures == [Long.items] * 40
        return clocks

    assert ahead(made()) == [40, 40, 0]
    monkeypatch.setattr(worker, "AHEAD_BYTES", 5000)
    few = ahead(made())
    assert few[0] == few[1] < 10


def test_two_workers_that_help_each_other_both_end():
    """Answer 8."""
    plan = Plan(even(96, 2, 40), Regression.stop, partitions=1, expected=2, help_size=4)
    virtual = Virtual(
        Regression,
        plan,
        [Place("a", "a"), Place("b", "b")],
        cost=lambda _: 0.01,
        network=lambda made: Delays(made, 0.001, 0.9),
        bound=Bound(1),
    )
    for moment in range(1, 40):
        for name in "ab":
            times = 9.0 if (moment + (name == "b")) % 2 else 1.0
            virtual.at(moment / 8, lambda n=name, t=times: virtual.slow_down(n, t))
    assert virtual.run() == "9 clocks are done"


def test_the_store_holds_the_newest_whole_clock_and_what_came_after_it():
    virtual = run(0)
    assert {clock for _, clock in virtual.disk.files} <= {5, 8}
    assert {at for at, clock in virtual.disk.files if clock == 8} == {0, 1, 2}


def test_a_restarted_controller_loses_no_clock_and_keeps_its_table():
    """Answer 29."""

    def mishap(made):
        for moment in (0.1, 0.4, 0.8):
            made.at(moment, lambda: made.stop_controller(0.06))

    virtual = run(0, mishap=mishap)
    assert virtual.brain.rolls == 0
    assert_same_bits(virtual)
