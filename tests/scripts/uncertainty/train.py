"""Two tasks on one trunk, weighed by their uncertainties, which are parameters as well."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
#+
from orchestrator import Session  #+


class MultiTask(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(12, 32), nn.ReLU())
        self.depth, self.kind = nn.Linear(32, 1), nn.Linear(32, 3)

    def forward(self, x):
        h = self.trunk(x)
        return self.depth(h), self.kind(h)


class AutomaticWeightedLoss(nn.Module):
    def __init__(self, num=2):
        super().__init__()
        self.params = nn.Parameter(torch.ones(num))

    def forward(self, *losses):
        return sum(
            0.5 / self.params[i] ** 2 * loss + torch.log(1 + self.params[i] ** 2)
            for i, loss in enumerate(losses)
        )


parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
args = parser.parse_args()
torch.manual_seed(0)
x = torch.randn(256, 12)
dataset = TensorDataset(x, x[:, :3].sum(1, keepdim=True), x[:, 3:6].argmax(1))
#-loader = DataLoader(dataset, batch_size=32, shuffle=True)
model, awl = MultiTask(), AutomaticWeightedLoss(2)
optimizer = torch.optim.Adam(
    [{"params": model.parameters(), "lr": 1e-2}, {"params": awl.parameters(), "weight_decay": 0}]
)
session = Session(model, awl, optimizer)  #+
loader = session.data(dataset, batch_size=32, microbatches=4, shuffle=True)  #+


def multi_task_loss(inputs, depth, kind):
    pred_depth, pred_kind = model(inputs)
    return awl(F.l1_loss(pred_depth, depth), F.cross_entropy(pred_kind, kind))


#-for epoch in range(args.epochs):
#-    for inputs, depth, kind in loader:
#-        loss = multi_task_loss(inputs, depth, kind)
for epoch in session.epochs(args.epochs):  #+
    for batch in loader:  #+
        optimizer.zero_grad()
#-        loss.backward()
        loss = session.backward(lambda b: multi_task_loss(*b), batch).loss  #+
        optimizer.step()
    print(f"epoch {epoch}: {loss:.4f} weights {awl.params.tolist()}")
