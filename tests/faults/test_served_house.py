"""An application of examples/paramserver as a job of a whole house, whose machines are warned and killed."""

import sys
from pathlib import Path

import numpy as np
import pytest
from houses import drill, orchestrator, until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(500)]

SCRIPT = Path(__file__).parents[2] / "examples" / "paramserver" / "factorisation.py"
CLOCKS = 120
CONVERGED = 0.05  # of the first clock's objective; see test_served_tables for the bits of it


@pytest.fixture
def first(monkeypatch):
    """The mean squared error of the first clock of the same job in one process."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import factorisation

    application = factorisation.Factorisation(clocks=CLOCKS)
    yield factorisation.job(1).run().measures[0] / application.items
    for name in ("factorisation", "loaders"):
        sys.modules.pop(name, None)


def test_an_example_outlives_a_warned_and_a_killed_machine(new_house, first):
    house = new_house()
    house.start()
    words = ("--config", str(house.config), "--slots-max", "3", "--json")
    said = orchestrator("submit", *words, str(SCRIPT), "--", str(CLOCKS))
    assert said.returncode == 0, said.stderr
    house.follow_newest()
    house.reached(3, 200)
    until("two workers", lambda: (job := house.job()) is not None and job.workers >= 2, 100)
    until("a machine to give notice to", lambda: drill(house, 10.0, 1))
    step = house.reached(house.job().step + 10, 150).step
    until("a machine to kill", lambda: drill(house, 0.0, 1))
    house.reached(step + 10, 150)

    job = house.ended(300)
    assert job.status == "SUCCEEDED", job.because
    assert (job.step, job.steps_lost) == (CLOCKS, 0), house.told()
    assert job.loss < CONVERGED * first
    with np.load(job.export_uri) as tables:
        assert np.isfinite(tables["users"]).all()
    assert house.down() == 0
