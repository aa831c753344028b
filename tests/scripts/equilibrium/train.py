"""A deep equilibrium model, after the implicit layers tutorial (locuslab/deq)."""
import torch
import torch.autograd as autograd
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset

from orchestrator import Session, supervised  #+


class ResNetLayer(nn.Module):
    def __init__(self, n_channels, n_inner_channels, kernel_size=3, num_groups=4):
        super().__init__()
        self.conv1 = nn.Conv2d(n_channels, n_inner_channels, kernel_size, padding=kernel_size // 2, bias=False)
        self.conv2 = nn.Conv2d(n_inner_channels, n_channels, kernel_size, padding=kernel_size // 2, bias=False)
        self.norm1 = nn.GroupNorm(num_groups, n_inner_channels)
        self.norm2 = nn.GroupNorm(num_groups, n_channels)
        self.norm3 = nn.GroupNorm(num_groups, n_channels)
        self.conv1.weight.data.normal_(0, 0.01)
        self.conv2.weight.data.normal_(0, 0.01)

    def forward(self, z, x):
        y = self.norm1(F.relu(self.conv1(z)))
        return self.norm3(F.relu(z + self.norm2(x + self.conv2(y))))


def anderson(f, x0, m=5, lam=1e-4, max_iter=50, tol=1e-2, beta=1.0):
    bsz, d, H, W = x0.shape
    X = torch.zeros(bsz, m, d * H * W, dtype=x0.dtype, device=x0.device)
    Fv = torch.zeros(bsz, m, d * H * W, dtype=x0.dtype, device=x0.device)
    X[:, 0], Fv[:, 0] = x0.reshape(bsz, -1), f(x0).reshape(bsz, -1)
    X[:, 1], Fv[:, 1] = Fv[:, 0], f(Fv[:, 0].reshape(x0.shape)).reshape(bsz, -1)
    H_ = torch.zeros(bsz, m + 1, m + 1, dtype=x0.dtype, device=x0.device)
    H_[:, 0, 1:] = H_[:, 1:, 0] = 1
    y = torch.zeros(bsz, m + 1, 1, dtype=x0.dtype, device=x0.device)
    y[:, 0] = 1
    res = []
    for k in range(2, max_iter):
        n = min(k, m)
        G = Fv[:, :n] - X[:, :n]
        H_[:, 1 : n + 1, 1 : n + 1] = torch.bmm(G, G.transpose(1, 2)) + lam * torch.eye(n)[None]
        alpha = torch.linalg.solve(H_[:, : n + 1, : n + 1], y[:, : n + 1])[:, 1 : n + 1, 0]
        X[:, k % m] = beta * (alpha[:, None] @ Fv[:, :n])[:, 0] + (1 - beta) * (alpha[:, None] @ X[:, :n])[:, 0]
        Fv[:, k % m] = f(X[:, k % m].reshape(x0.shape)).reshape(bsz, -1)
        res.append((Fv[:, k % m] - X[:, k % m]).norm().item() / (1e-5 + Fv[:, k % m].norm().item()))
        if res[-1] < tol:
            break
    return X[:, k % m].view(x0.shape), res


class DEQFixedPoint(nn.Module):
    def __init__(self, f, solver, **kwargs):
        super().__init__()
        self.f, self.solver, self.kwargs = f, solver, kwargs

    def forward(self, x):
        with torch.no_grad():
            z, self.forward_res = self.solver(lambda z: self.f(z, x), torch.zeros_like(x), **self.kwargs)
        z = self.f(z, x)
        z0 = z.clone().detach().requires_grad_()
        f0 = self.f(z0, x)

        def backward_hook(grad):
            g, self.backward_res = self.solver(lambda y: autograd.grad(f0, z0, y, retain_graph=True)[0] + grad, grad, **self.kwargs)
            return g

        if z.requires_grad:
            z.register_hook(backward_hook)
        return z


def epoch_(loader, model, opt=None, lr_scheduler=None, session=None):
    total_loss, total_err, n = 0.0, 0.0, 0
    model.eval() if opt is None else model.train()
    for X, y in loader:
#-        yp = model(X)
#-        loss = nn.CrossEntropyLoss()(yp, y)
        if opt:
            opt.zero_grad()
#-            loss.backward()
            loss = session.backward(supervised(model, nn.CrossEntropyLoss(), err=lambda yp, y: (yp.max(dim=1)[1] != y).float().mean()), X, y)  #+
            opt.step()
            lr_scheduler.step()
#-        total_err += (yp.max(dim=1)[1] != y).sum().item()
            total_err += loss["err"] * X.shape[0]  #+
        total_loss += loss.item() * X.shape[0]
        n += X.shape[0]
    return total_err / n, total_loss / n


torch.manual_seed(0)
chan = 8
model = nn.Sequential(nn.Conv2d(1, chan, kernel_size=3, bias=True, padding=1), nn.BatchNorm2d(chan), DEQFixedPoint(ResNetLayer(chan, 12), anderson, tol=1e-2, max_iter=12, m=5), nn.BatchNorm2d(chan), nn.AvgPool2d(4, 4), nn.Flatten(), nn.Linear(chan * 4, 10))
train_loader = DataLoader(TensorDataset(torch.rand(64, 1, 8, 8), torch.arange(64) % 10), batch_size=16, shuffle=True)
opt = optim.Adam(model.parameters(), lr=1e-3)
max_epochs = 5
scheduler = optim.lr_scheduler.CosineAnnealingLR(opt, max_epochs * len(train_loader), eta_min=1e-6)
#-for i in range(max_epochs):
#-    print(epoch_(train_loader, model, opt, scheduler))
session = Session(model, opt, scheduler, microbatches=4)  #+
train_loader = session.data(train_loader)  #+
for i in session.epochs(max_epochs):  #+
    print(epoch_(train_loader, model, opt, scheduler, session))  #+
