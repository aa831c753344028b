"""A GAN whose two networks are parts of one module list, with three backward calls in a step."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
#+
from orchestrator import Session  #+

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--batch_size", type=int, default=32)
parser.add_argument("--latent", type=int, default=6)
parser.add_argument("--lr", type=float, default=2e-3)
args = parser.parse_args()
torch.manual_seed(7)

angles = torch.rand(256, generator=torch.Generator().manual_seed(1)) * 6.28
circle = TensorDataset(torch.stack([angles.cos(), angles.sin()], 1))

generator = nn.Sequential(
    nn.Linear(args.latent, 24),
    nn.BatchNorm1d(24),
    nn.ReLU(),
    nn.Linear(24, 24),
    nn.BatchNorm1d(24),
    nn.ReLU(),
    nn.Linear(24, 2),
)
discriminator = nn.Sequential(
    nn.Linear(2, 24),
    nn.LeakyReLU(0.2),
    nn.Linear(24, 24),
    nn.BatchNorm1d(24),
    nn.LeakyReLU(0.2),
    nn.Linear(24, 1),
)
nets = nn.ModuleList([generator, discriminator])
bce = nn.BCEWithLogitsLoss()
opt_g = torch.optim.Adam(nets[0].parameters(), lr=args.lr, betas=(0.5, 0.999))
opt_d = torch.optim.Adam(nets[1].parameters(), lr=args.lr, betas=(0.5, 0.999))
#-loader = DataLoader(circle, batch_size=args.batch_size, shuffle=True)
session = Session(nets, opt_g, opt_d)  #+
loader = session.data(DataLoader(circle, batch_size=args.batch_size, shuffle=True), microbatches=4)  #+


def noise(count):
    return torch.randn(count, args.latent)


def on_real(real):
    return bce(nets[1](real), torch.ones(len(real), 1))


def on_fake(fake):
    return bce(nets[1](fake.detach()), torch.zeros(len(fake), 1))


def on_generator(fake):
    return bce(nets[1](fake), torch.ones(len(fake), 1))


#-for epoch in range(args.epochs):
#-    for (real,) in loader:
for epoch in session.epochs(args.epochs):  #+
    for batch in loader:  #+
        opt_d.zero_grad()
#-        real_loss = on_real(real)
#-        real_loss.backward()
#-        fake_loss = on_fake(nets[0](noise(len(real))))
#-        fake_loss.backward()
        real_loss = session.backward(lambda b: on_real(b[0]), batch)  #+
        fake_loss = session.backward(lambda b: on_fake(nets[0](noise(len(b[0])))), batch)  #+
        opt_d.step()
        opt_g.zero_grad()
#-        g_loss = on_generator(nets[0](noise(len(real))))
#-        g_loss.backward()
        g_loss = session.backward(lambda b: on_generator(nets[0](noise(len(b[0])))), batch)  #+
        opt_g.step()
    samples = nets[0](noise(8)).detach()
    print(f"{epoch}: D {real_loss.item() + fake_loss.item():.4f}, G {g_loss.item():.4f}, radius {samples.norm(dim=1).mean():.3f}")
