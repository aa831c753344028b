"""What is wrong with an application, its data or its settings is named before it costs anything."""

import gzip
import re
import tracemalloc

import loaders
import msgspec
import numpy as np
import pytest

from agent.errors import Misuse
from agent.keeper.clocks import CODES
from agent.paramserver.api import Application, Params, Stop, checked, even, run_alone
from agent.paramserver.controller import Controller, Plan
from agent.paramserver.messages import (
    CONTROLLER,
    Beat,
    Close,
    Failed,
    Join,
    Leave,
    Loaded,
    Save,
    Section,
    Stage,
)
from agent.paramserver.server import Partition
from agent.paramserver.tables import (
    FIXED_BITS,
    LARGEST,
    NUMBERS,
    PRODUCT,
    SUM,
    UNION,
    Aggregate,
    ApplicationError,
    Rows,
    Rule,
    Table,
    adagrad,
    momentum,
    verify,
)
from agent.paramserver.virtual.cluster import Place, Virtual
from agent.paramserver.virtual.network import Delays
from agent.paramserver.worker import Bound, Cache
from agent.protocol import Serving
from agent.served import ParamServerJob
from cloud.clock import VirtualClock

WEIGHTS = np.array([1.0, np.pi])


class Small(Application):
    items = 40
    stop = Stop(clocks=3)
    tables = (Table("sum", 4, 2),)

    def process_item(self, item, params):
        params.update("sum", [item % 4], self.change(item))

    def change(self, item):
        return np.ones((1, 2))


class Never(Stop):
    """A criterion of an application's own, which nobody would ask in a job."""

    def reached(self, measures, elapsed_s):
        return ""


def cluster(
    make,
    *,
    places=2,
    reliable=1,
    partitions=2,
    help_size=0,
    stop=Small.stop,
    save_every=0,
    items=40,
):
    return Virtual(
        make,
        Plan(even(items, 4, 5), stop, partitions, places, help_size, save_every=save_every),
        [Place(f"n{at}", f"m{at}", at < reliable, "spot") for at in range(places)],
        cost=lambda _: 0.01,
        network=lambda made: Delays(made, 0.001),
        bound=Bound(0),
    )


def run(make, **settings):
    virtual = cluster(make, **settings)
    return virtual, virtual.run()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (np.ones((1, 3)), "shape (1, 3)"),
        (np.ones(2), "shape (2,)"),
        (np.array([[1.0, np.nan]]), "key 3, is not finite: nan"),
        (np.array([[np.inf, 0.0]]), "is not finite: inf"),
    ],
)
def test_a_change_of_a_wrong_shape_or_that_is_no_number_is_named(change, said):
    class Wrong(Small):
        def change(self, item):
            return change if item == 23 else np.ones((1, 2))

    with pytest.raises(ApplicationError) as error:
        run_alone(Wrong())
    assert said in str(error.value)
    virtual, why = run(Wrong)
    assert said in why
    assert "items 22 to 24" in why
    assert virtual.brain.ledger.closed == -1


@pytest.mark.parametrize(
    ("dtype", "given", "said"),
    [
        ("float32", 1e39, "key 3, is not finite: inf"),
        ("float16", 70_000, "key 3, is not finite: inf"),
        ("int64", 0.5, "key 3, is 0.5, which int64 cannot hold"),
        ("int8", 300, "key 3, is 300, which int8 cannot hold"),
        ("uint8", -1, "key 3, is -1, which uint8 cannot hold"),
        ("int64", float("nan"), "key 3, is nan, which int64 cannot hold"),
        ("int64", 2.0**63, "which int64 cannot hold"),
    ],
)
def test_a_change_that_the_numbers_of_a_table_cannot_hold_is_named(dtype, given, said):
    """It would be counted as 0, as another number, or as one that no sum comes back from."""
    table = Table("sum", 4, 2, dtype)
    assert np.array_equal(table.change(np.array([3]), [[1.0, 2]]), [[1, 2]])
    with pytest.raises(ApplicationError, match=re.escape(said)):
        table.change(np.array([3]), np.array([[0, given]]))


@pytest.mark.parametrize("dtype", ["uint64", "complex64", ">f4", "longdouble", "nonsense"])
def test_numbers_that_no_checkpoint_can_have_are_refused_before_a_start(dtype):
    class Strange(Small):
        tables = (Table("sum", 4, 2, dtype),)

    with pytest.raises(ApplicationError, match=f"table 'sum' has numbers of '{dtype}'.*float64"):
        checked(Strange())


def test_a_table_named_as_the_keys_of_another_is_refused_before_a_start():
    """One of both would be missing from the result."""

    class Colliding(Small):
        tables = (Table("sum", 4, 2), Table("sum keys", 4, 2))

    with pytest.raises(ApplicationError, match=r"'sum keys' has the name .* keys of table 'sum'"):
        checked(Colliding())


def test_every_number_that_a_table_can_have_a_checkpoint_can_have():
    assert set(CODES) == set(NUMBERS)
    for dtype in (*NUMBERS, "f4", "float", "i8"):
        for aggregate in (SUM, LARGEST) if dtype != "bool" else (LARGEST,):
            verify(Table("any", 4, 2, dtype, aggregate=aggregate))
    for dtype in ("uint8", "bool", "int16", "i8"):
        verify(Table("sets", 4, 2, dtype, aggregate=UNION))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (np.float32("nan"), "the measure is not finite: nan"),
        (float("-inf"), "the measure is not finite: -inf"),
        (1e300, "the measure is too large to be summed: 1e"),
        ([1.0, 2.0], "TypeError"),
    ],
)
def test_a_measure_that_is_no_number_is_named(value, said):
    """A clock with one could be written down, and not be read by the next keeper."""

    class Wrong(Small):
        def process_item(self, item, params):
            params.measure(value if item == 23 else 0.5)

    with pytest.raises(ApplicationError, match=said):
        run_alone(Wrong())
    virtual, why = run(Wrong)
    assert said in why
    assert "22" in why
    assert virtual.brain.ledger.closed == -1


@pytest.mark.parametrize("one", [np.float32(0.1), np.int64(1), np.array([0.5]), 1])
def test_a_measure_is_sent_and_summed_as_a_float_whatever_number_it_is(one):
    """A sum over a table of float32 is a number of NumPy's, which no message carries."""
    params = Params({}, lambda table, keys: None, 0)
    for _ in range(1000):
        params.measure(one)
    assert type(params.measured) is float
    assert params.measured == pytest.approx(1000 * float(np.ravel(one)[0]), rel=1e-12)


@pytest.mark.parametrize("value", [0.0, 2.5])
def test_a_measure_that_stays_the_same_ends_a_job_that_stops_when_it_converges(value):
    """Also at 0, of which no change is a share: a perfect fit, or a measure that nobody takes."""
    stop = Stop(change=0.001, over=2)
    assert stop.reached([value, value], 0.0) == ""
    assert "changed by less than 0.1% in 2 clocks" in stop.reached([value] * 3, 0.0)
    assert stop.reached([value, value, value + 1.0], 0.0) == ""


def test_an_application_that_raises_is_named_with_its_range_and_its_line():
    class Raises(Small):
        def process_item(self, item, params):
            raise ZeroDivisionError("no luck")

    said = []
    virtual = cluster(Raises)
    virtual.on_message = lambda _, __, message: said.append(message)
    why = virtual.run()
    assert "Raises.process_range(" in why
    assert why.endswith("raised ZeroDivisionError: no luck")
    failed = next(message for message in said if isinstance(message, Failed))
    first, *frames, last = failed.traceback.splitlines()
    assert (first, last) == ("Traceback (most recent call last):", "ZeroDivisionError: no luck")
    assert [line.rpartition(" in ")[2] for line in frames if line.startswith("  File")] == [
        "process_item"
    ], "nothing of ours"


def test_a_change_that_has_no_meaning_is_named_with_the_line_that_made_it():
    class Wrong(Small):
        def change(self, item):
            return [[np.inf, 0.0]]

    said = []
    virtual = cluster(Wrong)
    virtual.on_message = lambda _, __, message: said.append(message)
    virtual.run()
    failed = next(message for message in said if isinstance(message, Failed))
    assert "in process_item" in failed.traceback
    assert failed.traceback.endswith("is not finite: inf")


@pytest.mark.parametrize("mishap", ["controller restarts", "others die"])
def test_an_error_that_the_controller_does_not_hear_at_first_is_said_again(mishap):
    """All machines would be paid for without an end, because the one that failed computes no more."""

    class Raises(Small):
        def process_item(self, item, params):
            if params.clock == 1 and item == 23:
                raise ZeroDivisionError("no luck")
            super().process_item(item, params)

    failed = []

    def look(sender, _, message):
        if isinstance(message, Failed) and not failed:
            failed.append(sender)
            virtual.at(virtual.now_s, disturb)

    def disturb():
        if mishap == "controller restarts":
            virtual.stop_controller(0.05)
        else:
            virtual.kill({*virtual.brain.owners, *virtual.hosts} - {*failed, "n0"})

    virtual = cluster(Raises, places=3, save_every=1)
    virtual.on_message = look
    assert virtual.run(limit_s=100).endswith("raised ZeroDivisionError: no luck")
    assert failed


@pytest.mark.parametrize(
    ("aggregate", "said"),
    [
        (Aggregate("difference", np.subtract, 0), "is not commutative"),
        (Aggregate("mean", lambda a, b: (a + b) / 2, 0), "is not associative"),
        (Aggregate("sum", np.add, 1), "is not neutral"),
        (Aggregate("last", np.fmax, 0, commutative=False), "does not declare"),
        (Aggregate("clipped", lambda a, b: np.clip(a + b, -8, 8), 0), "is not associative"),
        (Aggregate("widest", lambda a, b: np.where(abs(a) < abs(b), b, a), 0), "commutative"),
        (Aggregate("nested", lambda a, b: (a + b)[None], 0), r"float64 of shape \(1, \d+, 2\) out"),
        (Aggregate("nothing", lambda a, b: None, 0), "makes NoneType out of float64"),
    ],
)
def test_an_aggregate_that_is_not_what_it_declares_is_refused(aggregate, said):
    class Declares(Small):
        tables = (Table("sum", 4, 2, aggregate=aggregate),)

    with pytest.raises(ApplicationError, match=said):
        checked(Declares())


def test_an_aggregate_that_makes_fractions_of_whole_numbers_is_refused():
    with pytest.raises(ApplicationError, match=r"float64 of shape .* out of int64"):
        verify(Table("sum", 4, 2, "int64", aggregate=Aggregate("length", np.hypot, 0)))


def _adds_in_place(first, second):
    first += second
    return first


def _farther_row(first, second):
    return np.where((first @ WEIGHTS)[:, None] < (second @ WEIGHTS)[:, None], second, first)


@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize(
    "aggregate",
    [
        SUM,
        PRODUCT,
        LARGEST,
        Aggregate("least", np.minimum, np.inf),
        Aggregate("in place", _adds_in_place, 0),
    ],
)
def test_an_aggregate_that_is_what_it_declares_is_taken_for_all_numbers(aggregate, dtype):
    verify(Table("sum", 4, 2, dtype, aggregate=aggregate))


def test_an_aggregate_sees_rows_of_a_table_wherever_it_is_used():
    """Changes are summed one by one, and it may look at whole rows."""

    class Larger(Small):
        tables = (Table("sum", 4, 2, aggregate=Aggregate("row", _farther_row, 0)),)

        def change(self, item):
            return np.array([[item, 1.0]])

    assert run_alone(Larger()).value("sum").tolist() == [[36 + key, 1.0] for key in range(4)]


@pytest.mark.parametrize(
    ("aggregate", "dtype", "value"),
    [(PRODUCT, "float64", 2.0), (LARGEST, "float32", 9.0), (UNION, "int64", 6)],
)
def test_other_aggregates_than_sums_work(aggregate, dtype, value):
    class Other(Small):
        tables = (Table("sum", 4, 2, dtype, initial=1, aggregate=aggregate),)
        stop = Stop(clocks=1)

        def change(self, item):
            return np.full(
                (1, 2), value if item < 4 else aggregate.neutral if aggregate is not LARGEST else 3
            )

    found = run_alone(Other()).value("sum")
    assert np.array_equal(
        found, np.full((4, 2), {"product": 2, "largest": 9, "union": 7}[aggregate.name])
    )


def test_an_application_is_not_asked_for_a_range_without_items():
    """More blocks and grains than items are usual: the defaults are 480, and a mean of none is no number."""

    class Means(Small):
        items = 10

        def process_range(self, lo, hi, params):
            mean = np.arange(10.0)[lo:hi].mean()
            params.update("sum", [lo % 4], [[mean, 1]])
            params.measure(mean)

    alone = run_alone(Means(), even(10, 24, 20))
    assert alone.measures == [45.0] * 3
    virtual, why = run(Means, items=10)
    assert why == "3 clocks are done"
    assert virtual.brain.ledger.measures == alone.measures


def _late(error):
    """Return a function that raises, but not on the samples that are looked at before a start."""

    def combine(first, second):
        if (first > 100).any():
            raise error
        return first + second

    return combine


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (Table("sum", 4, 2, aggregate=Aggregate("mine", _late(KeyError("x")), 0)), "KeyError: 'x'"),
        (
            Table(
                "sum",
                4,
                2,
                rule=Rule("r", 0, lambda v, g, _: np.copyto(v, _late(OSError(5))(v, g))),
            ),
            "changing table 'sum' raised OSError: 5",
        ),
        (None, "Sorry.load(0, 10) raised FileNotFoundError: part.csv"),
    ],
)
def test_what_an_application_raises_outside_of_its_ranges_is_named_as_well(table, said):
    """It would end each node that tries, with its machine, until none is left."""

    class Sorry(Small):
        tables = (table,) if table else Small.tables

        def load(self, lo, hi):
            if table is None:
                raise FileNotFoundError("part.csv")

        def change(self, item):
            return np.full((1, 2), 50.0)

    _, why = run(Sorry, stop=Stop(clocks=9))
    assert said in why


def test_an_unknown_table_is_named_with_those_that_exist():
    params = Params({"one": Small.tables[0]}, lambda table, keys: None, 0)
    with pytest.raises(ApplicationError, match="no table 'two'; there are: one"):
        params.read("two", [0])


@pytest.mark.parametrize("key", [-1, 4])
@pytest.mark.parametrize("act", ["read", "update"])
def test_a_key_that_a_table_does_not_have_is_named(key, act):
    class Beyond(Small):
        def process_item(self, item, params):
            if item == 23 and act == "read":
                params.read("sum", [0, key])
            params.update("sum", [key if item == 23 else 0], np.ones((1, 2)))

    with pytest.raises(ApplicationError, match=f"table 'sum' has no key {key}; its keys are 0 to"):
        run_alone(Beyond())
    virtual, why = run(Beyond)
    assert f"has no key {key}" in why
    assert virtual.brain.ledger.closed == -1


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ([1.7], "no key 1.7: it is no whole number"),
        ([float("nan")], "no key nan: it is no whole number"),
        (np.array([2**63 + 5], np.uint64), r"no key 9223372036854775813: .* less than 2\^63"),
        ([1e19], r"no key 1e.19: keys are less than 2\^63"),
        (np.array([True, False]), "these have shape .2,. and are bool"),
        (["3"], "these have shape .1,. and are <U1"),
        ([[1], [2]], "these have shape .2, 1. and are int64"),
        (3, "these have shape .. and are int64"),
    ],
)
@pytest.mark.parametrize("act", ["read", "update"])
def test_keys_that_are_no_row_of_whole_numbers_are_named(keys, said, act):
    """A mask or a share would be the rows of other keys, without a word."""

    class Odd(Small):
        tables = (Table("sum", 0, 2),)

        def process_item(self, item, params):
            if act == "read":
                params.read("sum", keys)
            params.update("sum", keys, np.ones((np.size(keys), 2)))

    with pytest.raises(ApplicationError, match=said):
        run_alone(Odd())
    _, why = run(Odd)
    assert re.search(said, why)


@pytest.mark.parametrize("change", [[[1j, 0]], [["2", "3"]], [[None, 1]]])
def test_a_change_that_is_of_no_real_numbers_is_named(change):
    class Odd(Small):
        def change(self, item):
            return change

    with pytest.raises(ApplicationError, match=r"table 'sum' is of .+, no numbers"):
        run_alone(Odd())


@pytest.mark.parametrize("number", [0, 4])
def test_no_keys_at_all_are_read_at_once_although_nothing_of_the_table_is_here(number):
    """A range whose items need no row of a table: it was asked again for what is never sent."""

    class Spare(Small):
        tables = (*Small.tables, Table("spare", number, 1))

        def process_item(self, item, params):
            params.measure(len(params.read("spare", [])))
            super().process_item(item, params)

    virtual, why = run(Spare)
    assert why == "3 clocks are done"
    assert virtual.brain.ledger.measures == run_alone(Spare()).measures


def test_an_application_may_use_its_arrays_again():
    class Thrifty(Small):
        stop = Stop(clocks=1)

        def __init__(self):
            self.keys, self.values = np.zeros(1, np.int64), np.zeros((1, 2))

        def process_range(self, lo, hi, params):
            for item in range(lo, hi):
                self.keys[:], self.values[:] = item % 4, item
                params.update("sum", self.keys, self.values)

    found = run_alone(Thrifty(), even(40, 1, 4)).value("sum")
    assert found[:, 0].tolist() == [sum(range(key, 40, 4)) for key in range(4)]


@pytest.mark.parametrize("kind", ["float16", "float32", "float64", "int8", "uint8", "bool"])
def test_an_exact_table_takes_changes_of_any_numbers_for_what_they_are(kind):
    table, ones = Table("sum", 4, 1, exact=True), np.ones((1, 1), kind)
    assert table.change(np.array([0]), ones).tolist() == [[2**FIXED_BITS]]


@pytest.mark.parametrize("most", [2.0**31, -(2**63)])
def test_a_change_that_fixed_point_cannot_hold_is_named(most):
    table = Table("sum", 4, 1, exact=True)
    with pytest.raises(ApplicationError, match="key 3, is beyond"):
        table.change(np.array([2, 3]), np.array([[1], [most]]))


@pytest.mark.parametrize("items", [(0, 1), (0, 39)])  # of one worker, and of two
def test_an_exact_sum_that_fixed_point_cannot_hold_is_named(items):
    class Huge(Small):
        tables = (Table("sum", 4, 1, exact=True),)

        def process_item(self, item, params):
            params.update("sum", [0], [[2.0**30 if item in items else 0.0]])

    said = "the sum of changes of table 'sum', key 0, is beyond what fixed point can hold"
    with pytest.raises(ApplicationError, match=said):
        run_alone(Huge())
    virtual, why = run(Huge)
    assert said in why
    assert virtual.brain.ledger.closed == -1


BEYOND = [
    (Table("sum", 4, 1, "float32"), 8e36, "float32 can hold;"),
    (Table("sum", 4, 1, "float16", exact=True), 1500.0, "float16 can hold;"),
    (Table("sum", 4, 1, "int8"), 3, "int8 can hold;"),
    (Table("sum", 4, 1, "uint8"), 6, "uint8 can hold;"),
    (Table("sum", 4, 1, "int64"), 2**62 // 16, "int64 can hold;"),
    (Table("sum", 4, 1, "int32", 1, PRODUCT), 2, "int32 can hold;"),
    (
        Table("sum", 4, 1, "float64", aggregate=Aggregate("mine", lambda a, b: a + b, 0)),
        4e306,
        "float64 can hold;",
    ),
    (
        Table("sum", 4, 1, "float32", rule=momentum(-1e35, keep=1.0)),
        75.0,
        "float32 can hold after 'momentum';",
    ),
]


@pytest.mark.parametrize(("table", "value", "said"), BEYOND)
def test_a_sum_that_numbers_cannot_hold_is_named_and_the_clocks_before_it_stay(table, value, said):
    """It would be infinite, from which nothing comes back, or wrap around to another number."""

    class Growing(Small):
        tables = (table,)

        def __init__(self, clocks=9):
            self.stop = Stop(clocks=clocks)

        def change(self, item):
            return np.full((1, 1), value)

    with pytest.raises(ApplicationError, match=f"table 'sum', key 0, is beyond what {said}"):
        run_alone(Growing())
    virtual, why = run(Growing, stop=Stop(clocks=9), save_every=1)
    assert re.search(f"table 'sum', key .*, is beyond what {said}", why)
    assert virtual.brain.committed >= 1
    saved = virtual.brain.saved
    expected = run_alone(Growing(saved + 1)).rows["sum"].get(np.arange(4))
    for partition in range(2):
        (section,) = virtual.disk.read(partition, saved)
        assert np.allclose(section.values, expected[section.keys])


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int32"])
def test_a_sum_of_one_clock_that_narrow_numbers_cannot_hold_is_named(dtype):
    class Full(Small):
        tables = (Table("sum", 4, 1, dtype),)

        def change(self, item):
            return np.full((1, 1), np.iinfo(dtype).max)

    said = f"the sum of changes of table 'sum', key 0, is beyond what {dtype} can hold"
    with pytest.raises(ApplicationError, match=said):
        run_alone(Full())
    virtual, why = run(Full)
    assert re.search(said.replace("key 0", "key ."), why)
    assert virtual.brain.ledger.closed == -1


def test_a_sum_that_cannot_be_held_leaves_every_table_as_it_was():
    """A part of a clock would stay for good, because nothing says what its rows were before."""
    tables = {"first": Table("first", 4, 1), "second": Table("second", 4, 1, "int8")}
    part = Partition(0, tables, 1)
    for clock, value in enumerate((100, 100)):
        rows = [Section(name, np.array([1]), np.array([[value]])) for name in tables]
        part.staged["batch"] = Stage(partition=0, batch="batch", clock=clock, sections=rows)
        if clock:
            with pytest.raises(ApplicationError, match="'second', key 1, is beyond what int8"):
                part.close(Close(clock=clock, batches=["batch"]))
        else:
            part.close(Close(clock=clock, batches=["batch"]))
    part.roll_back(0)
    assert {name: rows.get(np.array([1])).item() for name, rows in part.rows.items()} == {
        "first": 100,
        "second": 100,
    }


@pytest.mark.parametrize(
    ("table", "value"),
    [
        (Table("sum", 4, 1, "int8"), 12),
        (Table("sum", 4, 1, "int64"), (2**63 - 1) // 10),
        (Table("sum", 4, 1, "float32"), 3.4e37),
        (Table("sum", 4, 1, "float64", -np.inf, LARGEST), 1e308),
        (Table("sum", 4, 1, "bool", aggregate=UNION), True),
    ],
)
def test_a_sum_that_just_fits_is_no_error(table, value):
    class Full(Small):
        tables = (table,)
        stop = Stop(clocks=1)

        def change(self, item):
            return np.full((1, 1), value)

    times = 10 if table.aggregate is SUM else 1
    assert np.allclose(run_alone(Full()).value("sum"), times * value)


def test_reading_a_sparse_table_makes_no_row():
    """Else the tables of a job lack rows that a run alone has, because no server hears of a read."""
    held = Rows(Table("sparse", 0, 2, initial=lambda keys: keys[:, None] * 1.0))
    assert held.get(np.array([7, 3])).tolist() == [[7, 7], [3, 3]]
    assert held.keys().tolist() == []
    held.put(np.array([3]), np.array([[1.0, 2.0]]))
    assert held.get(np.array([7, 3, 5])).tolist() == [[7, 7], [1, 2], [5, 5]]
    assert held.keys().tolist() == [3]


def test_to_look_at_a_table_takes_memory_for_few_of_its_rows():
    """A row may be all weights of a network, and each worker looks at the table before it starts."""
    table = Table("weights", 1, 200_000, "float32")
    tracemalloc.start()
    try:
        verify(table)
        assert tracemalloc.get_traced_memory()[1] < 200 * table.width * 4
    finally:
        tracemalloc.stop()


def test_a_sparse_row_keeps_no_more_alive_than_itself():
    """Each batch brings one row that stays and many that the next batch replaces."""
    table, width = Table("sparse", 0, 1000), 1000
    held, cache = Rows(table), Cache({"sparse": table}, 1)
    tracemalloc.start()
    try:
        for at in range(30):
            keys = np.array([at, *range(100, 150)])
            held.put(keys, np.ones((len(keys), width)))
            cache.put(Section("sparse", keys, np.ones((len(keys), width))))
        rows = 2 * (30 + 50)
        assert tracemalloc.get_traced_memory()[0] < 1.5 * rows * width * 8
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (Table("sum", -4, 2), "has -4 keys of width 2"),
        (Table("sum", 4, 0), "has 4 keys of width 0"),
        (Table("sum", 4.0, 2), "has 4.0 keys of width 2"),
        (Table("sum", 4, 2, "float32", np.nan), "first row of table 'sum', key 0, is not a number"),
        (Table("a\0b", 4, 2), "has the name 'a.x00b'; a name is text of printable"),
        (Table("\ud800", 4, 2), "has the name '.ud800'; a name"),
        (Table("", 4, 2), "has the name ''; a name"),
        (Table(7, 4, 2), "has the name 7; a name"),
        (Table("sum", 4, 2, "int8", 300), "first rows of table 'sum' raised OverflowError"),
        (Table("sum", 4, 2, "int64", 0.5), "are numbers that int64 cannot hold"),
        (
            Table("sum", 0, 2, initial=lambda keys: np.ones((len(keys), 3))),
            "first rows of table 'sum' raised ValueError",
        ),
        (
            Table("sum", 4, 2, initial=lambda keys: np.random.random((len(keys), 2))),
            "depend on more than their keys",
        ),
        (
            Table(
                "sum", 4, 2, initial=lambda keys: np.random.default_rng(1).random((len(keys), 2))
            ),
            "depend on more than their keys",
        ),
        (Table("sum", 4, 2, "int64", rule=adagrad(0.1)), "table 'sum' raised .*Cannot cast"),
        (
            Table("sum", 4, 2, rule=Rule("mine", 1, lambda value, change, arrays: arrays[1])),
            "table 'sum' raised IndexError",
        ),
    ],
)
def test_a_table_that_cannot_be_as_it_is_declared_is_refused_before_a_start(table, said):
    """Its first clock would end one machine after the other, or its rows be other numbers.

    Rows that are drawn anew on each machine are not those of its copy, and rows that are drawn by
    their place are the same ones in each partition.
    """

    class Strange(Small):
        tables = (table,)

    with pytest.raises(ApplicationError, match=said):
        checked(Strange())


def test_rows_beyond_the_memory_of_the_machine_are_refused_by_name():
    with pytest.raises(
        ApplicationError,
        match="'wide' has 1099511627776 keys, whose rows take 16,384 GiB: more than",
    ):
        Rows(Table("wide", 2**40, 1))


def test_a_first_row_that_is_no_number_is_named_although_no_sample_was_of_it():
    """Zero divided by zero in one row of many: no sum would ever make a number of it."""

    class Holed(Small):
        tables = (
            Table("sum", 90, 1, initial=lambda keys: np.where(keys == 70, np.nan, 1)[:, None]),
        )

    with pytest.raises(ApplicationError, match="first row of table 'sum', key 70, is not a number"):
        run_alone(Holed())
    _, why = run(Holed)
    assert "key 70, is not a number" in why


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("tables", Small.tables[0], "not a tuple of Table"),
        ("tables", ("sum",), "not a tuple of Table"),
        ("tables", None, "not a tuple of Table"),
        ("tables", (Table("sum", 4, 2, rule="adam"),), "has the rule 'adam'; adam"),
        ("tables", (Table("sum", 4, 2, rule=adagrad),), "has the rule <function adagrad"),
        ("tables", (Table("sum", 4, 2, aggregate=np.add),), "has the aggregate <ufunc 'add'>"),
        ("items", "10", "items are '10'"),
        ("items", None, "items are None"),
        ("items", 0, "items are 0"),
        ("stop", 5, "stop is 5, not a Stop"),
        ("stop", Never(clocks=3), "stop is Never.*, not a Stop"),
    ],
)
def test_what_is_no_tables_and_no_stop_is_named(name, value, said):
    class Odd(Small):
        pass

    setattr(Odd, name, value)
    with pytest.raises(ApplicationError, match=said):
        ParamServerJob(Odd())


def test_alone_a_job_ends_by_time_as_well():
    """Otherwise the run of the same file in one process has no end."""
    time = VirtualClock()

    class Timed(Small):
        stop = Stop(seconds=10.0)

        def process_range(self, lo, hi, params):
            time.advance_to(4.0 * (params.clock + 1))
            params.measure(1.0)

    ended = run_alone(Timed(), even(40, 1, 1), time)
    assert (ended.why, len(ended.measures)) == ("10 s have passed", 3)


def test_a_table_of_any_keys_may_have_first_rows_of_some_only():
    """As vectors of words or products that were trained before, under the ids that these have."""

    vectors = {10_482 + at: np.full(2, 1.0 * at) for at in range(4)}

    class Known(Small):
        tables = (Table("sum", 0, 2, initial=lambda keys: [vectors[key] for key in keys]),)

        def process_item(self, item, params):
            params.update("sum", [10_482 + item % 4], np.ones((1, 2)))

    keys = np.arange(10_482, 10_486)
    assert (run_alone(Known()).rows["sum"].get(keys)[:, 0] == 30 + np.arange(4)).all()


@pytest.mark.parametrize(
    ("settings", "stop", "said"),
    [
        ({"slack": 1.5}, Small.stop, "slack=1.5: a whole number, 0 or more"),
        ({"help_size": "2"}, Small.stop, "help_size='2': a whole number, 0 or more"),
        ({"batches": 0}, Small.stop, "batches=0: a whole number, 1 or more"),
        ({"blocks": 10**9}, Small.stop, "at `$.blocks`"),
        ({"partitions": 10**9}, Small.stop, "at `$.partitions`"),
        ({}, Stop(clocks=2.5), "at `$.clocks`"),
        ({}, Stop(clocks=3, seconds=float("inf")), "at `$.seconds`"),
        ({}, Stop(clocks=3, change=float("nan")), "at `$.change`"),
        ({}, Stop(change=0.1, over=0), "at `$.over`"),
    ],
)
def test_a_job_that_its_keeper_could_not_read_is_refused_by_its_script(settings, stop, said):
    """Machines would be bought for it, and say that they are ready again and again."""

    class Odd(Small):
        pass

    Odd.stop = stop
    with pytest.raises(Misuse, match=re.escape(said)):
        ParamServerJob(Odd(), **settings)


@pytest.mark.parametrize("dtype", [np.float32, "f4", np.dtype("float32")])
def test_a_job_may_be_described_by_the_numbers_of_numpy(dtype):
    """The number of keys is the largest id and 1, and the largest of an array is a number of NumPy's."""

    class Found(Small):
        items, stop = np.int64(40), Stop(clocks=np.int32(3), change=np.float32(0.5))
        tables = (Table("sum", np.arange(4).max() + 1, np.int64(2), dtype, exact=True),)

    job = ParamServerJob(Found(), blocks=np.int64(4))
    assert msgspec.json.decode(msgspec.json.encode(job.serving), type=Serving) == job.serving
    assert job.serving.tables[0].dtype == "float32"
    assert job.run().why == "3 clocks are done"


def test_a_slack_below_0_is_refused():
    with pytest.raises(ApplicationError, match="slack is -1"):
        Bound(-1).verified()


@pytest.mark.parametrize(
    ("text", "load", "said"),
    [
        ("1,2,3\n1,2,x\n", loaders.triples, "line 2, column 5: 'x'"),
        ("1,2,3\n4,5\n", loaders.triples, "line 2, column 3: 2 fields"),
        ("1,2,nan\n", loaders.triples, "line 1, column 5: 'nan' is not finite"),
        ("1 1:2\n0 1:1 9:3\n", lambda path: loaders.libsvm(path, 4), "line 2, column 7: index 9"),
        ("1 1:2 3\n", lambda path: loaders.libsvm(path, 4), "line 1, column 7: '3' has no colon"),
        (
            "3\n4\n7\n1 1 2\n1 x 2\n",
            loaders.bag_of_words,
            "line 5, column 3: 'x'",
        ),
        ("x1,2,3\n1,2,3\n", loaders.triples, "line 1, column 1: 'x1' is not a whole"),
        ("1.0,2,3\n1,2,3\n", loaders.triples, "line 1, column 1: '1.0' is not a whole"),
        ('"1","2","3"\n', loaders.triples, "line 1, column 1: '\"1\"' is not a whole"),
        ("1;2;3\n", loaders.triples, "line 1, column 1: 1 fields"),
        ("1,2,1e400\n", loaders.triples, "line 1, column 5: '1e400' is not finite"),
        ("1,-2,3\n", loaders.triples, "line 1, column 3: -2 is not from 0"),
        (f"{2**63},2,3\n", loaders.triples, f"line 1, column 1: {2**63} is not from 0"),
        ("1_0,2,3\n", loaders.triples, "line 1, column 1: '1_0' is not a whole"),
        ("1,2,3\n\u0661,2,3\n", loaders.triples, "line 2, column 1:"),
        ("1,2,3\u20284,5,6\n", loaders.triples, "line 1, column 5:"),
        ("1,2,3\n4,, 5\n", loaders.triples, "line 2, column 3: '' is not"),
        (b"1,2,3\n\xe9,2,3\n", loaders.triples, "line 2, column 1:"),
        ("", loaders.triples, "data has no rows"),
        ("user,item,rating\n", loaders.triples, "data has no rows"),
        ("\n", lambda path: loaders.libsvm(path, 4), "data has no rows"),
        ("1 2:1 2:3\n", lambda path: loaders.libsvm(path, 4), "line 1, column 7: index 2 is there"),
        ("2\n3\n2\n1 3 2\n", loaders.bag_of_words, "data has 1 rows, and says 2 at the top"),
        ("1\n3\n1\n1 4 2\n", loaders.bag_of_words, "line 4, column 3: 4 is beyond the 3"),
        ("1 1 2\n1\n", loaders.bag_of_words, "line 2, column 1: 1 fields"),
        ("2\n3\n1 1 2\n", loaders.bag_of_words, "line 3, column 1: 2 of the 3 numbers"),
        ("\0" * 5000 + "\n1,2,3\n", loaders.triples, "line 1, column 1: 1 fields"),
        ("1,2,3\n4," + "5" * 5000 + ",6\n", loaders.triples, "line 2, column 3: '555"),
        ("1 1 99999999999\n", loaders.bag_of_words, "line 1, column 5: more than"),
        (
            gzip.compress(b"1,2,3\n" * 99, mtime=0)[:-9],
            loaders.triples,
            "data cannot be read beyond line",
        ),
        (None, loaders.triples, "data cannot be read beyond line 0"),
    ],
)
def test_a_broken_row_is_named_by_line_and_column(tmp_path, text, load, said):
    """A row that is left out, or read as another, is a model of other data."""
    path = tmp_path / "data"
    if text is None:
        path.mkdir()
    else:
        path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(ApplicationError) as error:
        load(path)
    assert said in str(error.value)
    assert len(str(error.value)) < 400 + len(str(path))


def test_whole_files_are_loaded(tmp_path):
    path = tmp_path / "data"
    path.write_text("user,item,rating\n1,2,3.5\n4,5,1\n")
    assert [part.tolist() for part in loaders.triples(path)] == [[1, 4], [2, 5], [3.5, 1.0]]
    odd = b"\xef\xbb\xbf\r\n# by hand\r\n 1 , 2 ,3.5 \r\n\r\n4,5,+1e0,99"
    for written in (odd, gzip.compress(odd), odd.replace(b"# by hand", b"user,item,rating,time")):
        path.write_bytes(written)
        assert [part.tolist() for part in loaders.triples(path)] == [[1, 4], [2, 5], [3.5, 1.0]]
    path.write_text("1 1:2 3:4 # note\n0 2:1\n")
    assert loaders.libsvm(path, 3)[1].tolist() == [[2, 0, 4], [0, 1, 0]]
    path.write_text("2\n3\n2\n1 3 2\n2 1 1\n")
    assert [part.tolist() for part in loaders.bag_of_words(path)] == [[0, 0, 1], [2, 2, 0]]


def test_one_reliable_machine_is_said_to_be_no_protection():
    virtual, _ = run(Small)
    assert any("not protected" in note for note in virtual.brain.notes)
    virtual, _ = run(Small, places=3, reliable=2)
    assert not any("not protected" in note for note in virtual.brain.notes)


@pytest.mark.parametrize(
    ("places", "reliable", "partitions", "help_size"),
    [(1, 1, 7, 4), (3, 3, 2, 16), (2, 0, 2, 0), (4, 1, 9, 3)],
)
def test_small_and_lopsided_clusters_work(places, reliable, partitions, help_size):
    """Fewer machines than helpers, no transient machine, more partitions than machines."""
    virtual, why = run(
        Small, places=places, reliable=reliable, partitions=partitions, help_size=help_size
    )
    assert why == "3 clocks are done"
    assert len(virtual.brain.owners) == partitions


def three_nodes():
    brain = Controller(Plan(even(40, 4, 5), Stop(clocks=3), 2, expected=3))
    for name in ("a", "b", "c"):
        brain.handle(name, Join(reliable=name != "c", machine=name, allocation=name), 0.0)
    for name in ("a", "b", "c"):
        brain.handle(name, Loaded(blocks=sorted(brain.asked.get(name, ()))), 0.0)
    assert "c" in brain.blocks.values()
    return brain


def test_a_node_without_a_sign_of_life_is_named_and_its_blocks_are_moved():
    brain = three_nodes()
    for name in ("a", "b"):
        brain.handle(name, Beat(), 6.0)
    out = brain.tick(7.0)
    assert "c gave no sign of life for 5 s" in brain.notes[-1]
    assert "c" not in brain.blocks.values()
    assert [type(message) for to, message in out if to == "c"] == [Leave]
    assert CONTROLLER not in brain.nodes


def test_a_controller_that_stood_still_does_not_count_the_time_as_silence():
    brain = three_nodes()
    brain.tick(0.5)
    assert brain.tick(60.0) == []
    assert set(brain.nodes) == {"a", "b", "c"}
    for moment in (61.0, 63.0, 65.0):
        brain.handle("a", Beat(), moment)
        brain.handle("b", Beat(), moment)
        assert brain.tick(moment) == []
    brain.handle("a", Beat(), 66.0)
    brain.tick(66.0)
    assert "c" not in brain.nodes


def test_a_restarted_controller_saves_the_clock_that_replicas_still_have():
    brain = three_nodes()
    brain.committed, brain._saving = 4, {2: set()}
    asked = {message.clock for _, message in brain.restarted() if isinstance(message, Save)}
    assert asked == {4}


class Counting(Small):
    """Keeps a number between calls, which a grain that is computed again counts twice."""

    def __init__(self, from_clock=0):
        self.seen, self.from_clock = 0, from_clock

    def process_range(self, lo, hi, params):
        self.seen += params.clock >= self.from_clock
        params.update("sum", [lo % 4], np.full((1, 2), float(self.seen)))


class Drawing(Counting):
    def process_range(self, lo, hi, params):
        params.update("sum", [lo % 4], np.random.default_rng().normal(size=(1, 2)))


class Elsewhere(Counting):
    def process_range(self, lo, hi, params):
        self.seen += 1
        params.update("sum", [self.seen % 4], np.ones((1, 2)))


class Measuring(Counting):
    def process_range(self, lo, hi, params):
        self.seen += 1
        params.measure(self.seen)


class CountingWhole(Counting):
    """As a count of words, whose tables are whole numbers, however large."""

    tables = (Table("sum", 4, 2, "int64"),)

    def process_range(self, lo, hi, params):
        self.seen += 1
        params.update("sum", [lo % 4], np.full((1, 2), 10**6 + self.seen))


class Rounding(Small):
    """Adds up in another order each time, as a library does; its table says float32 in short."""

    tables = (Table("sum", 4, 2, "f4"),)

    def __init__(self):
        self.calls = 0

    def change(self, item):
        self.calls += 1
        return np.full((1, 2), 1 + 1e-6 * (self.calls % 2))


def test_rounding_is_no_difference_however_a_table_names_its_numbers():
    assert run_alone(Rounding(), even(40, 1, 40)).why == "3 clocks are done"


@pytest.mark.parametrize(
    ("application", "how"),
    [
        (Counting, "it changed key 0 of table 'sum' otherwise"),
        (CountingWhole, "it changed key 0 of table 'sum' otherwise"),
        (Drawing, "it changed key 0 of table 'sum' otherwise"),
        (Elsewhere, "it changed other rows of table 'sum'"),
        (Measuring, r"it measured \d, not \d"),
    ],
)
def test_a_range_that_comes_out_otherwise_when_computed_again_ends_the_job(application, how):
    """Alone at once, and from a worker."""
    said = rf"process_range\(0, \d+\) was computed twice .* the second time {how}: it keeps"
    with pytest.raises(ApplicationError, match=said):
        run_alone(application())
    assert re.search(said, run(application)[1])


def test_a_number_that_begins_to_count_later_is_found_later():
    with pytest.raises(ApplicationError, match="computed twice"):
        run_alone(Counting(from_clock=2), even(40, 4, 5))
