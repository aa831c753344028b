"""A running house keeps its predictions true to what steps really take."""

import re

import pytest
from houses import RunningHouse, until
from test_bad_days import TOY, drill

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

PAUSE_S = 0.1
# Behind the loss: in it, calibration would not miss it.
SCRIPT = TOY.replace("    time.sleep(pause_s)\n", "").replace(
    "    optimizer.step()\n", "    time.sleep(pause_s)\n    optimizer.step()\n"
)
DRIFTED = re.compile(r"steps take ([\d.]+) times what was predicted, and microbatches [\d.]+ times")
PREDICTED = re.compile(r"1x1 on 1 worker: predicted (\d+) ms a step")


def test_the_plan_book_follows_what_steps_take(new_house) -> None:
    """The script waits beside its model, which calibration cannot see: after some steps that is said, the profile is
    refitted, and the next layout is predicted to take what steps have taken.
    """
    house: RunningHouse = new_house()
    house.start()
    house.submit(SCRIPT, argv=("100000", str(PAUSE_S), "out"), slots_max=1)
    house._telling(until, "the drift", lambda: DRIFTED.search(house.told()), 120.0)
    assert float(DRIFTED.search(house.told())[1]) > 2
    said = len(PREDICTED.findall(house.told()))
    drill(house, 0.0, 1)
    house._telling(
        until, "the next layout", lambda: len(PREDICTED.findall(house.told())) > said, 120.0
    )
    predicted_s = float(PREDICTED.findall(house.told())[-1]) / 1e3
    assert PAUSE_S < predicted_s < 3 * PAUSE_S
