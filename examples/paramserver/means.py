"""k-means on a parameter server: the new centres are a rule of the server's."""

import loaders
import numpy as np

from agent.paramserver.api import Application, Stop
from agent.paramserver.tables import Rule, Table
from agent.served import ParamServerJob


def _centre(value, gradient, _arrays):
    """Replace centres by the means of their points; a centre without points stays."""
    count = gradient[:, -1]
    some = count > 0
    value[some, :-1] = gradient[some, :-1] / count[some, None]


class Means(Application):
    def __init__(self, count=400, width=3, kinds=5, clocks=6):
        self.points, self.centres = loaders.clouds(count, width, kinds)
        self.items, self.kinds = count, kinds
        self.tables = (
            Table(
                "centres",
                kinds,
                width + 1,
                initial=self._first,
                rule=Rule("mean", 0, _centre),
                exact=True,
            ),
        )
        self.stop = Stop(clocks=clocks)

    def _first(self, keys):
        """Begin at the first points, one for each centre."""
        return np.concatenate([self.points[keys] + 1.0, np.zeros((len(keys), 1))], 1)

    def process_range(self, lo, hi, params):
        points, keys = self.points[lo:hi], np.arange(self.kinds)
        centres = params.read("centres", keys)[:, :-1]
        distance = ((points[:, None] - centres[None]) ** 2).sum(2)
        nearest = distance.argmin(1)
        sums = np.zeros((self.kinds, points.shape[1] + 1))
        np.add.at(sums, nearest, np.concatenate([points, np.ones((hi - lo, 1))], 1))
        params.update("centres", keys, sums)
        params.measure(float(distance.min(1).sum()))


if __name__ == "__main__":
    application = Means()
    alone = ParamServerJob(application).run()
    for clock, distance in enumerate(alone.measures if alone else ()):
        print(f"clock {clock:3}  mean squared distance {distance / application.items:.4f}")
