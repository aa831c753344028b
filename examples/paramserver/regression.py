"""Multinomial logistic regression on a parameter server. `python regression.py` runs it alone."""

import loaders
import numpy as np

from agent.paramserver.api import Application, Stop
from agent.paramserver.tables import Table, adagrad
from agent.served import ParamServerJob


class Regression(Application):
    """One row of weights for each class; every gradient touches all of them."""

    def __init__(self, count=600, width=12, kinds=4, clocks=30):
        self.labels, self.points = loaders.classes(count, width, kinds)
        self.items = count
        self.tables = (Table("weights", kinds, width, rule=adagrad(0.5), exact=True),)
        self.stop = Stop(clocks=clocks)

    def process_range(self, lo, hi, params):
        points, labels = self.points[lo:hi], self.labels[lo:hi]
        keys = np.arange(self.tables[0].keys)
        scores = points @ params.read("weights", keys).T
        scores -= scores.max(1, keepdims=True)
        shares = np.exp(scores)
        shares /= shares.sum(1, keepdims=True)
        params.measure(-float(np.log(shares[np.arange(hi - lo), labels]).sum()))
        shares[np.arange(hi - lo), labels] -= 1
        params.update("weights", keys, shares.T @ points / self.items)

    def accuracy(self, weights):
        return float((self.labels == (self.points @ weights.T).argmax(1)).mean())


if __name__ == "__main__":
    application = Regression()
    alone = ParamServerJob(application).run()
    for clock, loss in enumerate(alone.measures if alone else ()):
        print(f"clock {clock:3}  loss {loss / application.items:.4f}")
    if alone:
        print(f"accuracy {application.accuracy(alone.value('weights')):.1%}")
