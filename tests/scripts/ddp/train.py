"""Distributed data parallel training, as torchrun starts it: one process per GPU."""

import argparse
#-import os

import torch
#-import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
#-from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
#-from torch.utils.data.distributed import DistributedSampler
#+
from orchestrator import Session  #+


class MyTrainDataset(Dataset):
    def __init__(self, size):
        self.data = torch.randn(size, 20, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return self.data[index], self.data[index].sin().sum()[None]


#-def ddp_setup():
#-    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
#-    os.environ.setdefault("MASTER_PORT", "0")
#-    dist.init_process_group("gloo", rank=int(os.environ.get("RANK", 0)), world_size=int(os.environ.get("WORLD_SIZE", 1)))
#-
#-
class Trainer:
    def __init__(self, model, train_set, optimizer, batch_size, save_every):
#-        self.rank = dist.get_rank()
#-        sampler = DistributedSampler(train_set, shuffle=False)
#-        self.train_data = DataLoader(train_set, batch_size=batch_size, sampler=sampler)
        self.rank, self.session = 0, Session(model, optimizer)  #+
        self.train_data = self.session.data(train_set, batch_size=batch_size, microbatches=4, shuffle=False)  #+
        self.optimizer = optimizer
        self.save_every = save_every
#-        self.model = DDP(model)
        self.model = model  #+

    def _run_epoch(self, epoch):
#-        self.train_data.sampler.set_epoch(epoch)
#-        for source, targets in self.train_data:
        for batch in self.train_data:  #+
            self.optimizer.zero_grad()
#-            output = self.model(source)
#-            loss = F.mse_loss(output, targets)
#-            loss.backward()
            loss = self.session.backward(lambda b: F.mse_loss(self.model(b[0]), b[1]), batch).loss  #+
            self.optimizer.step()
        print(f"Epoch {epoch} | Steps: {len(self.train_data)} | Loss {loss:.4f}")

    def _save_checkpoint(self, epoch):
#-        torch.save(self.model.module.state_dict(), "checkpoint.pt")
        self.session.save("checkpoint.pt")  #+
        print(f"Epoch {epoch} | Training checkpoint saved")

    def train(self, max_epochs):
#-        for epoch in range(max_epochs):
        for epoch in self.session.epochs(max_epochs):  #+
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
#-    ddp_setup()
    dataset = MyTrainDataset(256)
    model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    trainer = Trainer(model, dataset, optimizer, args.batch_size, args.save_every)
    trainer.train(args.total_epochs)
#-    dist.destroy_process_group()


if __name__ == "__main__":
    main()
