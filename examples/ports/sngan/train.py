"""A GAN with spectral normalization, in the manner of christiancosgrove/pytorch-spectral-normalization-gan."""

import argparse

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.nn.utils import spectral_norm
from torch.optim.lr_scheduler import ExponentialLR
#+
from orchestrator import Session  #+

parser = argparse.ArgumentParser()
parser.add_argument("--batch_size", type=int, default=16)
parser.add_argument("--lr", type=float, default=2e-3)
parser.add_argument("--loss", type=str, default="hinge")
parser.add_argument("--epochs", type=int, default=3)
args = parser.parse_args()

torch.manual_seed(0)
g = torch.Generator().manual_seed(1)
images = torch.tanh(2 * torch.eye(8) + 0.3 * torch.randn(192, 1, 8, 8, generator=g))
labels = torch.zeros(192, dtype=torch.long)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images, labels), batch_size=args.batch_size, shuffle=True)

Z_dim = 8
# number of updates to discriminator for every update to generator
disc_iters = 3


class Generator(nn.Module):
    def __init__(self, z_dim):
        super(Generator, self).__init__()
        self.z_dim = z_dim
        self.model = nn.Sequential(
            nn.ConvTranspose2d(z_dim, 16, 4, stride=1), nn.BatchNorm2d(16), nn.ReLU(), nn.ConvTranspose2d(16, 1, 4, stride=2, padding=1), nn.Tanh()
        )

    def forward(self, z):
        return self.model(z.view(-1, self.z_dim, 1, 1))


class Discriminator(nn.Module):
    def __init__(self):
        super(Discriminator, self).__init__()
        self.conv1 = spectral_norm(nn.Conv2d(1, 8, 3, stride=1, padding=(1, 1)))
        self.conv2 = spectral_norm(nn.Conv2d(8, 8, 4, stride=2, padding=(1, 1)))
        self.fc = spectral_norm(nn.Linear(4 * 4 * 8, 1))

    def forward(self, x):
        m = x
        m = nn.LeakyReLU(0.1)(self.conv1(m))
        m = nn.LeakyReLU(0.1)(self.conv2(m))
        return self.fc(m.view(-1, 4 * 4 * 8))


discriminator = Discriminator()
generator = Generator(Z_dim)
# because the spectral normalization module creates parameters that don't require gradients (u and v), we don't want
# to optimize these using sgd. We only let the optimizer operate on parameters that _do_ require gradients
optim_disc = optim.Adam(filter(lambda p: p.requires_grad, discriminator.parameters()), lr=args.lr, betas=(0.0, 0.9))
optim_gen = optim.Adam(generator.parameters(), lr=args.lr, betas=(0.0, 0.9))
# use an exponentially decaying learning rate
scheduler_d = optim.lr_scheduler.ExponentialLR(optim_disc, gamma=0.99)
scheduler_g = optim.lr_scheduler.ExponentialLR(optim_gen, gamma=0.99)

session = Session(discriminator, generator, optim_disc, optim_gen, scheduler_d, scheduler_g, microbatches=4)  #+
loader = session.data(loader)  #+
#+

def train(epoch):
    for batch_idx, (data, target) in enumerate(loader):
        if data.size()[0] != args.batch_size:
            continue
        # update discriminator
        for _ in range(disc_iters):
            z = torch.randn(args.batch_size, Z_dim)
            optim_disc.zero_grad()
            optim_gen.zero_grad()
#-            disc_loss = nn.ReLU()(1.0 - discriminator(data)).mean() + nn.ReLU()(1.0 + discriminator(generator(z))).mean()
#-            disc_loss.backward()
            disc_loss = session.backward(lambda x, z: nn.ReLU()(1.0 - discriminator(x)).mean() + nn.ReLU()(1.0 + discriminator(generator(z))).mean(), data, z)  #+
            optim_disc.step()
        z = torch.randn(args.batch_size, Z_dim)
        # update generator
        optim_disc.zero_grad()
        optim_gen.zero_grad()
#-        gen_loss = -discriminator(generator(z)).mean()
#-        gen_loss.backward()
        gen_loss = session.backward(lambda z: -discriminator(generator(z)).mean(), z)  #+
        optim_gen.step()
        if batch_idx % 6 == 0:
            print("disc loss", disc_loss.item(), "gen loss", gen_loss.item())
    scheduler_d.step()
    scheduler_g.step()


fixed_z = torch.randn(args.batch_size, Z_dim)


def evaluate(epoch):
    samples = generator(fixed_z).cpu().data.numpy()[:64]
    np.save("{}.npy".format(str(epoch).zfill(3)), samples)


#-for epoch in range(args.epochs):
for epoch in session.epochs(args.epochs):  #+
    train(epoch)
    evaluate(epoch)
