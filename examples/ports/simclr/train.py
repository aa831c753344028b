"""Contrastive learning of representations, in the manner of sthalles/SimCLR's simclr.py."""

import logging

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset
#+
from orchestrator import Session  #+


class ContrastiveLearningDataset(Dataset):
    def __init__(self, n_views=2):
        self.signals = torch.randn(192, 24, generator=torch.Generator().manual_seed(1)).cumsum(1)
        self.n_views = n_views

    def __len__(self):
        return len(self.signals)

    def __getitem__(self, i):
        return [self.signals[i].roll(int(torch.randint(4, ()))) + 0.1 * torch.randn(24) for _ in range(self.n_views)], 0


class args:
    batch_size, n_views, temperature, lr, weight_decay, epochs, fp16_precision, log_every_n_steps, device = 16, 2, 0.07, 0.003, 1e-4, 3, True, 4, "cpu"


class SimCLR(object):
    def __init__(self, model, optimizer, scheduler):
        self.args = args
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self.criterion = torch.nn.CrossEntropyLoss()

    def info_nce_loss(self, features):
        half = len(features) // self.args.n_views
        labels = torch.cat([torch.arange(half) for i in range(self.args.n_views)], dim=0)
        labels = (labels.unsqueeze(0) == labels.unsqueeze(1)).float()
        features = F.normalize(features, dim=1)
        similarity_matrix = torch.matmul(features, features.T)
        # discard the main diagonal from both: labels and similarities matrix
        mask = torch.eye(labels.shape[0], dtype=torch.bool)
        labels = labels[~mask].view(labels.shape[0], -1)
        similarity_matrix = similarity_matrix[~mask].view(similarity_matrix.shape[0], -1)
        # select and combine multiple positives, and only the negatives
        positives = similarity_matrix[labels.bool()].view(labels.shape[0], -1)
        negatives = similarity_matrix[~labels.bool()].view(similarity_matrix.shape[0], -1)
        logits = torch.cat([positives, negatives], dim=1)
        labels = torch.zeros(logits.shape[0], dtype=torch.long)
        logits = logits / self.args.temperature
        return logits, labels

    def train(self, train_loader):
        scaler = torch.amp.GradScaler("cpu", enabled=self.args.fp16_precision)
        session = Session(self.model, self.optimizer, self.scheduler, scaler, microbatches=2)  #+
        train_loader = session.data(train_loader)  #+
        n_iter = 0
        logging.info(f"Start SimCLR training for {self.args.epochs} epochs.")
#-        for epoch_counter in range(self.args.epochs):
        for epoch_counter in session.epochs(self.args.epochs):  #+
            for images, _ in train_loader:
#-                images = torch.cat(images, dim=0)
#-                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.args.fp16_precision):
#-                    features = self.model(images)
#-                    logits, labels = self.info_nce_loss(features)
#-                    loss = self.criterion(logits, labels)
                autocast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.args.fp16_precision)  #+
                loss_of = autocast(lambda *images: self.criterion(*self.info_nce_loss(self.model(torch.cat(images, dim=0)))))  #+
                self.optimizer.zero_grad()
#-                scaler.scale(loss).backward()
                loss = session.backward(loss_of, *images)  #+
                scaler.step(self.optimizer)
                scaler.update()
                if n_iter % self.args.log_every_n_steps == 0:
                    print("loss", loss.item(), "learning_rate", self.scheduler.get_last_lr()[0])
                n_iter += 1
            # warmup for the first epoch
            if epoch_counter >= 1:
                self.scheduler.step()
            logging.debug(f"Epoch: {epoch_counter}\tLoss: {loss}")


torch.manual_seed(0)
train_loader = DataLoader(ContrastiveLearningDataset(), batch_size=args.batch_size, shuffle=True, drop_last=True)
model = nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 16))
optimizer = torch.optim.Adam(model.parameters(), args.lr, weight_decay=args.weight_decay)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=len(train_loader), eta_min=0, last_epoch=-1)
SimCLR(model, optimizer, scheduler).train(train_loader)
