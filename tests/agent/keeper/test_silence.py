"""How long a worker may be silent before the keeper gives it up."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from players import House

from agent.keeper.commits import Commit
from agent.keeper.job import KeptJob
from agent.keeper.layouts import RECONNECT_S
from agent.keeper.member import Pace
from agent.keeper.roster import SILENT_EARLY_S, SILENT_S, TICK_S
from agent.layout import data_parallel
from agent.protocol import Held


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path)


@pytest.fixture
def job(house: House) -> KeptJob:
    return house.job


def member(worker: str, silent_s: float = 0.0, beat_s: float = 1.0, **more: Any) -> Any:
    """A worker that has proven itself, and has said nothing for so long."""
    known = {
        "version": 0,
        "held": None,
        "worker": worker,
        "ready": object(),
        "close": lambda: None,
        "noticed": False,
        "hung_s": 0.0,
        "proven": True,
        "beats": Pace(beat_s),
        "silent_s": lambda _: silent_s,
    }
    return SimpleNamespace(**known | more)


def test_who_is_silent_at_the_same_step_again_is_waited_for_longer(job: KeptJob) -> None:
    """A script that holds up all threads at a step for longer than our patience gets past it in the end."""
    lives = 0
    while lives < 10:
        silent = member(f"w{lives}", 4.0 * SILENT_S - 0.1)
        job.roster.members = {each.worker: each for each in (silent, member("waits"))}
        job.roster.layout = data_parallel(lives, 1, (silent.worker,))
        job.tick(0.0, 0.0)
        if silent.worker in job.roster.members:
            break
        lives += 1
    assert lives == 3
    job.history.note(Commit(version=1))
    silent.silent_s = lambda _: 4.0 * SILENT_S + 0.1
    job.tick(0.0, 0.0)
    assert [*job.roster.members] == ["waits"]


def test_worker_that_is_alone_is_waited_for_until_another_comes(job: KeptJob) -> None:
    """Its machine, or its script, may stand still; nobody loses time by that but itself."""
    silent = member("w1", 2.0 * SILENT_S)
    job.roster.members["w1"] = silent
    job.roster.layout = data_parallel(1, 1, ("w1",))
    job.tick(0.0, 0.0)
    assert "w1" in job.roster.members
    job.roster.members["w2"] = member("w2")
    job.tick(0.0, 0.0)
    assert [*job.roster.members] == ["w2"]
    job.roster.members = {"w1": silent}
    silent.silent_s = lambda _: SILENT_EARLY_S + 0.1
    job.tick(0.0, 0.0)
    assert not job.roster.members


def test_nobody_waits_for_whoever_is_outside_the_layout(job: KeptJob) -> None:
    """A busy machine may keep a spare worker from speaking for a while; once it is in the layout, no longer."""
    job.roster.members = {"w1": member("w1", 2.0 * SILENT_S), "w2": member("w2")}
    job.tick(0.0, 0.0)
    assert "w1" in job.roster.members
    job.roster.layout = data_parallel(1, 1, ("w1",))
    job.tick(0.0, 0.0)
    assert "w1" not in job.roster.members


def test_who_records_the_loop_is_waited_for_as_while_it_builds(job: KeptJob) -> None:
    """To find out whether a script can be cut is done once, and nobody is tried a third time soon: who dies of it is heard of by its
    connection. Once it is told, silence is what it was."""
    job.roster.members = {"w1": (silent := member("w1", 2.0 * SILENT_S)), "w2": member("w2")}
    job.roster.layout = data_parallel(1, 1, ("w1",))
    job.roster.recorders.begin("w1")
    job.tick(0.0, 0.0)
    assert "w1" in job.roster.members
    silent.silent_s = lambda _: SILENT_EARLY_S + 0.1
    job.tick(0.0, 0.0)
    assert "w1" not in job.roster.members
    job.roster.members["w1"], silent.silent_s = silent, lambda _: 2.0 * SILENT_S
    job.roster.recorders.told = True
    job.tick(0.0, 0.0)
    assert "w1" not in job.roster.members


def test_who_leaves_the_layout_owes_the_layers_that_only_it_has(house: House) -> None:
    """From stages to whole states: whoever is lost outside of the new layout, before all layers were fetched, is
    said to owe them, after no more silence than inside; the manager then asks for another layout."""
    job, half = house.job, Held(layers=("a",), of=2)
    job.roster.layout, job.roster.sources = data_parallel(1, 1, ("w1",)), ("w2",)
    for held, silent_s, owed in ((half, 2 * SILENT_S, True), (None, 2 * SILENT_EARLY_S, False)):
        inside, outside = member("w1", held=held), member("w2", silent_s)
        job.roster.members = {"w1": inside, "w2": outside}
        job.tick(0.0, 0.0)
        assert house.said.reports[-1].owed_state == owed


def restarted(house: House, *workers: str) -> KeptJob:
    """A keeper that was restarted while these were in the layout."""
    house.job.restore(data_parallel(1, 2, workers))
    return house.job


def lost(house: House) -> list[str]:
    return [report.worker for report in house.said.reports]


def ticks(job: KeptJob, since_s: float, until_s: float, late_s: float = 0.0) -> None:
    """Looks of a keeper each of which is late by so much."""
    while since_s < until_s:
        job.tick(since_s, late_s)
        since_s += TICK_S + late_s


def test_a_restarted_keeper_that_stood_still_waits_as_long_again(house: House) -> None:
    """A machine that stood still for longer than workers have for coming back: they could not come either."""
    job = restarted(house, "w1")
    ticks(job, 1.0, 2.0)
    job.tick(2.0 + 2.0 * RECONNECT_S, 2.0 * RECONNECT_S)
    assert house.said.reports == []
    ticks(job, 2.0 + 2.0 * RECONNECT_S, 2.0 + 20 * RECONNECT_S)
    assert lost(house) == ["w1"]


def test_a_restarted_keeper_that_is_starved_waits_longer(house: House) -> None:
    """Where each look takes three times as long, workers take as long as well."""
    job = restarted(house, "w1")
    ticks(job, 1.0, 1.0 + 2.0 * RECONNECT_S, 2.0 * TICK_S)
    assert house.said.reports == []
    ticks(job, 1.0 + 2.0 * RECONNECT_S, 10.0 * RECONNECT_S)
    assert lost(house) == ["w1"]


def test_who_came_back_to_a_restarted_keeper_knows_who_lives(house: House) -> None:
    """Its connection to the other holds, so the other is waited for; it breaks, and the other is lost at once."""
    job = restarted(house, "w1", "w2")
    job.roster.members["w1"] = member("w1", beat_s=0.15, generation=1, step=0)
    ticks(job, 1.0, 1.0 + 3.0 * RECONNECT_S)
    assert house.said.reports == []
    job.roster.suspect("w2", "w1", 0.0)
    ticks(job, 1.0 + 3.0 * RECONNECT_S, 1.1 + 3.0 * RECONNECT_S)
    assert lost(house) == ["w2"]
    assert list(job.roster.members) == ["w1"]


def test_silence_is_measured_by_how_late_others_are(job: KeptJob) -> None:
    """Where the heartbeats of one come late in a row, another is not presumed dead for a silence of the kind; and it is again
    once they come on time."""
    job.roster.layout = data_parallel(1, 2, ("w1", "w2"))
    known = {"beat_s": 0.15, "generation": 1, "post": lambda _: None, "fresh": False}
    one, other = member("w1", **known), member("w2", 1.5 * SILENT_S, **known)
    job.roster.members |= {"w1": one, "w2": other}
    for at in range(1, 10):
        one.beats.come(0.6 * at)
    job.tick(0.0, 0.0)
    assert "w2" in job.roster.members
    for at in range(1, 20):
        one.beats.come(5.4 + 0.15 * at)
    job.tick(0.0, 0.0)
    assert "w2" not in job.roster.members
