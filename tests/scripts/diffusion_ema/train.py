"""Diffusion of points in the plane, and samples of a moving average of the model."""

import argparse
import copy

import torch
from torch import nn
from torch.nn import functional as F
#-from torch.utils.data import DataLoader
#+
from orchestrator import Session  #+


class EMA:
    def __init__(self, beta):
        self.beta = beta
        self.step = 0

    def step_ema(self, ema_model, model, step_start_ema=6):
        if self.step < step_start_ema:
            ema_model.load_state_dict(model.state_dict())
        else:
            for old, new in zip(ema_model.parameters(), model.parameters()):
                old.data = old.data * self.beta + (1 - self.beta) * new.data
        self.step += 1


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 48), nn.SiLU(), nn.Linear(48, 48), nn.SiLU(), nn.Linear(48, 2))

    def forward(self, x, t):
        return self.net(torch.cat([x, t[:, None] / 50], 1))


class Diffusion:
    def __init__(self, noise_steps=50):
        self.noise_steps = noise_steps
        self.beta = torch.linspace(1e-4, 0.05, noise_steps)
        self.alpha = 1.0 - self.beta
        self.alpha_hat = torch.cumprod(self.alpha, dim=0)

    def noise_images(self, x, t):
        a = self.alpha_hat[t][:, None]
        noise = torch.randn_like(x)
        return a.sqrt() * x + (1 - a).sqrt() * noise, noise

    def sample_timesteps(self, n):
        return torch.randint(1, self.noise_steps, (n,))

    def training_loss(self, model, images):
        t = self.sample_timesteps(images.shape[0])
        x_t, noise = self.noise_images(images, t)
        return F.mse_loss(noise, model(x_t, t))

    def sample(self, model, n):
        model.eval()
        with torch.no_grad():
            x = torch.randn(n, 2)
            for i in reversed(range(1, self.noise_steps)):
                predicted = model(x, torch.full((n,), i))
                a, a_hat, b = self.alpha[i], self.alpha_hat[i], self.beta[i]
                x = (x - (1 - a) / (1 - a_hat).sqrt() * predicted) / a.sqrt()
                if i > 1:
                    x = x + b.sqrt() * torch.randn_like(x)
        model.train()
        return x


parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch_size", type=int, default=32)
args = parser.parse_args()
torch.manual_seed(42)
angles = torch.rand(256, generator=torch.Generator().manual_seed(1)) * 6.283
dataset = torch.stack([angles.cos(), angles.sin()], 1)

#-dataloader = DataLoader(dataset, batch_size=args.batch_size, shuffle=True)
model = Denoiser()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
diffusion = Diffusion()
ema = EMA(0.9)
ema_model = copy.deepcopy(model).eval().requires_grad_(False)
session = Session(model, ema_model, optimizer, ema)  #+
dataloader = session.data(dataset, batch_size=args.batch_size, microbatches=4, shuffle=True)  #+

#-for epoch in range(args.epochs):
for epoch in session.epochs(args.epochs):  #+
    model.train()
    for images in dataloader:
#-        loss = diffusion.training_loss(model, images)
        optimizer.zero_grad()
#-        loss.backward()
        loss = session.backward(lambda x: diffusion.training_loss(model, x), images).loss  #+
        optimizer.step()
        ema.step_ema(ema_model, model)
    sampled = diffusion.sample(ema_model, 16)
    print(f"epoch {epoch} MSE {loss:.4f} radius {sampled.norm(dim=1).mean():.3f}")
#-    torch.save(sampled, "sampled.pt")
    session.save("sampled.pt", sampled)  #+
