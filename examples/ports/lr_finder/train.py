"""Find a learning rate by a range test, then train, in the manner of davidtvs/pytorch-lr-finder."""

import copy

import torch
import torch.nn as nn
import torch.optim as optim
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, TensorDataset
#+
from orchestrator import Session  #+


class ExponentialLR(LRScheduler):
    def __init__(self, optimizer, end_lr, num_iter, last_epoch=-1):
        self.end_lr = end_lr
        self.num_iter = num_iter
        super(ExponentialLR, self).__init__(optimizer, last_epoch)

    def get_lr(self):
        r = self.last_epoch / (self.num_iter - 1)
        return [base_lr * (self.end_lr / base_lr) ** r for base_lr in self.base_lrs]


class TrainDataLoaderIter:
    def __init__(self, data_loader):
        self.data_loader = data_loader
        self._iterator = iter(data_loader)

    def __next__(self):
        try:
            return next(self._iterator)
        except StopIteration:
            self._iterator = iter(self.data_loader)
            return next(self._iterator)


class LRFinder(object):
    def __init__(self, model, optimizer, criterion):
        self.model, self.optimizer, self.criterion = model, optimizer, criterion
        self.history = {"lr": [], "loss": []}
        self.best_loss = None
        self.model_state = copy.deepcopy(self.model.state_dict())
        self.optimizer_state = copy.deepcopy(self.optimizer.state_dict())

    def reset(self):
        self.model.load_state_dict(self.model_state)
        self.optimizer.load_state_dict(self.optimizer_state)

    def range_test(self, train_loader, end_lr=10, num_iter=30, smooth_f=0.05, diverge_th=5):
        lr_schedule = ExponentialLR(self.optimizer, end_lr, num_iter)
        train_iter = TrainDataLoaderIter(train_loader)
        for iteration in range(num_iter):
            loss = self._train_batch(train_iter)
            self.history["lr"].append(lr_schedule.get_last_lr()[0])
            lr_schedule.step()
            if iteration == 0:
                self.best_loss = loss
            else:
                loss = smooth_f * loss + (1 - smooth_f) * self.history["loss"][-1]
                if loss < self.best_loss:
                    self.best_loss = loss
            self.history["loss"].append(loss)
            if loss > diverge_th * self.best_loss:
                print("Stopping early, the loss has diverged")
                break

    def _train_batch(self, train_iter):
        self.model.train()
        self.optimizer.zero_grad()
        inputs, labels = next(train_iter)
        loss = self.criterion(self.model(inputs), labels)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def suggestion(self):
        losses = torch.tensor(self.history["loss"])
        steepest = int((losses[1:] - losses[:-1]).argmin())
        return self.history["lr"][steepest]


torch.manual_seed(0)
x = torch.randn(256, 8)
y = (x[:, 0] * x[:, 1] > 0).long()
trainloader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
criterion = nn.CrossEntropyLoss()
optimizer = optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, weight_decay=5e-4)

lr_finder = LRFinder(model, optimizer, criterion)
lr_finder.range_test(trainloader, end_lr=1, num_iter=30)
print("suggested", lr_finder.suggestion())
lr_finder.reset()
#-for group in optimizer.param_groups:
#-    group["lr"] = lr_finder.suggestion()
optimizer = optim.SGD(model.parameters(), lr=lr_finder.suggestion(), momentum=0.9, weight_decay=5e-4)  #+

#-for epoch in range(2):
session = Session(model, optimizer, microbatches=4)  #+
trainloader = session.data(trainloader)  #+
for epoch in session.epochs(2):  #+
    running_loss = 0.0
    for inputs, labels in trainloader:
        optimizer.zero_grad()
#-        loss = criterion(model(inputs), labels)
#-        loss.backward()
        loss = session.backward(lambda x, y: criterion(model(x), y), inputs, labels)  #+
        optimizer.step()
        running_loss += loss.item()
    print(epoch, running_loss / len(trainloader))
