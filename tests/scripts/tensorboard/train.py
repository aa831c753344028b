"""Regression with a summary writer: scalars per step, histograms of weights per epoch."""

import argparse
import csv
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
#+
from orchestrator import Session  #+


class SummaryWriter:
    """Scalars as rows of a file, as a dashboard reads them."""

    def __init__(self, log_dir):
        self.path = Path(log_dir)
        self.path.mkdir(parents=True, exist_ok=True)

    def add_scalar(self, tag, value, step):
        with (self.path / "scalars.csv").open("a", newline="") as file:
            csv.writer(file).writerow([tag, step, f"{value:.6f}"])

    def add_histogram(self, tag, values, step):
        torch.save(values.detach().histc(8), self.path / f"{tag.replace('.', '_')}_{step}.pt")


parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--log_dir", default="runs/exp")
args = parser.parse_args()
torch.manual_seed(0)
x = torch.linspace(-3, 3, 256)[:, None]
dataset = TensorDataset(x, x.sin() + 0.1 * torch.randn(256, 1))
model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))
criterion = nn.MSELoss()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
#-loader = DataLoader(dataset, batch_size=32, shuffle=True)
#-writer = SummaryWriter(args.log_dir)
session = Session(model, optimizer)  #+
loader = session.data(dataset, batch_size=32, microbatches=4, shuffle=True)  #+
writer = SummaryWriter(session.output / args.log_dir)  #+

#-n_iter = 0
#-for epoch in range(args.epochs):
#-    for inputs, targets in loader:
for epoch in session.epochs(args.epochs):  #+
    for batch in loader:  #+
        optimizer.zero_grad()
#-        loss = criterion(model(inputs), targets)
#-        loss.backward()
        loss = session.backward(lambda b: criterion(model(b[0]), b[1]), batch).loss  #+
        optimizer.step()
#-        writer.add_scalar("Loss/train", loss, n_iter)
#-        n_iter += 1
        writer.add_scalar("Loss/train", loss, session.step)  #+
    for name, param in model.named_parameters():
        writer.add_histogram(name, param, epoch)
    with torch.no_grad():
        writer.add_scalar("Loss/test", criterion(model(x), x.sin()), epoch)

print(f"last loss {loss:.4f}")
