"""A Siamese network with a contrastive loss on pairs, whose margin grows, and a plateau schedule."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
#+
from orchestrator import Session, Variables  #+


class Pairs(Dataset):
    def __init__(self, count, seed):
        g = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(4, (count,), generator=g)
        self.images = torch.randn(4, 12, generator=torch.Generator().manual_seed(0))[self.labels]
        self.images = self.images + 0.4 * torch.randn(count, 12, generator=g)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        j = int(torch.randint(len(self), ()))
        return self.images[i], self.images[j], (self.labels[i] != self.labels[j]).float()


class SiameseNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Dropout(0.1), nn.Linear(24, 4))

    def forward(self, a, b):
        return self.net(a), self.net(b)


class ContrastiveLoss(nn.Module):
    margin = 1.0

    def forward(self, a, b, label):
        distance = F.pairwise_distance(a, b)
        close, far = (1 - label) * distance**2, label * (self.margin - distance).clamp(min=0) ** 2
        return (close + far).mean()


torch.manual_seed(0)
net = SiameseNetwork()
criterion = ContrastiveLoss()
optimizer = torch.optim.RMSprop(net.parameters(), lr=2e-3)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
#-train_dataloader = DataLoader(Pairs(192, 1), batch_size=32, shuffle=True)
loss_history = []
#-for epoch in range(4):
session = Session(net, optimizer, scheduler, Variables(globals(), "running", "loss_history"), microbatches=4)  #+
train_dataloader = session.data(DataLoader(Pairs(192, 1), batch_size=32, shuffle=True))  #+
for epoch in session.epochs(4):  #+
    criterion.margin = 1.0 + 0.25 * epoch
    running = 0.0
    for img0, img1, label in train_dataloader:
        optimizer.zero_grad()
#-        output1, output2 = net(img0, img1)
#-        loss_contrastive = criterion(output1, output2, label)
#-        loss_contrastive.backward()
        loss_contrastive = session.backward(lambda a, b, y: criterion(*net(a, b), y), img0, img1, label)  #+
        optimizer.step()
        running += loss_contrastive.item()
    loss_history.append(running / len(train_dataloader))
    scheduler.step(loss_history[-1])
    print(f"Epoch {epoch}, current loss {loss_history[-1]:.4f}")
