"""What an application does in a call of `process_range`: it counts as it is, or is named."""

import threading

import counters
import numpy as np
import pytest

from agent.paramserver.api import Application, Stop, even, run_alone
from agent.paramserver.tables import Aggregate, ApplicationError, Rule, Table, verify
from agent.paramserver.virtual.cluster import Virtual

KEYS = 50


class Careful(Application):
    """Reads a row that another row names, and goes on without it when an error comes."""

    items, stop = counters.Counter.items, Stop(clocks=6)
    tables = (
        Table("next", 1, 1, "int64", own_writes=False),
        Table("sums", KEYS, 1, "int64", initial=lambda keys: keys[:, None] + 1, own_writes=False),
    )

    def process_range(self, lo, hi, params):
        key = int(params.read("next", [0])[0, 0]) % KEYS
        try:
            found = params.read("sums", [key])
        except Exception:
            found = [[-1000]]
        params.update("sums", [(key + lo) % KEYS], found)
        params.update("next", [0], [[1]])


def test_a_row_that_is_not_here_yet_is_waited_for_although_the_application_catches_that(
    monkeypatch,
):
    """The call is done again with the row, so the result is that of one process."""
    monkeypatch.setattr(counters, "Counter", Careful)
    virtual: Virtual = counters.cluster(3, bound=0)
    assert virtual.run() == "6 clocks are done"
    work = virtual.plan.work
    alone = run_alone(Careful(), even(Careful.items, work.blocks, work.grains))
    found = np.zeros((KEYS, 1), np.int64)
    for partition in range(virtual.plan.partitions):
        for section in virtual.disk.read(partition, virtual.brain.saved):
            if section.table == "sums":
                found[section.keys] = section.values
    assert np.array_equal(found, alone.value("sums"))


class Threaded(Application):
    items, stop = 10, Stop(clocks=1)
    tables = (Table("sum", 1, 1),)

    def process_range(self, lo, hi, params):
        thread = threading.Thread(target=self.add, args=(params,))
        thread.start()
        thread.join()

    def add(self, params):
        try:
            params.update("sum", [0], [[1.0]])
        except ApplicationError:
            return  # as the error of a thread that nobody asks for its result


class Measuring(Threaded):
    def add(self, params):
        try:
            params.measure(1.0)
        except ApplicationError:
            return


class Keeping(Application):
    items, stop = 10, Stop(clocks=2)
    tables = (Table("sum", 1, 1),)
    first = None

    def process_range(self, lo, hi, params):
        self.first = self.first or params
        self.first.update("sum", [0], [[1.0]])


@pytest.mark.parametrize("kind", [Threaded, Measuring, Keeping])
def test_params_that_another_thread_or_a_later_call_uses_are_named(kind):
    """Two threads that coalesce changes at once lose some, and those of a call that is over count nowhere."""
    with pytest.raises(ApplicationError, match="by another thread or after their call"):
        run_alone(kind())


def _counting():
    calls = []

    def apply(value, gradient, _arrays):
        calls.append(1)
        value -= gradient / len(calls)

    return apply


def _clipping(value, gradient, _arrays):
    value -= gradient / max(1.0, float(np.linalg.norm(gradient)))


@pytest.mark.parametrize("apply", [_counting(), _clipping])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_rule_that_looks_at_other_rows_or_at_former_calls_is_refused(apply, dtype):
    """What it makes would depend on which rows lie in one partition and change in one clock."""
    with pytest.raises(ApplicationError, match="depends on other rows or on calls before"):
        verify(Table("weights", 6, 2, dtype, rule=Rule("mine", 0, apply)))


def _forgetful(value, gradient, _arrays):
    return value - gradient


def test_a_rule_that_changes_nothing_in_place_is_refused():
    """A table with it would stay as it was at first, without a word."""
    with pytest.raises(ApplicationError, match="is to change them in place"):
        verify(Table("weights", 6, 2, rule=Rule("mine", 0, _forgetful)))


def _scaling(value, gradient, _arrays):
    gradient *= 0.1
    value -= gradient


def test_a_rule_that_changes_its_gradient_is_named():
    with pytest.raises(ApplicationError, match="read-only"):
        verify(Table("weights", 6, 2, rule=Rule("mine", 0, _scaling)))


def test_an_aggregate_that_drops_rows_now_and_then_is_named():
    """No sample has shown that, and what is left would count for all rows."""
    table = Table(
        "sum", 4, 2, aggregate=Aggregate("mine", lambda a, b: (a + b)[: len(a) % 3 or 1], 0)
    )
    rows = np.ones((3, 2))
    with pytest.raises(ApplicationError, match="'mine' of table 'sum' makes rows of shape"):
        table.changed(np.arange(3), rows, rows)


def _by_norm(value, gradient, _arrays):
    """As layer-wise rates do: a row of zeros stays one."""
    value -= 0.1 * np.linalg.norm(value, axis=1, keepdims=True) * gradient


def _above(value, gradient, _arrays):
    """A threshold that takes all that is small."""
    moved = value - 0.01 * gradient
    value[:] = np.sign(moved) * np.maximum(np.abs(moved) - 10.0, 0.0)


@pytest.mark.parametrize("apply", [_by_norm, _above])
def test_a_rule_that_leaves_zeros_as_they_are_is_one(apply):
    verify(Table("weights", 6, 2, rule=Rule("mine", 0, apply)))


class Lazy(Application):
    tables, items, stop = (Table("counts", 1, 1),), 4, Stop(clocks=2)


def _yields(_self, *given):
    given[-1].update("counts", [0], [[1.0]])
    yield


async def _awaits(_self, *given):
    given[-1].update("counts", [0], [[1.0]])


@pytest.mark.parametrize("call", ["process_range", "process_item"])
@pytest.mark.parametrize("does", [_yields, _awaits])
def test_a_call_that_does_nothing_yet_is_named(call, does):
    """Else all clocks would pass, and the tables would stay as they were at first."""
    with pytest.raises(ApplicationError, match=rf"Lazy\.{call} has a yield or an await"):
        run_alone(type("Lazy", (Lazy,), {call: does})())
