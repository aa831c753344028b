"""An ensemble by torch.func, after PyTorch's tutorial on model ensembling and jax-like training loops."""
import copy

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.func import functional_call, jacrev, stack_module_state, vmap

from orchestrator import Session  #+

torch.manual_seed(0)


class SimpleMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(2, 32), nn.Linear(32, 32), nn.Linear(32, 2)

    def forward(self, x):
        return self.fc3(torch.tanh(self.fc2(torch.tanh(self.fc1(x)))))


def make_spirals(n_samples, noise_std=0.1, rotations=1.0):
    ts = torch.linspace(0, 1, n_samples)
    rs = ts**0.5
    thetas = rs * rotations * 2 * torch.pi
    signs = torch.randint(0, 2, (n_samples,)) * 2 - 1
    labels = (signs > 0).to(torch.long)
    xs = rs * signs * torch.cos(thetas) + torch.randn(n_samples) * noise_std
    ys = rs * signs * torch.sin(thetas) + torch.randn(n_samples) * noise_std
    return torch.stack([xs, ys], dim=1), labels


points, labels = make_spirals(100, noise_std=0.05)
num_models = 4
models = [SimpleMLP() for _ in range(num_models)]
params, buffers = stack_module_state(models)
base_model = copy.deepcopy(models[0])
base_model = base_model.to("meta")


def fmodel(params, buffers, x):
    return functional_call(base_model, (params, buffers), (x,))


optimizer = torch.optim.Adam(params.values(), lr=0.01, weight_decay=1e-4)


def loss_fn(params, minibatch, y):
    out = vmap(fmodel, in_dims=(0, 0, None))(params, buffers, minibatch)
    jac = vmap(vmap(jacrev(fmodel, argnums=2), in_dims=(None, None, 0)), in_dims=(0, 0, None))(params, buffers, minibatch)
    ce = F.cross_entropy(out.flatten(0, 1), y.repeat(num_models))
    return ce + 1e-3 * jac.square().mean()


#-for step in range(24):
session = Session(optimizer, microbatches=4)  #+
for step in session.steps(24):  #+
    idx = torch.randint(100, (32,))
#-    loss = loss_fn(params, points[idx], labels[idx])
    optimizer.zero_grad()
#-    loss.backward()
    loss = session.backward(lambda x, y: loss_fn(params, x, y), points[idx], labels[idx])  #+
    optimizer.step()
    if step % 5 == 0:
        with torch.no_grad():
            preds = vmap(fmodel, in_dims=(0, 0, None))(params, buffers, points).softmax(-1).mean(0).argmax(-1)
        print(step, loss.item(), (preds == labels).float().mean().item())
