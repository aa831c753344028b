"""A convolutional VAE with a KL weight that is warmed up, and reconstruction by binary entropy."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
#+
from orchestrator import Session  #+


class VAE(nn.Module):
    def __init__(self, z=4):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(1, 8, 4, 2, 1), nn.ReLU(), nn.Flatten())
        self.mu, self.logvar = nn.Linear(128, z), nn.Linear(128, z)
        self.decoder_input = nn.Linear(z, 128)
        self.decoder = nn.ConvTranspose2d(8, 1, 4, 2, 1)

    def reparameterize(self, mu, logvar):
        return mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)

    def forward(self, x):
        h = self.encoder(x)
        mu, logvar = self.mu(h), self.logvar(h)
        z = self.reparameterize(mu, logvar)
        return self.decoder(F.relu(self.decoder_input(z)).view(-1, 8, 4, 4)), x, mu, logvar


def loss_function(recons, x, mu, logvar, kld_weight):
    recons_loss = F.binary_cross_entropy_with_logits(recons, x)
    kld = torch.mean(-0.5 * torch.sum(1 + logvar - mu**2 - logvar.exp(), dim=1))
    return {"loss": recons_loss + kld_weight * kld, "Reconstruction_Loss": recons_loss.detach(), "KLD": -kld.detach()}


def main():
    torch.manual_seed(1265)
    g = torch.Generator().manual_seed(0)
    data = (torch.rand(160, 1, 8, 8, generator=g) < torch.rand(160, 1, 8, 1, generator=g)).float()
#-    loader = DataLoader(data, batch_size=20, shuffle=True)
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.95)
#-    num_iter = 0
#-    for epoch in range(3):
    session = Session(model, optimizer, scheduler)  #+
    loader = session.data(DataLoader(data, batch_size=20, shuffle=True), microbatches=4)  #+
    for epoch in session.epochs(3):  #+
        model.train()
        for x in loader:
#-            num_iter += 1
#-            kld_weight = min(1.0, num_iter / 20) * 0.01
#-            optimizer.zero_grad()
#-            results = model(x)
#-            losses = loss_function(*results, kld_weight)
#-            losses["loss"].backward()
            kld_weight = min(1.0, (session.step + 1) / 20) * 0.01  #+
            losses = session.backward(lambda x: loss_function(*model(x), kld_weight), x)  #+
            optimizer.step()
        scheduler.step()
#-        print(epoch, {name: round(float(value), 4) for name, value in losses.items()})
        print(epoch, {name: round(float(value), 4) for name, value in losses.metrics.items()})  #+


if __name__ == "__main__":
    main()
