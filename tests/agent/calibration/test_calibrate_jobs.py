"""Calibration and timelines inside a running job: measured once, asked for by a person, no number changed."""

from pathlib import Path

import msgspec
import pytest
import torch
from crews import Crew, until

from agent.keys import TRACES_ASKED
from agent.messages import JobProfiled
from agent.profile import Profile
from agent.schedule import Kind
from agent.timeline import Timeline

pytestmark = pytest.mark.processes

TOY = Path(__file__).parents[1].joinpath("deep_toy.py")
STEPS = 24


def begin(crew: Crew, count: int, depth: int = 1) -> Path:
    """Held before step 10, so that there is time to ask."""
    out = crew.folder / f"{crew.job}.pt"
    Path(f"{out}.hold").write_text("10")
    crew.depth = depth
    crew.begin(count, TOY.read_text(), str(STEPS), str(out))
    return out


def go_on(out: Path) -> None:
    Path(f"{out}.hold").unlink()


def profiled(crew: Crew) -> JobProfiled:
    return until("a profile", lambda: crew.of(JobProfiled))[0]


def test_a_job_is_measured_once(crew: Crew):
    """The first worker measures the model; a job of the same code finds that, and weights are the same bits."""
    first = begin(crew, 2)
    report = profiled(crew)
    go_on(first)
    crew.completed()
    kept = crew.client.get(f"orch:profile:{report.profile.key}")
    assert msgspec.json.decode(kept, type=Profile) == report.profile
    assert report.profile.network_from == "within"
    assert report.profile.microbatch_sizes == (4,)
    assert crew.client.get(f"orch:job:profile:{crew.job}") == kept
    assert [each.worker for each in crew.of(JobProfiled)] == [report.worker]
    weights = torch.load(first)
    crew.reports.clear()
    crew.ready.clear()
    crew.job, crew.generation = "again", 0
    second = begin(crew, 1)
    assert profiled(crew).profile == report.profile
    go_on(second)
    crew.completed()
    again = torch.load(second)
    assert all(torch.equal(again[name], tensor) for name, tensor in weights.items())


def test_the_network_is_measured_when_there_is_somebody_to_measure_it_with(crew: Crew):
    """Alone its numbers are assumed; a newcomer on another machine is asked at once, and the times stay as they were."""
    out = begin(crew, 1)
    alone = profiled(crew).profile
    assert alone.network_from == "assumed"
    crew.reach(10)
    crew.settle = 2
    crew.start(1, host="127.0.0.2")
    until("both to be ready", lambda: len(crew.ready) == 2)
    go_on(out)
    again = until("a measured network", lambda: crew.of(JobProfiled)[1:])[0].profile
    crew.completed()
    assert again.network_from == "between"
    assert (again.key, again.sections) == (alone.key, alone.sections)
    assert again.network.intra == alone.network.intra
    for link in (again.network.inter, again.network.reduce_inter):
        assert 1e6 < link.bandwidth_bytes_per_s < 1e12
        assert 0 <= link.latency_s < 1
    assert len(crew.of(JobProfiled)) == 2
    kept = crew.client.get(f"orch:profile:{again.key}")
    assert msgspec.json.decode(kept, type=Profile) == again


@pytest.mark.parametrize("depth", [1, 2])
def test_a_step_is_noted_down_on_request(crew: Crew, depth: int):
    """Every microbatch of one step, forward and back, on each worker; nothing before somebody asks."""
    out = begin(crew, 2, depth)
    crew.reach(10)
    key = f"orch:timeline:{crew.job}"
    assert crew.client.get(key) is None
    crew.client.sadd(TRACES_ASKED, crew.job)
    until("the keeper to hear", lambda: not crew.client.scard(TRACES_ASKED))
    go_on(out)
    timeline = msgspec.json.decode(until("a timeline", lambda: crew.client.get(key)), type=Timeline)
    crew.completed()
    assert set(timeline.workers) == set(timeline.layout.workers)
    assert len(timeline.cuts) == depth - 1
    for moments in timeline.workers.values():
        assert all(0 <= moment.start_s <= moment.end_s for moment in moments)
        assert moments[-1].kind == Kind.REDUCE
    for stage in range(depth):
        done = [
            (moment.kind, moment.microbatch)
            for moments in timeline.workers.values()
            for moment in moments[:-1]
            if moment.stage == stage
        ]
        assert sorted(done) == [
            (kind, m) for kind in (Kind.FORWARD, Kind.BACKWARD) for m in range(6)
        ]
