"""A variational autoencoder that writes a picture of samples and reconstructions per epoch."""

import argparse
import os

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
#+
from orchestrator import Session  #+


class Blobs(Dataset):
    def __len__(self):
        return 256

    def __getitem__(self, i):
        x, y = i % 16, (i // 16) % 16
        grid = torch.arange(16.0)
        return torch.exp(-((grid - x)[None] ** 2 + (grid - y)[:, None] ** 2) / 8.0)


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(256, 64)
        self.fc21 = nn.Linear(64, 4)
        self.fc22 = nn.Linear(64, 4)
        self.fc3 = nn.Linear(4, 64)
        self.fc4 = nn.Linear(64, 256)

    def encode(self, x):
        h1 = F.relu(self.fc1(x))
        return self.fc21(h1), self.fc22(h1)

    def reparameterize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        return mu + torch.randn_like(std) * std

    def decode(self, z):
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

    def forward(self, x):
        mu, logvar = self.encode(x.view(-1, 256))
        return self.decode(self.reparameterize(mu, logvar)), mu, logvar


def loss_function(recon_x, mu, logvar, x):
    BCE = F.binary_cross_entropy(recon_x, x.view(-1, 256), reduction="sum")
    KLD = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    return (BCE + KLD) / len(x)


def save_image(pictures, path):
    rows = (pictures.clamp(0, 1) * 255).byte().view(-1, 16)
    with open(path, "wb") as file:
        file.write(b"P5 16 %d 255\n" % len(rows) + bytes(rows.flatten().tolist()))


parser = argparse.ArgumentParser(description="VAE")
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--results", default="results")
args = parser.parse_args()
torch.manual_seed(args.seed)

model = VAE()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
#-train_loader = DataLoader(Blobs(), batch_size=args.batch_size, shuffle=True)
#-os.makedirs(args.results, exist_ok=True)
session = Session(model, optimizer, seed=args.seed)  #+
train_loader = session.data(Blobs(), batch_size=args.batch_size, microbatches=4, shuffle=True)  #+
os.makedirs(session.output / args.results, exist_ok=True)  #+

#-for epoch in range(1, args.epochs + 1):
for epoch in session.epochs(args.epochs):  #+
    model.train()
    train_loss = 0
    for data in train_loader:
        optimizer.zero_grad()
#-        loss = loss_function(*model(data), data)
#-        loss.backward()
        loss = session.backward(lambda x: loss_function(*model(x), x), data).loss  #+
        train_loss += float(loss)
        optimizer.step()
    print(f"====> Epoch: {epoch} Average loss: {train_loss / len(train_loader):.4f}")
    model.eval()
    with torch.no_grad():
        samples = model.decode(torch.randn(4, 4))
#-        save_image(samples, f"{args.results}/sample_{epoch}.pgm")
        save_image(samples, session.output / f"{args.results}/sample_{epoch}.pgm")  #+
