"""Real workers on unlike machines, led by the manager's own decisions.

On a machine of type "other" torch takes other kernels (`ATEN_CPU_CAPABILITY=default`), as on a processor without
wide registers. They add in another order, and so round differently.
"""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from crews import Nursery, RedisProcess, ends_alike, played_alone, until
from managed import POOL, Managed
from msgspec.structs import replace

from agent.messages import JobCompleted, Rewound, WorkerFailed, WorkerReady
from cloud.model import Listing, Quote, Sold
from orchestrator.actions import AnyAction, Launch, StartWorker, Terminate
from orchestrator.brain.holdings import alike
from orchestrator.events import AnyEvent, CatalogueSeen, Listed, QuotesSeen

pytestmark = pytest.mark.processes

TOY = Path(__file__).with_name("toy.py")
STEPS, LONG = 60, 100_000


class Unlike(Managed):
    """Sells one type after the other; a machine that is given back takes its workers along."""

    def __init__(
        self, redis_process: RedisProcess, nurseries: dict[str, Nursery], folder: Path
    ) -> None:
        self.nurseries = nurseries
        self.launched: list[str] = []  # types
        self._on: dict[str, str] = {}  # the machine of each worker
        super().__init__(redis_process, nurseries["small"], folder, rethink_s=0.2, morph_s=0.01)

    def sell(self, *names: str) -> None:
        kinds = tuple(replace(self.kind, name=name) for name in names)
        pools = tuple(replace(POOL, type=name) for name in names)
        now_s = time.time()
        quotes = tuple(Quote(pool=pool, at_s=now_s, price_usd_per_h=0.03) for pool in pools)
        with self._lock:
            self._see(
                CatalogueSeen(at_s=now_s, place=POOL.place, sold=Sold(types=kinds, pools=pools))
            )
            self._see(QuotesSeen(at_s=now_s, place=POOL.place, quotes=quotes))

    def wants(self, slots: int) -> None:
        with self._lock:
            self.managed_job.spec = replace(self.managed_job.spec, slots_max=slots)

    def types(self) -> list[str]:
        """Of what the newest layout is made."""
        layout = self.managed_job.layouts.current
        workers = () if layout is None else layout.workers
        there = [self.state.workers[worker] for worker in workers if worker in self.state.workers]
        return sorted(self.state.leases[worker.token].type.name for worker in there)

    def said(self, what: str) -> list[str]:
        return [sentence for sentence in self.sentences if what in sentence]

    def take_all(self) -> None:
        """The cloud takes every machine."""
        with self._lock:
            for machine_id in [*self._machines]:
                self._end(machine_id)
                ended = replace(
                    self._machines[machine_id],
                    state="terminated",
                    ended_by="provider",
                    ended_at_s=time.time(),
                )
                self._machines[machine_id] = ended
            listing = Listing(place=POOL.place, machines=tuple(self._machines.values()))
            now_s = time.time()
            self._see(Listed(at_s=now_s, asked_at_s=now_s, listing=listing))

    def _start(self, action: StartWorker) -> None:
        self._on[action.worker] = action.machine_id
        self.nursery = self.nurseries[self._machines[action.machine_id].pool.type]
        super()._start(action)

    def _launch(self, action: Launch, now_s: float) -> list[AnyEvent]:
        self.launched.append(action.request.pool.type)
        return super()._launch(action, now_s)

    def _do(self, action: AnyAction) -> list[AnyEvent]:
        if isinstance(action, Terminate):
            self._end(action.machine_id)
        return super()._do(action)

    def _end(self, machine_id: str) -> None:
        for worker in [w for w, m in self._on.items() if m == machine_id]:
            with suppress(ProcessLookupError):
                os.kill(self.pids[worker], signal.SIGKILL)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], bytes]:
    """What the script prints and saves alone."""
    return played_alone(TOY, tmp_path_factory.mktemp("alone") / "out.pt", str(STEPS), "0")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """Where workers round differently."""
    nursery = Nursery(tmp_path_factory.mktemp("other"), ["env", "ATEN_CPU_CAPABILITY=default"])
    yield nursery
    nursery.close()


@pytest.fixture
def crew(
    redis_process: RedisProcess, nursery: Nursery, other: Nursery, tmp_path: Path
) -> Iterator[Unlike]:
    crew = Unlike(redis_process, {"small": nursery, "other": other}, tmp_path)
    yield crew
    crew.close()


def begin(crew: Unlike, held_at: int, steps: int = STEPS, **spec: object) -> Path:
    """A job on one small machine that waits at a step; what is sold then is another type."""
    hold = crew.folder / "out.pt.hold"
    hold.write_text(str(held_at))
    arguments = (str(steps), "0.002", str(crew.folder / "out.pt"))
    crew.submit(TOY.read_text(), *arguments, slots_max=1, haste=1000.0, **spec)
    until("the held step", lambda: crew.step >= held_at)
    crew.sell("other")
    return hold


def test_an_exact_job_keeps_its_bits_where_another_kind_of_machine_comes(
    crew: Unlike, alone: tuple[list[str], bytes]
) -> None:
    """The machine is named and given back, and nothing more of its type is bought; the job ends as in one process."""
    hold = begin(crew, 4)
    crew.wants(2)
    until("the sentence", lambda: crew.said("cannot train with those of job"))
    hold.unlink()
    ends_alike(crew, alone, STEPS)
    assert len(crew.said("cannot train with those of job")) == 1
    assert crew.launched == ["small", "other"]


def test_with_exact_off_unlike_machines_train_together(crew: Unlike) -> None:
    """A joining worker is compared within a tolerance, and both are in one layout."""
    hold = begin(crew, 4, steps=LONG, exact=False)
    crew.wants(2)
    until("a worker on the other machine", lambda: len(crew.pids) == 2)
    *_, joining = crew.pids
    crew.step_on(hold, "both in one layout", lambda: crew.types() == ["other", "small"], joining)
    hold.unlink()
    crew.reach(crew.step + 5)
    assert len({ready.hardware for ready in crew.of(WorkerReady)}) == 2
    assert len(crew.said("with exact = false they train together")) == 1


def test_an_exact_job_whose_machines_are_gone_goes_on_with_others(
    crew: Unlike, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No small machine is sold any more, and the last is taken: no committed step is lost, and it says from where on."""
    monkeypatch.setattr(alike, "LACKS_S", 1.0)
    hold = begin(crew, 24)
    crew.take_all()
    hold.unlink()
    assert until("the end", lambda: crew.of(JobCompleted))[0].step == STEPS
    assert len(crew.said("could be had that round as those")) == 1
    steps = [line.split()[1] for line in crew.printed() if line.startswith("step ")]
    assert len(steps) == len(set(steps))
    assert not crew.of(Rewound)
    assert not crew.of(WorkerFailed)
