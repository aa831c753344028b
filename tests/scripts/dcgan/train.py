"""A convolutional GAN: two networks, two optimizers, three backward calls per batch."""

import argparse

import torch
from torch import nn
#-from torch.utils.data import DataLoader
#+
from orchestrator import Session  #+

parser = argparse.ArgumentParser()
parser.add_argument("--batchSize", type=int, default=32)
parser.add_argument("--nz", type=int, default=8)
parser.add_argument("--niter", type=int, default=3)
parser.add_argument("--lr", type=float, default=2e-4)
opt = parser.parse_args()
torch.manual_seed(999)

angles = torch.randn(256, 1, 16, 1, generator=torch.Generator().manual_seed(1))
dataset = torch.sin(angles.cumsum(2) + torch.linspace(0, 3, 16))
#-dataloader = DataLoader(dataset, batch_size=opt.batchSize, shuffle=True)


def weights_init(m):
    if "Conv" in type(m).__name__:
        nn.init.normal_(m.weight, 0.0, 0.02)
    elif "BatchNorm" in type(m).__name__:
        nn.init.normal_(m.weight, 1.0, 0.02)
        nn.init.zeros_(m.bias)


netG = nn.Sequential(
    nn.ConvTranspose2d(opt.nz, 16, 4, 1, 0, bias=False),
    nn.BatchNorm2d(16),
    nn.ReLU(True),
    nn.ConvTranspose2d(16, 8, 4, 2, 1, bias=False),
    nn.BatchNorm2d(8),
    nn.ReLU(True),
    nn.ConvTranspose2d(8, 1, 4, 2, 1, bias=False),
    nn.Tanh(),
)
netD = nn.Sequential(
    nn.Conv2d(1, 8, 4, 2, 1, bias=False),
    nn.LeakyReLU(0.2, inplace=True),
    nn.Conv2d(8, 16, 4, 2, 1, bias=False),
    nn.BatchNorm2d(16),
    nn.LeakyReLU(0.2, inplace=True),
    nn.Conv2d(16, 1, 4, 1, 0, bias=False),
    nn.Flatten(0),
)
netG.apply(weights_init)
netD.apply(weights_init)
criterion = nn.BCEWithLogitsLoss()
optimizerD = torch.optim.Adam(netD.parameters(), lr=opt.lr, betas=(0.5, 0.999))
optimizerG = torch.optim.Adam(netG.parameters(), lr=opt.lr, betas=(0.5, 0.999))


def loss_real(real):
    return criterion(netD(real), torch.ones(len(real)))


def loss_fake(real):
    fake = netG(torch.randn(len(real), opt.nz, 1, 1))
    return criterion(netD(fake.detach()), torch.zeros(len(real)))


def loss_generator(real):
    fake = netG(torch.randn(len(real), opt.nz, 1, 1))
    return criterion(netD(fake), torch.ones(len(real)))


#-for epoch in range(opt.niter):
session = Session(netG, netD, optimizerD, optimizerG)  #+
dataloader = session.data(dataset, batch_size=opt.batchSize, microbatches=4, shuffle=True)  #+
for epoch in session.epochs(opt.niter):  #+
    for i, data in enumerate(dataloader):
        # (1) Update D: maximize log(D(x)) + log(1 - D(G(z)))
        netD.zero_grad()
#-        errD_real = loss_real(data)
#-        errD_real.backward()
#-        errD_fake = loss_fake(data)
#-        errD_fake.backward()
        errD_real = session.backward(loss_real, data).loss  #+
        errD_fake = session.backward(loss_fake, data).loss  #+
        optimizerD.step()
        # (2) Update G: maximize log(D(G(z)))
        netG.zero_grad()
#-        errG = loss_generator(data)
#-        errG.backward()
        errG = session.backward(loss_generator, data).loss  #+
        optimizerG.step()
#-    torch.save(netG.state_dict(), f"netG_epoch_{epoch}.pth")
    session.save(f"netG_epoch_{epoch}.pth", netG.state_dict())  #+
    print(f"[{epoch}/{opt.niter}] Loss_D: {errD_real + errD_fake:.4f} Loss_G: {errG:.4f}")
