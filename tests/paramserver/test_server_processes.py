"""The machines in real processes: kills, additions and evictions leave the bits of one process."""

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace

import counters
import faulty
import numpy as np
import pytest
import regression
import sluggish

from agent.paramserver.api import run_alone
from agent.paramserver.live import node as live_node
from agent.paramserver.processes import House, Job, Single, Start

pytestmark = pytest.mark.processes


@contextmanager
def running(module: ModuleType, kind: str, store: Path, *names: str, **job) -> Iterator[House]:
    """Run an application on these nodes; those whose names begin with r are reliable."""
    folder = str(Path(module.__file__).parent)
    house = House(Job(module=module.__name__, kind=kind, folder=folder, store=str(store), **job))
    try:
        for name in names:
            house.start(name, name.startswith("r"))
        yield house
    finally:
        house.close()


def test_a_run_through_losses_has_the_bits_of_one_process(tmp_path):
    with running(
        regression,
        "Regression",
        tmp_path,
        "r0",
        "r1",
        arguments={"clocks": 30},
        blocks=6,
        grains=6,
        partitions=3,
        expected=5,
        help_size=2,
        dead_s=300.0,
        grain_s=0.01,
    ) as house:
        for name in ("t0", "t1", "t2"):
            house.start(name, False, "first", slow=4.0 if name == "t2" else 1.0)
        house.wait(lambda brain: brain.ledger.closed >= 2)
        house.kill(["t0"])
        house.wait(lambda brain: "t0" not in brain.nodes)
        house.stop(["r1"])  # nothing closes meanwhile, so the newcomer is not too late
        house.start("t3", False, "second")
        house.wait(lambda brain: "t3" in brain.nodes)
        house.evict(["t1", "t2"], 30)
        house.go_on(["r1"])
        house.wait(lambda brain: not {"t1", "t2"} & set(brain.nodes))
        found = house.result()
        assert house.controller.ended == "30 clocks are done"
        alone = run_alone(house.job.application(), house.controller.plan.work)
        files = sorted(path.name for path in tmp_path.iterdir())
        assert [name for name in files if name.endswith("-29.npz")] == [
            f"{at}-29.npz" for at in range(3)
        ]
        assert len({name.partition("-")[2] for name in files}) <= 2, files
        assert np.array_equal(found["weights"], alone.rows["weights"].get(np.arange(4)))


def test_the_result_has_the_rows_of_a_table_of_any_keys_beside_these(tmp_path):
    with running(
        counters, "Counter", tmp_path, "r0", blocks=2, grains=4, partitions=2, expected=1
    ) as house:
        found = house.result()
    items, clocks = np.arange(counters.Counter.items), counters.Counter.stop.clocks
    assert np.array_equal(found["sparse keys"], items * 1000)
    assert np.array_equal(
        found["sparse"], np.stack([np.full_like(items, clocks), clocks * items], 1)
    )
    assert found["dense"].sum() == clocks * len(items)


def test_a_wall_clock_that_is_set_changes_nothing_that_is_measured(tmp_path, monkeypatch):
    """As that of a machine that has just booted is: a clock that seems to take hours, or less than nothing, gets no help."""
    hours = itertools.count(1e9, -3600.0)
    times = SimpleNamespace(time=lambda: next(hours), monotonic=time.monotonic, sleep=time.sleep)
    monkeypatch.setattr(live_node, "time", times)
    assert 0.0 < usual_s(regression, "Regression", tmp_path, clocks=5) < 3600.0


def test_what_a_clock_takes_has_its_computing_in_it(tmp_path):
    """Else a worker seems late as soon as a message is on its way, and gives its work to others."""
    assert (
        usual_s(sluggish, "Sluggish", tmp_path, clocks=5, first_s=sluggish.GRAIN_S)
        >= sluggish.GRAIN_S
    )


def usual_s(module: ModuleType, kind: str, store: Path, **arguments) -> float:
    """What a clock takes a worker that is alone, as it has measured it itself."""
    with running(module, kind, store, arguments=arguments, expected=1) as house:
        start = Start(
            job=house.job,
            name="r0",
            secret=house._secret,
            controller=house._post.address,
            reliable=True,
            allocation="first",
        )
        single = Single(start)
        single.run()
        house.result()
    return single.member.worker.helpee.usual_s


def test_a_slow_call_is_no_loss_and_a_stopped_node_is_one_that_ends_when_it_wakes(tmp_path):
    with running(
        sluggish,
        "Sluggish",
        tmp_path,
        "r0",
        "r1",
        "t0",
        arguments={"first_s": 4.5, "clocks": 40},
        blocks=4,
        grains=2,
        partitions=2,
        expected=3,
        dead_s=3.0,
    ) as house:
        house.wait(lambda brain: brain.ledger.closed >= 1 or brain.notes)
        assert house.controller.notes == []
        house.stop(["t0"])
        house.wait(lambda brain: "t0" not in brain.nodes)
        house.go_on(["t0"])
        assert house.nodes["t0"].process.wait(60) == 0
        assert set(house.controller.nodes) == {"r0", "r1"}
        assert house.result()["sum"].tolist() == [[80.0]] * 4


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("raises", "raised ZeroDivisionError: no luck"),
        ("exits", "raised SystemExit: enough"),
        ("no number", "is not finite: nan"),
        ("wider", "shape (1, 3)"),
    ],
)
def test_a_fault_in_one_worker_is_one_sentence_and_loses_no_clock(tmp_path, fault, said):
    with running(
        faulty,
        "Faulty",
        tmp_path,
        "r0",
        "t0",
        "t1",
        arguments={"fault": fault},
        blocks=4,
        grains=5,
        partitions=2,
        expected=3,
    ) as house:
        found = house.result(60)
        why = house.controller.ended
        assert said in why
        assert "items 2" in why
        assert "\n" not in why
        assert [node.process.wait(60) for node in house.nodes.values()] == [0, 0, 0]
        assert found["sum"].tolist() == [[10.0 * (house.controller.saved + 1)] * 2] * 4
