"""A running house keeps its predictions true to what steps really take."""

import re
from pathlib import Path

import pytest
from houses import RunningHouse, until
from test_bad_days import TOY, drill

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

DRIFTED = re.compile(r"steps take ([\d.]+) times what was predicted: times are scaled by it")
PREDICTED = re.compile(r"1x1 on 1 worker: (\d+) ms a step")


def test_the_plan_book_follows_what_steps_take(new_house) -> None:
    """The script waits beside its model, which calibration cannot see: after some steps that is said, the profile is
    refitted, and the next layout is predicted to take what steps have taken.
    """
    house: RunningHouse = new_house()
    house.start()
    house.submit(TOY, argv=("100000", "0.02", str(Path(house.folder) / "out")), slots_max=1)
    until("the drift", lambda: DRIFTED.search(house.told()), 120.0)
    factor = float(DRIFTED.search(house.told())[1])
    assert factor > 2
    taken_ms = 1e3 * house.job().step_s
    said = len(PREDICTED.findall(house.told()))
    drill(house, 0.0, 1)
    until("the next layout", lambda: len(PREDICTED.findall(house.told())) > said, 120.0)
    predicted_ms = float(PREDICTED.findall(house.told())[-1])
    assert taken_ms / 1.5 < predicted_ms < taken_ms * 1.5
