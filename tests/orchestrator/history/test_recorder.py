"""The recorder reads a real Redis, is killed at any moment, and writes every line once."""

import os
import signal
import time
from random import Random

import pytest

from orchestrator.brain.holdings import ledger
from orchestrator.history.reader import History
from orchestrator.history.recorder import Recorder
from orchestrator.paths import Places
from orchestrator.redis_client import connect
from orchestrator.simulated.restarts import live
from orchestrator.simulated.scenario import wild
from orchestrator.state import State

CENT = 0.01
KILLS = 15
pytestmark = pytest.mark.processes


class Mortal:
    """A process that records without a pause, until it is killed."""

    def __init__(self, url: str, places: Places) -> None:
        self._url, self._places, self.pid = url, places, 0

    def start(self) -> None:
        self.pid = os.fork()
        if self.pid:
            return
        try:
            recorder = Recorder(connect(self._url), self._places.history)
            while True:
                recorder.look(time.time(), last=True)
        finally:
            os._exit(1)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        assert os.WIFSIGNALED(status), "the recorder ended before it was killed"


def test_a_recorder_that_is_killed_again_and_again_writes_every_line_once(
    server, publisher, places
):
    dice, states = Random(7), list[State]()
    mortal = Mortal(server.url, places)
    mortal.start()

    def watch(state: State) -> None:
        publisher.publish(state)
        states[:] = [state]
        if dice.random() < 0.05 and kills:
            kills.pop()
            mortal.kill()
            mortal.start()

    kills = list(range(KILLS))
    story = live(wild(25), watch=watch)
    mortal.kill()
    assert not story.breach
    assert not kills, "the simulation ended before all kills"
    recorder = Recorder(connect(server.url), places.history)
    recorder.look(time.time(), last=True)
    recorder.close()
    history, (state,) = History.open(places), states
    told = [(one.at_s, one.who, one.what, one.because) for one in history.events(last=10**6)]
    said = [(one.at_s, one.who, one.what, one.because) for one in publisher.said]
    assert sorted(told) == sorted(said)
    spent_usd = ledger.spent_usd(state.account, state.now_s)
    for by in ("cause", "job", "pool", "day", "machine"):
        assert sum(line.usd for line in history.money(by=by)) == pytest.approx(spent_usd, abs=CENT)
    for job in state.jobs.values():
        own_usd = sum(line.usd for line in history.money(job.id))
        assert own_usd == pytest.approx(ledger.spent_usd(job.account, state.now_s), abs=CENT)
    costs = {lease.token: lease.cost_usd for lease in state.ended_leases.values()}
    held = {one.token: one.usd for one in history.machines()}
    assert held == {token: pytest.approx(costs[token], abs=CENT) for token in held}
    assert history.series("spent_usd", 0.0, state.now_s)[-1].last == pytest.approx(
        spent_usd, abs=CENT
    )


def test_events_know_their_job_and_their_kind(server, publisher, places):
    """Evictions, notices and ends are found by kind as often as the manager counted them."""
    recorder, states = Recorder(connect(server.url), places.history), list[State]()
    now_s = 0.0

    def watch(state: State) -> None:
        nonlocal now_s
        publisher.publish(state)
        now_s += 0.1
        recorder.look(now_s)
        states[:] = [state]

    story = live(wild(5), watch=watch)
    assert not story.breach
    recorder.look(now_s + 9.0, last=True)
    history, (state,) = History.open(places), states
    first_s = min(job.submitted_at_s for job in state.jobs.values())
    found = history.events(first_s - 60.0, last=10**6)
    taken = sum(job.market.preemptions for job in state.jobs.values())
    evictions = [one for one in found if one.kind == "eviction"]
    assert len(evictions) == taken > 0
    assert {one.job for one in evictions} <= set(state.jobs)
    ends = [one.job for one in found if one.kind in ("finish", "failure", "budget")]
    assert set(state.jobs) <= set(ends)
    bought = history.events(first_s - 60.0, kind="buy", last=10**6)
    assert bought and all(one.job in state.jobs for one in bought)
    recorder.close()
