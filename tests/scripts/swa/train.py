"""Stochastic weight averaging: an average of the weights of the last epochs, its norms redone."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.data import DataLoader, TensorDataset

from orchestrator import Session  #+
#+
parser = argparse.ArgumentParser(description="SWA training")
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--swa_start", type=int, default=2)
parser.add_argument("--swa_lr", type=float, default=0.02)
parser.add_argument("--lr_init", type=float, default=0.05)
args = parser.parse_args()
torch.manual_seed(1)
x = torch.randn(256, 10)
dataset = TensorDataset(x, (x[:, 0] * x[:, 1] > 0).long())
#-loader = DataLoader(dataset, batch_size=32, shuffle=True)
model = nn.Sequential(nn.Linear(10, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr_init, momentum=0.9)
swa_model = AveragedModel(model)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)
swa_scheduler = SWALR(optimizer, swa_lr=args.swa_lr, anneal_epochs=1)
session = Session(model, swa_model, optimizer, scheduler, swa_scheduler)  #+
loader = session.data(dataset, batch_size=32, microbatches=4, shuffle=True)  #+

#-for epoch in range(args.epochs):
#-    for inputs, target in loader:
for epoch in session.epochs(args.epochs):  #+
    for batch in loader:  #+
        optimizer.zero_grad()
#-        loss = F.cross_entropy(model(inputs), target)
#-        loss.backward()
        loss = session.backward(lambda b: F.cross_entropy(model(b[0]), b[1]), batch).loss  #+
        optimizer.step()
    if epoch >= args.swa_start:
        swa_model.update_parameters(model)
        swa_scheduler.step()
    else:
        scheduler.step()
    print(f"epoch {epoch} loss {loss:.4f}")

update_bn(DataLoader(dataset, batch_size=32), swa_model)
with torch.no_grad():
    right = (swa_model.eval()(x).argmax(1) == dataset.tensors[1]).float().mean()
print(f"averaged: {100 * right:.1f} % right")
