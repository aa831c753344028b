"""A job of parameter servers in a whole house, whose machines are warned and killed."""

import runpy
from pathlib import Path

import numpy as np
import pytest
from houses import drill, until
from waiting import write_whole

pytestmark = [pytest.mark.processes, pytest.mark.timeout(500)]

TOY = Path(__file__).parents[1] / "agent" / "served_toy.py"
CLOCKS = 60


def test_a_warned_and_a_killed_machine_leave_the_tables_of_one_process(new_house, tmp_path):
    house, hold = new_house(), tmp_path / "hold"
    hold.write_text("4")
    house.start()
    house.submit(TOY.read_text(), argv=(str(CLOCKS), "0.01", str(hold)), slots_max=3)
    until("two workers", lambda: (job := house.job()) is not None and job.workers >= 2, 200)
    write_whole(hold, CLOCKS)
    house.reached(5, 100)
    until("a machine to give notice to", lambda: drill(house, 10.0, 1))
    step = house.reached(house.job().step + 8, 100).step
    until("a machine to kill", lambda: drill(house, 0.0, 1))
    house.reached(step + 5, 150)

    job = house.ended(200)
    assert job.status == "SUCCEEDED", job.because
    assert (job.step, job.steps_lost) == (CLOCKS, 0), house.told()
    alone = runpy.run_path(str(TOY))["job"](CLOCKS, 0.0).run()
    with np.load(job.export_uri) as tables:
        for name in ("users", "items", "seen"):
            assert np.array_equal(tables[name], alone.value(name)), name
    assert house.down() == 0
