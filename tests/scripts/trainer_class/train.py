"""A trainer that has all in its attributes, in the manner of victoresque/pytorch-template: monitor, early stop, checkpoints."""
from pathlib import Path
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
from orchestrator import Session  #+
torch.manual_seed(123)


class MetricTracker:
    def __init__(self):
        self.reset()

    def reset(self):
        self.total, self.n = 0.0, 0

    def update(self, value):
        self.total, self.n = self.total + value, self.n + 1


class Trainer:
    def __init__(self, model, optimizer, lr_scheduler, data_loader, save_dir="saved", early_stop=3):
        self.model, self.optimizer, self.lr_scheduler = model, optimizer, lr_scheduler
        self.criterion, self.metrics, self.save_dir = nn.NLLLoss(), MetricTracker(), Path(save_dir)
        self.best, self.not_improved, self.early_stop, self.log = float("inf"), 0, early_stop, []
        self.save_dir.mkdir(exist_ok=True)
#-        self.data_loader = data_loader
        self.session = Session(model, optimizer, lr_scheduler, self, microbatches=4)  #+
        self.data_loader = self.session.data(data_loader)  #+

    def train(self, epochs):
#-        for epoch in range(1, epochs + 1):
        for epoch in self.session.epochs(range(1, epochs + 1)):  #+
            self.metrics.reset()
            for data, target in self.data_loader:
                self.optimizer.zero_grad()
#-                loss = self.criterion(self.model(data), target)
#-                loss.backward()
                loss = self.session.backward(lambda x, y: self.criterion(self.model(x), y), data, target)  #+
                self.optimizer.step()
                self.metrics.update(loss.item())
            self.lr_scheduler.step()
            self.log.append(self.metrics.total / self.metrics.n)
            self.not_improved = 0 if self.log[-1] < self.best else self.not_improved + 1
            self.best = min(self.best, self.log[-1])
            if self.not_improved > self.early_stop:
                break
            torch.save(self.model.state_dict(), self.save_dir / f"checkpoint-epoch{epoch}.pth")


y = torch.arange(64) % 4
dataset = TensorDataset(torch.randn(64, 8) + 1.5 * F.one_hot(y, 8), y)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4), nn.LogSoftmax(1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, amsgrad=True)
trainer = Trainer(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9), DataLoader(dataset, 16, shuffle=True))
trainer.train(5)
model.load_state_dict(torch.load(sorted(trainer.save_dir.glob("*.pth"))[-1]))
print(trainer.best)
