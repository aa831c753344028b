"""Deep one-class classification, in the manner of lukasruff/Deep-SVDD-PyTorch's trainers."""

import time

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.utils.data import DataLoader, Dataset
#+
from orchestrator import Session, Variables  #+


class Normal(Dataset):
    def __init__(self, n, share_of_outliers, seed):
        g = torch.Generator().manual_seed(seed)
        self.targets = (torch.rand(n, generator=g) < share_of_outliers).long()
        self.data = torch.eye(8) + 0.3 * torch.randn(n, 1, 8, 8, generator=g)
        self.data[self.targets == 1] = self.data[self.targets == 1].flip(-1)

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return self.data[index], self.targets[index], index


class Encoder(nn.Module):
    def __init__(self, rep_dim=8):
        super().__init__()
        self.rep_dim = rep_dim
        self.conv1 = nn.Conv2d(1, 4, 3, bias=False, padding=1)
        self.bn2d1 = nn.BatchNorm2d(4, eps=1e-04, affine=False)
        self.fc1 = nn.Linear(4 * 16, self.rep_dim, bias=False)

    def forward(self, x):
        x = F.max_pool2d(F.leaky_relu(self.bn2d1(self.conv1(x))), 2)
        return self.fc1(x.flatten(1))


class Autoencoder(Encoder):
    def __init__(self, rep_dim=8):
        super().__init__(rep_dim)
        self.decoder = nn.Sequential(nn.Linear(rep_dim, 32), nn.LeakyReLU(), nn.Linear(32, 64))

    def forward(self, x):
        return torch.sigmoid(self.decoder(super().forward(x))).view(x.shape)


def get_radius(dist, nu):
    """Optimally solve for radius R via the (1-nu)-quantile of distances."""
    return np.quantile(np.sqrt(dist.clone().data.cpu().numpy()), 1 - nu)


class AETrainer:
    def __init__(self, lr=0.001, n_epochs=2, lr_milestones=(1,), weight_decay=1e-6):
        self.lr, self.n_epochs, self.lr_milestones, self.weight_decay = lr, n_epochs, lr_milestones, weight_decay

    def train(self, train_loader, ae_net):
        optimizer = optim.Adam(ae_net.parameters(), lr=self.lr, weight_decay=self.weight_decay)
        scheduler = optim.lr_scheduler.MultiStepLR(optimizer, milestones=self.lr_milestones, gamma=0.1)
        ae_net.train()
        for epoch in range(self.n_epochs):
            loss_epoch, n_batches = 0.0, 0
            for data in train_loader:
                inputs, _, _ = data
                optimizer.zero_grad()
                outputs = ae_net(inputs)
                scores = torch.sum((outputs - inputs) ** 2, dim=tuple(range(1, outputs.dim())))
                loss = torch.mean(scores)
                loss.backward()
                optimizer.step()
                loss_epoch += loss.item()
                n_batches += 1
            scheduler.step()
            print("  Epoch {}/{}\t Loss: {:.8f}".format(epoch + 1, self.n_epochs, loss_epoch / n_batches))
        return ae_net


class DeepSVDDTrainer:
    def __init__(self, objective, R, c, nu, lr=0.001, n_epochs=4, lr_milestones=(3,), weight_decay=1e-6):
        self.objective = objective
        self.R = torch.tensor(R)  # radius R initialized with 0 by default.
        self.c = c
        self.nu = nu
        self.lr, self.n_epochs, self.lr_milestones, self.weight_decay = lr, n_epochs, lr_milestones, weight_decay
        self.warm_up_n_epochs = 1

    def train(self, train_loader, net):
        optimizer = optim.Adam(net.parameters(), lr=self.lr, weight_decay=self.weight_decay)
        scheduler = optim.lr_scheduler.MultiStepLR(optimizer, milestones=self.lr_milestones, gamma=0.1)
        if self.c is None:
            print("Initializing center c...")
            self.c = self.init_center_c(train_loader, net)
        start_time = time.time()
        net.train()
#-        for epoch in range(self.n_epochs):
        session = Session(net, optimizer, scheduler, Variables(self, "R"), microbatches=4)  #+
        train_loader = session.data(train_loader)  #+
        for epoch in session.epochs(self.n_epochs):  #+
            loss_epoch, n_batches = 0.0, 0
            for data in train_loader:
                inputs, _, _ = data
                optimizer.zero_grad()
#-                outputs = net(inputs)
#-                dist = torch.sum((outputs - self.c) ** 2, dim=1)
#-                if self.objective == "soft-boundary":
#-                    scores = dist - self.R**2
#-                    loss = self.R**2 + (1 / self.nu) * torch.mean(torch.max(torch.zeros_like(scores), scores))
#-                else:
#-                    loss = torch.mean(dist)
#-                loss.backward()
                loss_of = lambda dist: self.R**2 + (1 / self.nu) * torch.mean(torch.relu(dist - self.R**2)) if self.objective == "soft-boundary" else torch.mean(dist)  #+
                loss = session.backward(lambda x: loss_of(torch.sum((net(x) - self.c) ** 2, dim=1)), inputs)  #+
                dist = torch.sum((net(inputs) - self.c) ** 2, dim=1)  #+
                optimizer.step()
                # Update hypersphere radius R on mini-batch distances
                if (self.objective == "soft-boundary") and (epoch >= self.warm_up_n_epochs):
                    self.R.data = torch.tensor(get_radius(dist, self.nu), dtype=torch.float)
                loss_epoch += loss.item()
                n_batches += 1
            scheduler.step()
            print("  Epoch {}/{}\t Loss: {:.8f}".format(epoch + 1, self.n_epochs, loss_epoch / n_batches))
        print("Training time: %.3f" % (time.time() - start_time))
        return net

    def test(self, test_loader, net):
        scores, labels = [], []
        net.eval()
        with torch.no_grad():
            for inputs, targets, idx in test_loader:
                scores.append(torch.sum((net(inputs) - self.c) ** 2, dim=1) - self.R**2)
                labels.append(targets)
        scores, labels = torch.cat(scores), torch.cat(labels)
        auc = (scores[labels == 1][:, None] > scores[labels == 0]).float().mean()
        print("Test set AUC: {:.2f}%".format(100.0 * auc))

    def init_center_c(self, train_loader, net, eps=0.1):
        """Initialize hypersphere center c as the mean from an initial forward pass on the data."""
        n_samples, c = 0, torch.zeros(net.rep_dim)
        net.eval()
        with torch.no_grad():
            for data in train_loader:
                outputs = net(data[0])
                n_samples += outputs.shape[0]
                c += torch.sum(outputs, dim=0)
        c /= n_samples
        c[(abs(c) < eps) & (c < 0)] = -eps
        c[(abs(c) < eps) & (c > 0)] = eps
        return c


torch.manual_seed(0)
train_loader = DataLoader(Normal(160, 0.0, 1), batch_size=16, shuffle=True)
test_loader = DataLoader(Normal(64, 0.3, 2), batch_size=16)
ae_net = AETrainer().train(train_loader, Autoencoder())
net = Encoder()
net_dict = net.state_dict()
net_dict.update({k: v for k, v in ae_net.state_dict().items() if k in net_dict})
net.load_state_dict(net_dict)
trainer = DeepSVDDTrainer("soft-boundary", 0.0, None, 0.1)
trainer.train(train_loader, net)
trainer.test(test_loader, net)
