"""A job whose tables are served: ratings are factorised, and counted one by one.

It is given its clocks, a pause, and perhaps a file that says at which clock it waits.
"""

import sys
import time
from pathlib import Path

import numpy as np

from agent.paramserver.api import Application, Stop
from agent.paramserver.tables import Table
from agent.served import ParamServerJob

USERS, ITEMS, RANK, RATINGS = 40, 30, 4, 1200


def small(keys):
    return 0.3 * np.sin(np.outer(keys + 1.0, np.arange(1.0, RANK + 1)) * 12.9898)


class Ratings(Application):
    items = RATINGS
    tables = (
        Table("users", USERS, RANK, initial=small, exact=True, own_writes=False),
        Table("items", ITEMS, RANK, initial=small, exact=True, own_writes=False),
        Table("seen", USERS, 1, "int64"),
    )

    def __init__(self, clocks, pause_s, hold=""):
        self.stop, self.pause_s, self.hold = Stop(clocks=clocks), pause_s, hold
        draw = np.random.default_rng(1)
        self.user, self.item = draw.integers(0, USERS, RATINGS), draw.integers(0, ITEMS, RATINGS)
        left, right = draw.normal(size=(USERS, 2)), draw.normal(size=(ITEMS, 2))
        self.rating = (left[self.user] * right[self.item]).sum(1)

    def process_range(self, lo, hi, params):
        time.sleep(self.pause_s)
        while self.hold and params.clock >= int(Path(self.hold).read_text()):
            time.sleep(0.02)
        users, at_user = np.unique(self.user[lo:hi], return_inverse=True)
        items, at_item = np.unique(self.item[lo:hi], return_inverse=True)
        left, right = params.read("users", users), params.read("items", items)
        error = self.rating[lo:hi] - (left[at_user] * right[at_item]).sum(1)
        down_left, down_right = np.zeros_like(left), np.zeros_like(right)
        np.add.at(down_left, at_user, 0.01 * error[:, None] * right[at_item])
        np.add.at(down_right, at_item, 0.01 * error[:, None] * left[at_user])
        params.update("users", users, down_left)
        params.update("items", items, down_right)
        params.update("seen", users, np.bincount(at_user)[:, None])
        params.measure(float(error @ error))


def job(clocks, pause_s, hold=""):
    application = Ratings(clocks, pause_s, hold)
    return ParamServerJob(application, blocks=12, grains=4, partitions=4, help_size=2)


if __name__ == "__main__":
    job(int(sys.argv[1]), float(sys.argv[2]), *sys.argv[3:]).run()
