"""Translate between two kinds of signals without pairs, in the manner of aitorzip/PyTorch-CycleGAN's train."""

import itertools
import random

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset
#+
from orchestrator import Session  #+


class ReplayBuffer:
    def __init__(self, max_size=50):
        self.max_size = max_size
        self.data = []

    def push_and_pop(self, data):
        to_return = []
        for element in data.data:
            element = torch.unsqueeze(element, 0)
            if len(self.data) < self.max_size:
                self.data.append(element)
                to_return.append(element)
            else:
                if random.uniform(0, 1) > 0.5:
                    i = random.randint(0, self.max_size - 1)
                    to_return.append(self.data[i].clone())
                    self.data[i] = element
                else:
                    to_return.append(element)
        return torch.cat(to_return)


class LambdaLR:
    def __init__(self, n_epochs, offset, decay_start_epoch):
        self.n_epochs = n_epochs
        self.offset = offset
        self.decay_start_epoch = decay_start_epoch

    def step(self, epoch):
        return 1.0 - max(0, epoch + self.offset - self.decay_start_epoch) / (self.n_epochs - self.decay_start_epoch)


class ImageDataset(Dataset):
    def __init__(self, n=96):
        t, g = torch.linspace(0, 6.28, 16), torch.Generator().manual_seed(1)
        self.A = torch.sin(t + torch.rand(n, 1, generator=g) * 6.28)
        self.B = torch.sign(torch.sin(2 * t + torch.rand(n, 1, generator=g) * 6.28))

    def __getitem__(self, index):
        return {"A": self.A[index], "B": self.B[random.randint(0, len(self.B) - 1)]}

    def __len__(self):
        return len(self.A)


class opt:
    epoch, n_epochs, batchSize, lr, decay_epoch = 0, 3, 8, 0.002, 1


torch.manual_seed(0)
random.seed(0)
Generator = lambda: nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 16), nn.Tanh())
Discriminator = lambda: nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
netG_A2B, netG_B2A, netD_A, netD_B = Generator(), Generator(), Discriminator(), Discriminator()
criterion_GAN = torch.nn.MSELoss()
criterion_cycle = torch.nn.L1Loss()
criterion_identity = torch.nn.L1Loss()
optimizer_G = torch.optim.Adam(itertools.chain(netG_A2B.parameters(), netG_B2A.parameters()), lr=opt.lr, betas=(0.5, 0.999))
optimizer_D_A = torch.optim.Adam(netD_A.parameters(), lr=opt.lr, betas=(0.5, 0.999))
optimizer_D_B = torch.optim.Adam(netD_B.parameters(), lr=opt.lr, betas=(0.5, 0.999))
lr_scheduler_G, lr_scheduler_D_A, lr_scheduler_D_B = (
    torch.optim.lr_scheduler.LambdaLR(optimizer, lr_lambda=LambdaLR(opt.n_epochs, opt.epoch, opt.decay_epoch).step)
    for optimizer in (optimizer_G, optimizer_D_A, optimizer_D_B)
)
fake_A_buffer = ReplayBuffer()
fake_B_buffer = ReplayBuffer()
dataloader = DataLoader(ImageDataset(), batch_size=opt.batchSize, shuffle=True)


def loss_G_of(real_A, real_B):
    target_real = torch.ones(len(real_A), 1)
    loss_identity = (criterion_identity(netG_A2B(real_B), real_B) + criterion_identity(netG_B2A(real_A), real_A)) * 5.0
    fake_B, fake_A = netG_A2B(real_A), netG_B2A(real_B)
    loss_GAN = criterion_GAN(netD_B(fake_B), target_real) + criterion_GAN(netD_A(fake_A), target_real)
    loss_cycle = (criterion_cycle(netG_B2A(fake_B), real_A) + criterion_cycle(netG_A2B(fake_A), real_B)) * 10.0
    return loss_identity + loss_GAN + loss_cycle


def loss_D_of(netD, real, fake):
    pred_real, pred_fake = netD(real), netD(fake.detach())
    return (criterion_GAN(pred_real, torch.ones_like(pred_real)) + criterion_GAN(pred_fake, torch.zeros_like(pred_fake))) * 0.5


session = Session(*(each for each in list(globals().values()) if hasattr(each, "state_dict") and not isinstance(each, type)), fake_A_buffer, fake_B_buffer, microbatches=4)  #+
dataloader = session.data(dataloader)  #+
###### Training ######
#-for epoch in range(opt.epoch, opt.n_epochs):
for epoch in session.epochs(opt.n_epochs):  #+
    for i, batch in enumerate(dataloader):
        real_A, real_B = batch["A"], batch["B"]
        ###### Generators A2B and B2A ######
        optimizer_G.zero_grad()
#-        loss_G = loss_G_of(real_A, real_B)
#-        loss_G.backward()
        loss_G = session.backward(loss_G_of, real_A, real_B)  #+
        optimizer_G.step()
        ###### Discriminator A ######
        optimizer_D_A.zero_grad()
        fake_A = fake_A_buffer.push_and_pop(netG_B2A(real_B))
#-        loss_D_A = loss_D_of(netD_A, real_A, fake_A)
#-        loss_D_A.backward()
        loss_D_A = session.backward(lambda real, fake: loss_D_of(netD_A, real, fake), real_A, fake_A)  #+
        optimizer_D_A.step()
        ###### Discriminator B ######
        optimizer_D_B.zero_grad()
        fake_B = fake_B_buffer.push_and_pop(netG_A2B(real_A))
#-        loss_D_B = loss_D_of(netD_B, real_B, fake_B)
#-        loss_D_B.backward()
        loss_D_B = session.backward(lambda real, fake: loss_D_of(netD_B, real, fake), real_B, fake_B)  #+
        optimizer_D_B.step()
#-    print({"loss_G": loss_G.item(), "loss_D": (loss_D_A + loss_D_B).item()})
    print({"loss_G": loss_G.item(), "loss_D": loss_D_A + loss_D_B})  #+
    # Update learning rates
    lr_scheduler_G.step()
    lr_scheduler_D_A.step()
    lr_scheduler_D_B.step()
    # Save models checkpoints
    torch.save(netG_A2B.state_dict(), "netG_A2B.pth")
