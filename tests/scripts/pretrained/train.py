"""Pretrain an autoencoder, then train a classifier on its encoder."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
#+
from orchestrator import Session  #+

torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 8))
        self.decoder = nn.Linear(8, 16)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.encoder(x))


x = torch.randn(96, 16)
y = (x[:, :3] + 0.1 * torch.randn(96, 3)).argmax(1)
unlabelled = DataLoader(TensorDataset(x), batch_size=32, shuffle=True)
labelled = DataLoader(TensorDataset(x[:64], y[:64]), batch_size=16, shuffle=True)

net = Net()
pre_opt = torch.optim.Adam([*net.encoder.parameters(), *net.decoder.parameters()], lr=1e-3)
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

#-for epoch in range(1):
steps = len(unlabelled) + 3 * len(labelled)  #+
session = Session(net, pre_opt, optimizer, scheduler, microbatches=4, steps=steps)  #+
unlabelled, labelled = session.data(unlabelled), session.data(labelled)  #+
for epoch in session.epochs(1, unlabelled):  #+
    for (images,) in unlabelled:
        pre_opt.zero_grad()
#-        loss = F.mse_loss(net.decoder(net.encoder(images)), images)
#-        loss.backward()
        loss = session.backward(lambda x: F.mse_loss(net.decoder(net.encoder(x)), x), images)  #+
        pre_opt.step()
    print(f"pretrain {epoch}: {loss.item():.4f}")

for p in net.decoder.parameters():
    p.requires_grad = False
nn.init.normal_(net.head.weight, std=0.2)

#-for epoch in range(3):
for epoch in session.epochs(3, labelled):  #+
    for images, labels in labelled:
        optimizer.zero_grad()
#-        loss = F.cross_entropy(net(images), labels)
#-        loss.backward()
        loss = session.backward(lambda x, y: F.cross_entropy(net(x), y), images, labels)  #+
        optimizer.step()
    scheduler.step()
    print(f"finetune {epoch}: {loss.item():.4f}")
