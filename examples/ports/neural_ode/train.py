"""Fit a spiral by a neural ODE, in the manner of torchdiffeq's examples/ode_demo.py."""

import argparse
import time

import numpy as np
import torch
import torch.nn as nn
import torch.optim as optim
#+
from orchestrator import Session  #+

parser = argparse.ArgumentParser("ODE demo")
parser.add_argument("--data_size", type=int, default=200)
parser.add_argument("--batch_time", type=int, default=10)
parser.add_argument("--batch_size", type=int, default=20)
parser.add_argument("--niters", type=int, default=40)
parser.add_argument("--test_freq", type=int, default=10)
args = parser.parse_args()


def odeint(func, y0, t):
    """Runge and Kutta's method of fourth order, with a step per time."""
    ys = [y0]
    for t0, t1 in zip(t[:-1], t[1:]):
        h, y = t1 - t0, ys[-1]
        k1 = func(t0, y)
        k2 = func(t0 + h / 2, y + h * k1 / 2)
        k3 = func(t0 + h / 2, y + h * k2 / 2)
        k4 = func(t1, y + h * k3)
        ys.append(y + h * (k1 + 2 * k2 + 2 * k3 + k4) / 6)
    return torch.stack(ys)


true_y0 = torch.tensor([[2.0, 0.0]])
t = torch.linspace(0.0, 25.0, args.data_size)
true_A = torch.tensor([[-0.1, 2.0], [-2.0, -0.1]])


class Lambda(nn.Module):
    def forward(self, t, y):
        return torch.mm(y**3, true_A)


with torch.no_grad():
    true_y = odeint(Lambda(), true_y0, t)


def get_batch():
    s = torch.from_numpy(
        np.random.choice(np.arange(args.data_size - args.batch_time, dtype=np.int64), args.batch_size, replace=False)
    )
    batch_y0 = true_y[s]  # (M, D)
    batch_t = t[: args.batch_time]  # (T)
    batch_y = torch.stack([true_y[s + i] for i in range(args.batch_time)], dim=0)  # (T, M, D)
    return batch_y0, batch_t, batch_y


class ODEFunc(nn.Module):
    def __init__(self):
        super(ODEFunc, self).__init__()
        self.net = nn.Sequential(nn.Linear(2, 50), nn.Tanh(), nn.Linear(50, 2))
        for m in self.net.modules():
            if isinstance(m, nn.Linear):
                nn.init.normal_(m.weight, mean=0, std=0.1)
                nn.init.constant_(m.bias, val=0)

    def forward(self, t, y):
        return self.net(y**3)


class RunningAverageMeter(object):
    """Computes and stores the average and current value"""

    def __init__(self, momentum=0.99):
        self.momentum = momentum
        self.reset()

    def reset(self):
        self.val = None
        self.avg = 0

    def update(self, val):
        if self.val is None:
            self.avg = val
        else:
            self.avg = self.avg * self.momentum + val * (1 - self.momentum)
        self.val = val


if __name__ == "__main__":
    ii = 0
    func = ODEFunc()
    optimizer = optim.RMSprop(func.parameters(), lr=1e-3)
    session = Session(func, optimizer, microbatches=4)  #+
    end = time.time()
    time_meter = RunningAverageMeter(0.97)
    loss_meter = RunningAverageMeter(0.97)

#-    for itr in range(1, args.niters + 1):
    for itr in session.steps(args.niters):  #+
        optimizer.zero_grad()
        batch_y0, batch_t, batch_y = get_batch()
#-        pred_y = odeint(func, batch_y0, batch_t)
#-        loss = torch.mean(torch.abs(pred_y - batch_y))
#-        loss.backward()
        loss_of = lambda y0, y: torch.mean(torch.abs(odeint(func, y0, batch_t).transpose(0, 1) - y))  #+
        loss = session.backward(loss_of, batch_y0, batch_y.transpose(0, 1))  #+
        optimizer.step()

        time_meter.update(time.time() - end)
        loss_meter.update(loss.item())

        if itr % args.test_freq == 0:
            with torch.no_grad():
                pred_y = odeint(func, true_y0, t)
                loss = torch.mean(torch.abs(pred_y - true_y))
                print("Iter {:04d} | Total Loss {:.6f}".format(itr, loss.item()))
                ii += 1

        end = time.time()
