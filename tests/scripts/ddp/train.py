"""Distributed data parallel training, as torchrun starts it: one process per GPU."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from orchestrator import Session


class MyTrainDataset(Dataset):
    def __init__(self, size):
        self.data = torch.randn(size, 20, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return self.data[index], self.data[index].sin().sum()[None]


class Trainer:
    def __init__(self, model, train_set, optimizer, batch_size, save_every):
        self.rank, self.session = 0, Session(model, optimizer)
        self.train_data = self.session.data(train_set, batch_size=batch_size, microbatches=4, shuffle=False)
        self.optimizer = optimizer
        self.save_every = save_every
        self.model = model

    def _run_epoch(self, epoch):
        for batch in self.train_data:
            self.optimizer.zero_grad()
            loss = self.session.backward(lambda b: F.mse_loss(self.model(b[0]), b[1]), batch).loss
            self.optimizer.step()
        print(f"Epoch {epoch} | Steps: {len(self.train_data)} | Loss {loss:.4f}")

    def _save_checkpoint(self, epoch):
        self.session.save("checkpoint.pt")
        print(f"Epoch {epoch} | Training checkpoint saved")

    def train(self, max_epochs):
        for epoch in self.session.epochs(max_epochs):
            self._run_epoch(epoch)
            if self.rank == 0 and epoch % self.save_every == 0:
                self._save_checkpoint(epoch)


def main():
    parser = argparse.ArgumentParser(description="simple distributed training job")
    parser.add_argument("--total_epochs", type=int, default=3)
    parser.add_argument("--save_every", type=int, default=1)
    parser.add_argument("--batch_size", default=32, type=int)
    args = parser.parse_args()
    torch.manual_seed(0)
    dataset = MyTrainDataset(256)
    model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    trainer = Trainer(model, dataset, optimizer, args.batch_size, args.save_every)
    trainer.train(args.total_epochs)


if __name__ == "__main__":
    main()
