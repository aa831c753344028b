"""An application whose first calls take longer than a node may be silent."""

import time

import numpy as np

from agent.paramserver.api import Application, Stop
from agent.paramserver.tables import Table

GRAIN_S = 0.02


class Sluggish(Application):
    tables = (Table("sum", 4, 1),)
    items = 8

    def __init__(self, first_s, clocks):
        self._wait_s, self.stop = first_s, Stop(clocks=clocks)

    def process_range(self, lo, hi, params):
        time.sleep(self._wait_s)
        self._wait_s = GRAIN_S
        params.read("sum", [0])
        params.update("sum", np.arange(lo, hi) % 4, np.ones((hi - lo, 1)))
