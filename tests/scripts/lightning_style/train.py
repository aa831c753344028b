"""A module with training_step and configure_optimizers, and a small trainer that runs it."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
#+
from orchestrator import Session  #+


class LightningModule(nn.Module):
    def log(self, name, value, prog_bar=False):
        self.logged[name] = float(torch.as_tensor(value).detach())


class LitAutoEncoder(LightningModule):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 20))

    def training_step(self, batch, batch_idx):
        (x,) = batch
        return F.mse_loss(self.decoder(self.encoder(x)), x)

    def validation_step(self, batch, batch_idx):
        (x,) = batch
        self.log("val_loss", F.mse_loss(self.decoder(self.encoder(x)), x))

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)


class Trainer:
    def __init__(self, max_epochs, gradient_clip_val=None, log_every_n_steps=4):
        self.max_epochs = max_epochs
        self.gradient_clip_val = gradient_clip_val
        self.log_every_n_steps = log_every_n_steps
        self.global_step = 0

    def fit(self, model, train_dataloader, val_dataloader):
        model.logged = {}
        self.optimizer, self.scheduler = model.configure_optimizers()
#-        for self.current_epoch in range(self.max_epochs):
        session = Session(model, self.optimizer, self.scheduler)  #+
        data = session.data(train_dataloader.dataset, batch_size=train_dataloader.batch_size, microbatches=4, shuffle=True)  #+
        for self.current_epoch in session.epochs(self.max_epochs):  #+
            model.train()
#-            for batch_idx, batch in enumerate(train_dataloader):
#-                loss = model.training_step(batch, batch_idx)
            for batch_idx, batch in enumerate(data):  #+
                self.optimizer.zero_grad()
#-                loss.backward()
                loss = session.backward(lambda b: model.training_step(b, batch_idx), batch).loss  #+
                if self.gradient_clip_val is not None:
#-                    nn.utils.clip_grad_norm_(model.parameters(), self.gradient_clip_val)
                    session.clip_grad_norm_(self.gradient_clip_val)  #+
                self.optimizer.step()
#-                self.global_step += 1
                self.global_step = session.step + 1  #+
                if self.global_step % self.log_every_n_steps == 0:
                    model.log("train_loss", loss)
            self.scheduler.step()
            model.eval()
            with torch.no_grad():
                for batch_idx, batch in enumerate(val_dataloader):
                    model.validation_step(batch, batch_idx)
            print(f"epoch {self.current_epoch} step {self.global_step} {model.logged}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--max_epochs", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=32)
    args = parser.parse_args()
    torch.manual_seed(0)
    data = torch.randn(320, 3) @ torch.randn(3, 20)
    train_set, val_set = TensorDataset(data[:256]), TensorDataset(data[256:])
    autoencoder = LitAutoEncoder()
    trainer = Trainer(max_epochs=args.max_epochs, gradient_clip_val=1.0)
    train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True)
    trainer.fit(autoencoder, train_loader, DataLoader(val_set, batch_size=64))


if __name__ == "__main__":
    main()
