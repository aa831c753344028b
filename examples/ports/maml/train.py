"""MAML on sinusoids with torch.func, in the manner of functorch's examples/maml_regression."""

import math

import numpy as np
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
#+
from orchestrator import Session  #+


class ThreeLayerNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(1, 40)
        self.relu1 = nn.ReLU()
        self.fc2 = nn.Linear(40, 40)
        self.relu2 = nn.ReLU()
        self.fc3 = nn.Linear(40, 1)

    def forward(self, x):
        x = self.relu1(self.fc1(x))
        x = self.relu2(self.fc2(x))
        return self.fc3(x)


def mse_loss(x, y):
    return torch.mean((x - y) ** 2)


num_tasks = 8
K = 20
alpha = 0.05
losses = []

torch.manual_seed(0)
np.random.seed(0)
net = ThreeLayerNet()
opt = torch.optim.Adam(net.parameters(), lr=1e-3)


def sample_tasks(outer_batch_size, inner_batch_size):
    As, phases = [], []
    for _ in range(outer_batch_size):
        As.append(np.random.uniform(low=0.1, high=0.5))
        phases.append(np.random.uniform(low=0.0, high=np.pi))

    def get_batch():
        xs, ys = [], []
        for A, phase in zip(As, phases):
            x = np.random.uniform(low=-5.0, high=5.0, size=(inner_batch_size, 1))
            y = A * np.sin(x + phase)
            xs.append(x)
            ys.append(y)
        return torch.tensor(np.array(xs), dtype=torch.float), torch.tensor(np.array(ys), dtype=torch.float)

    x1, y1 = get_batch()
    x2, y2 = get_batch()
    return x1, y1, x2, y2


def get_loss_for_task(use_transform, x1, y1, x2, y2):
    def inner_loss(params, x1, y1):
        f = functional_call(net, params, (x1,))
        return mse_loss(f, y1)

    params = dict(net.named_parameters())
    grads = grad(inner_loss)(params, x1, y1)
    new_params = {k: params[k] - alpha * grads[k] for k in params}
    v_f = functional_call(net, new_params, (x2,))
    return mse_loss(v_f, y2)


#-for it in range(60):
session = Session(net, opt, microbatches=4)  #+
for it in session.steps(60):  #+
    loss2 = 0.0
    opt.zero_grad()
    task = sample_tasks(num_tasks, K)
#-    inner_losses = vmap(lambda *t: get_loss_for_task(True, *t))(task[0], task[1], task[2], task[3])
#-    loss2 = sum(inner_losses) / len(inner_losses)
#-    loss2.backward()
    outer_loss = lambda *task: vmap(lambda *t: get_loss_for_task(True, *t))(*task).mean()  #+
    loss2 = session.backward(outer_loss, *task)  #+
    opt.step()
    if it % 10 == 0:
        print("Iteration %d -- Outer Loss: %.4f" % (it, loss2))
    losses.append(loss2.detach())

t_A, t_b = 0.3, 0.0
x = torch.linspace(-5, 5, 50).unsqueeze(1)
print("before adaptation", F.mse_loss(net(x), t_A * torch.sin(x + t_b)).item(), math.sqrt(float(losses[-1])))
