"""The example applications find the known answers of their data, alone and on a cluster."""

import factorisation
import means
import network
import numpy as np
import pytest
import regression
import topics

from agent.paramserver.api import Application, Stop, even, run_alone
from agent.paramserver.controller import Plan
from agent.paramserver.tables import Table
from agent.paramserver.virtual.cluster import Place, Virtual
from agent.paramserver.virtual.network import Delays
from agent.paramserver.worker import Bound


def small_factorisation(clocks=12):
    return factorisation.Factorisation(60, 40, 3000, 6, clocks, rate=0.02)


def on_a_cluster(make, *, slack=1, blocks=8, mishap=True):
    """Run with three reliable machines and four that are taken away in the middle."""
    application = make()
    plan = Plan(even(application.items, blocks, 5), application.stop, 4, 7, help_size=2)
    places = [Place(f"n{at}", f"m{at}", at < 3, "spot") for at in range(7)]
    virtual = Virtual(
        make,
        plan,
        places,
        cost=lambda _: 0.02,
        network=lambda made: Delays(made, 0.002, 0.9),
        bound=Bound(slack),
    )
    if mishap:
        virtual.at(0.6, lambda: virtual.kill(["n3"]))
        virtual.at(0.9, lambda: virtual.evict(["n4", "n5", "n6"], 30))
        virtual.slow_down("n2", 4.0)
    assert virtual.run().endswith("are done")
    return virtual


def table(virtual, name):
    shape = next(one for one in virtual.hosts.values()).member.server.tables[name]
    found = np.zeros((shape.keys, shape.columns), shape.dtype)
    for at, owner in enumerate(virtual.brain.owners):
        rows = virtual.hosts[owner].member.server.parts[at].rows[name]
        found[rows.keys()] = rows.get(rows.keys())
    return found[:, : shape.width]


def clocks_to(measures, share):
    return next(at for at, value in enumerate(measures) if value < share * measures[0])


def test_factorisation_converges_under_stale_reads_and_losses():
    """Losses and a straggler cost no clock; staleness costs a few (answer 15)."""
    calm = on_a_cluster(lambda: small_factorisation(24), slack=0, mishap=False)
    needed = clocks_to(calm.brain.ledger.measures, 0.1)
    rough = on_a_cluster(lambda: small_factorisation(24))
    assert clocks_to(rough.brain.ledger.measures, 0.1) <= needed + 3
    assert clocks_to(run_alone(small_factorisation(24)).measures, 0.1) <= needed + 3


def test_regression_is_the_same_bits_as_alone_whatever_is_lost():
    virtual = on_a_cluster(regression.Regression, slack=0)
    ended = run_alone(regression.Regression(), virtual.plan.work)
    assert np.array_equal(table(virtual, "weights"), ended.value("weights"))
    assert regression.Regression().accuracy(ended.value("weights")) > 0.95


def test_network_of_torch_is_the_same_bits_as_alone_whatever_is_lost():
    """Adam's moments lie at the servers, and are lost and moved with the weights."""
    virtual = on_a_cluster(network.Network, slack=0)
    ended = run_alone(network.Network(), virtual.plan.work)
    assert np.array_equal(table(virtual, "weights"), ended.value("weights"))
    assert network.Network().accuracy(ended.value("weights")) > 0.95


def test_k_means_finds_the_centres():
    virtual = on_a_cluster(means.Means, slack=0)
    found, known = table(virtual, "centres")[:, :-1], means.Means().centres
    distance = np.linalg.norm(found[:, None] - known[None], axis=2).min(0)
    assert distance.max() < 0.1


def test_topics_keep_every_count_and_separate_the_documents():
    """Each token is counted once in every table: a torn clock would show."""
    application = topics.Topics()
    virtual = on_a_cluster(topics.Topics)
    words, documents = table(virtual, "words"), table(virtual, "documents")
    topic_of = table(virtual, "tokens")[:, 0] - 1
    assert topic_of.min() >= 0
    expected = np.zeros_like(words)
    np.add.at(expected, (application.words, topic_of), 1)
    assert np.array_equal(words, expected)
    assert np.array_equal(table(virtual, "all")[0], words.sum(0))
    assert (documents.max(1) / documents.sum(1)).mean() > 0.8


def test_asp_converges_as_well():
    measures = on_a_cluster(lambda: small_factorisation(24), slack=None).brain.ledger.measures
    assert min(measures) < 0.1 * measures[0]


def test_numbers_from_params_are_the_same_wherever_they_are_drawn():
    """They depend on the clock and the items, not on the worker or on how often they are drawn."""

    class Drawing(Application):
        items, stop = 480, Stop(clocks=8)
        tables = (Table("sum", 4, 2),)

        def process_range(self, lo, hi, params):
            params.update("sum", [lo % 4], params.random.normal(size=(1, 2)))

    virtual = on_a_cluster(Drawing)
    alone = run_alone(Drawing(), virtual.brain.plan.work)
    assert table(virtual, "sum") == pytest.approx(alone.value("sum"))
