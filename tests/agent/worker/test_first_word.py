"""What the first worker of a layout tells the others of its recording."""

import threading

import pytest
import torch

from agent.pipeline.stages.channel import Exchange, Parcel
from agent.pipeline.tracing.analysis import Facts, examine
from agent.pipeline.tracing.recording.trace import record
from agent.worker.stages.pipeline_layout import ASKING, FirstWord, Word

WORKERS = ("a", "b", "c")


@pytest.fixture
def facts() -> Facts:
    """Of a graph with values, a draw and a buffer that is written to."""
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1)
    )
    x = torch.ones(3, 4)
    return examine(record(model, lambda net, x: net(x).sum(), [x]), [x])


def test_all_others_hear_all_of_it(facts: Facts) -> None:
    """Nothing is waited for before it is there, and nothing is lost on the way."""
    assert facts.values
    assert facts.draws
    assert facts.written
    exchange = Exchange()
    words = [FirstWord(exchange.channel(one), WORKERS, 7) for one in WORKERS]
    assert [word.facts("graph") for word in words[1:]] == [None, None]
    said = Word("graph", (3, 5), facts)
    words[0].say(said)
    assert [word.facts("graph") for word in words[1:]] == [facts, facts]
    assert [word.heard() for word in words[1:]] == [said, said]  # as often as it is asked for


def test_no_question_is_kept(facts: Facts) -> None:
    """A loss that is recorded anew in each step would fill what the first worker can hold."""
    exchange = Exchange()
    for step in (7, 8):
        a, b = (FirstWord(exchange.channel(one), ("a", "b"), step) for one in "ab")
        hears = threading.Thread(target=b.heard)
        hears.start()
        exchange.channel("a").wait([("b", ASKING)])
        a.say(Word("graph", (), facts))
        hears.join()
        assert not exchange.channel("a").ready("b", ASKING)


def test_who_asks_in_a_step_that_the_first_worker_does_not_record_in_is_named() -> None:
    """A question about an earlier step may have come after the answer to it."""
    exchange = Exchange()
    first = FirstWord(exchange.channel("a"), WORKERS, 8)
    for peer, step in (("b", 7), ("c", 8)):
        exchange.channel(peer).send("a", ASKING, Parcel(tensors=(), plain=step))
    assert first.disputed("a", "graph", made=False) == "c"


def test_of_another_graph_nothing_is_taken_over(facts: Facts) -> None:
    """It is still heard by who has to be told that it computes something else."""
    exchange = Exchange()
    word = FirstWord(exchange.channel("b"), WORKERS, 7)
    FirstWord(exchange.channel("a"), WORKERS, 7).say(Word("graph", (), facts))
    assert word.facts("another") is None
    assert word.heard().mark == "graph"
