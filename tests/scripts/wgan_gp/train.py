"""A Wasserstein GAN with gradient penalty; the generator learns in every n-th batch."""

import argparse

import torch
from torch import autograd, nn
from torch.utils.data import DataLoader, TensorDataset
#+
from orchestrator import Session  #+

parser = argparse.ArgumentParser()
parser.add_argument("--n_epochs", type=int, default=3)
parser.add_argument("--batch_size", type=int, default=32)
parser.add_argument("--n_critic", type=int, default=3)
parser.add_argument("--lambda_gp", type=float, default=10.0)
opt = parser.parse_args()
torch.manual_seed(0)
latent_dim = 4

generator = nn.Sequential(nn.Linear(latent_dim, 32), nn.ReLU(), nn.Linear(32, 2))
discriminator = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
corners = torch.randint(4, (256,), generator=torch.Generator().manual_seed(1))
points = torch.stack([corners % 2, corners // 2], 1) * 2.0 - 1.0
#-dataloader = DataLoader(TensorDataset(points), batch_size=opt.batch_size, shuffle=True)
optimizer_G = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
optimizer_D = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.9))


def compute_gradient_penalty(D, real_samples, fake_samples):
    alpha = torch.rand(real_samples.size(0), 1)
    interpolates = (alpha * real_samples + (1 - alpha) * fake_samples).requires_grad_(True)
    d_interpolates = D(interpolates)
    gradients = autograd.grad(
        outputs=d_interpolates,
        inputs=interpolates,
        grad_outputs=torch.ones_like(d_interpolates),
        create_graph=True,
    )[0]
    return ((gradients.norm(2, dim=1) - 1) ** 2).mean()


def critic_loss(batch):
    (real,) = batch
    fake = generator(torch.randn(len(real), latent_dim)).detach()
    gradient_penalty = compute_gradient_penalty(discriminator, real, fake)
    wasserstein = discriminator(fake).mean() - discriminator(real).mean()
    return wasserstein + opt.lambda_gp * gradient_penalty


def generator_loss(batch):
    (real,) = batch
    return -discriminator(generator(torch.randn(len(real), latent_dim))).mean()


#-batches_done = 0
#-for epoch in range(opt.n_epochs):
session = Session(generator, discriminator, optimizer_G, optimizer_D)  #+
dataloader = session.data(TensorDataset(points), batch_size=opt.batch_size, microbatches=4, shuffle=True)  #+
for epoch in session.epochs(opt.n_epochs):  #+
    for i, batch in enumerate(dataloader):
        optimizer_D.zero_grad()
#-        d_loss = critic_loss(batch)
#-        d_loss.backward()
        d_loss = session.backward(critic_loss, batch).loss  #+
        optimizer_D.step()
#-        if i % opt.n_critic == 0:
        if session.step % len(dataloader) % opt.n_critic == 0:  #+
            optimizer_G.zero_grad()
#-            g_loss = generator_loss(batch)
#-            g_loss.backward()
            g_loss = session.backward(generator_loss, batch).loss  #+
            optimizer_G.step()
#-            batches_done += opt.n_critic
    print(f"[Epoch {epoch}/{opt.n_epochs}] [D loss: {d_loss:.4f}] [G loss: {g_loss:.4f}]")
