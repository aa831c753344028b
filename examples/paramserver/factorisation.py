"""Matrix factorisation by SGD on a parameter server.

`python factorisation.py` runs it alone, and `orchestrator submit factorisation.py` on spot machines.
"""

import sys

import loaders
import numpy as np
from numba import njit

from agent.paramserver.api import Application, Stop
from agent.paramserver.tables import Table
from agent.served import ParamServerJob

RATE, KEEP = 0.05, 0.002
RANGES_MAX = 4096


@njit(nogil=True, cache=True)
def descend(left, right, users, items, ratings, rate):
    """Go over ratings in order, and return the sum of the squared errors before each."""
    total = 0.0
    for at in range(len(ratings)):
        user, item = left[users[at]], right[items[at]]
        error = ratings[at]
        for k in range(len(user)):
            error -= user[k] * item[k]
        for k in range(len(user)):
            before = user[k]
            user[k] += rate * (error * item[k] - KEEP * before)
            item[k] += rate * (error * before - KEEP * item[k])
        total += error * error
    return total


def _small(width, salt):
    def initial(keys):
        grid = np.outer(keys + 1.0, np.arange(1.0, width + 1)) + salt
        return 0.3 * np.sin(grid * 12.9898)

    return initial


class Factorisation(Application):
    """Rows of users and of items, whose products are the ratings."""

    grainwise = False

    def __init__(  # noqa: PLR0913, PLR0917 - the size of it
        self, users=300, items=200, ratings=20_000, rank=8, clocks=10, rate=RATE, by_user=False
    ):
        """With `by_user` ratings lie user by user, so a block needs the rows of its users only."""
        self.users, self.columns, self.values = loaders.ratings(users, items, ratings)
        if by_user:
            order = np.argsort(self.users, kind="stable")
            made = (self.users[order], self.columns[order], self.values[order])
            self.users, self.columns, self.values = made
        self.items = ratings
        self.tables = (
            Table("users", users, rank, initial=_small(rank, 0.1)),
            Table("items", items, rank, initial=_small(rank, 0.7)),
        )
        self.stop = Stop(clocks=clocks)
        self.rate = rate
        self.rows = {}  # that a range of ratings needs, because it is gone over in every clock
        none, first = np.zeros((1, rank)), np.zeros(1, np.int32)
        descend(none, none, first, first, np.zeros(1), rate)  # compiled now

    def rows_of(self, lo, hi):
        """Return the users and items of these ratings, and where each rating's are among them."""
        if (lo, hi) not in self.rows:
            found = []
            for keys in (self.users[lo:hi], self.columns[lo:hi]):
                rows, at = np.unique(keys, return_inverse=True)
                found += [rows, at.astype(np.int32)]
            if len(self.rows) >= RANGES_MAX:
                self.rows.clear()
            self.rows[lo, hi] = found
        return self.rows[lo, hi]

    def process_range(self, lo, hi, params):
        users, at_user, items, at_item = self.rows_of(lo, hi)
        left, right = params.read("users", users), params.read("items", items)
        new_left, new_right = left.copy(), right.copy()
        error = descend(new_left, new_right, at_user, at_item, self.values[lo:hi], self.rate)
        params.update("users", users, new_left - left)
        params.update("items", items, new_right - right)
        params.measure(error)


class Counted(Factorisation):
    """Counts each rating as well, in a table: whatever is lost or done twice shows there."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.tables += (Table("seen", self.tables[0].keys, 1, "int64"),)

    def process_range(self, lo, hi, params):
        super().process_range(lo, hi, params)
        users, counts = np.unique(self.users[lo:hi], return_counts=True)
        params.update("seen", users, counts[:, None])

    def lost(self, seen, clocks):
        """Return how many ratings are missing or too many after so many clocks."""
        return int(abs(seen - clocks * np.bincount(self.users, minlength=len(seen))).sum())


def job(clocks):
    return ParamServerJob(Factorisation(clocks=clocks), blocks=24, grains=4, slack=1, help_size=3)


if __name__ == "__main__":
    alone = job(int(sys.argv[1]) if sys.argv[1:] else 10).run()
    for clock, error in enumerate(alone.measures if alone else ()):
        print(f"clock {clock:3}  squared error {error:.1f}")
