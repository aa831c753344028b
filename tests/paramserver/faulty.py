"""An application that goes wrong at one item of one clock, so in one worker of several."""

import sys

import numpy as np

from agent.paramserver.api import Application, Stop
from agent.paramserver.tables import Table

ITEM, CLOCK = 23, 2


class Faulty(Application):
    items = 40
    stop = Stop(clocks=1000)
    tables = (Table("sum", 4, 2),)

    def __init__(self, fault):
        self.fault = fault

    def process_item(self, item, params):
        change = np.ones((1, 2))
        if item == ITEM and params.clock == CLOCK:
            change = FAULTS[self.fault]()
        params.update("sum", [item % 4], change)


def _raises():
    raise ZeroDivisionError("no luck")


FAULTS = {
    "raises": _raises,
    "exits": lambda: sys.exit("enough"),
    "no number": lambda: np.array([[1.0, np.nan]]),
    "wider": lambda: np.ones((1, 3)),
}
