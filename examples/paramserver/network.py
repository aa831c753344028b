"""A small torch network on a parameter server. `python network.py` runs it alone.

The weights of any `torch.nn.Module` lie in one table, as rows of equal width; Adam's moments are
kept beside them by the servers.
"""

import loaders
import numpy as np
import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from agent.paramserver.api import Application, Stop
from agent.paramserver.tables import Table, adam
from agent.served import ParamServerJob

WIDTH = 16  # of a row


class Network(Application):
    """Points in rings around one centre, which no linear model tells apart."""

    def __init__(self, count=400, kinds=3, hidden=24, clocks=40):
        self.labels, self.points = loaders.rings(count, kinds)
        self.items = count
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(2, hidden), torch.nn.Tanh(), torch.nn.Linear(hidden, kinds)
        )
        first = parameters_to_vector(self.model.parameters()).detach().numpy()
        self.size = first.size
        self.rows = np.resize(first, (-(-self.size // WIDTH), WIDTH))
        self.tables = (
            Table(
                "weights",
                len(self.rows),
                WIDTH,
                initial=lambda keys: self.rows[keys],
                rule=adam(0.05),
                exact=True,
            ),
        )
        self.stop = Stop(clocks=clocks)

    def process_range(self, lo, hi, params):
        keys = np.arange(len(self.rows))
        self._set(params.read("weights", keys))
        scores = self.model(torch.from_numpy(self.points[lo:hi]))
        loss = cross_entropy(scores, torch.from_numpy(self.labels[lo:hi]), reduction="sum")
        gradients = torch.autograd.grad(loss / self.items, [*self.model.parameters()])
        flat = np.zeros(self.rows.size, np.float32)
        flat[: self.size] = torch.cat([one.reshape(-1) for one in gradients]).numpy()
        params.update("weights", keys, flat.reshape(self.rows.shape))
        params.measure(float(loss.detach()))

    def accuracy(self, weights):
        self._set(weights)
        with torch.no_grad():
            found = self.model(torch.from_numpy(self.points)).argmax(1).numpy()
        return float((found == self.labels).mean())

    def _set(self, rows):
        flat = torch.from_numpy(np.ascontiguousarray(rows, np.float32).reshape(-1)[: self.size])
        with torch.no_grad():
            vector_to_parameters(flat.clone(), self.model.parameters())


if __name__ == "__main__":
    application = Network()
    alone = ParamServerJob(application).run()
    for clock, loss in enumerate(alone.measures if alone else ()):
        print(f"clock {clock:3}  loss {loss / application.items:.4f}")
    if alone:
        print(f"accuracy {application.accuracy(alone.value('weights')):.1%}")
