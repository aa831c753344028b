"""A graph convolutional network on one graph: the whole of it is the batch."""

import argparse
import time

import torch
from torch import nn, optim
from torch.nn import functional as F
#+
from orchestrator import Session  #+

parser = argparse.ArgumentParser()
parser.add_argument("--fastmode", action="store_true", help="Validate during training pass.")
parser.add_argument("--epochs", type=int, default=30)
parser.add_argument("--lr", type=float, default=0.02)
parser.add_argument("--weight_decay", type=float, default=5e-4)
parser.add_argument("--hidden", type=int, default=16)
parser.add_argument("--dropout", type=float, default=0.5)
args = parser.parse_args()
torch.manual_seed(42)


class GraphConvolution(nn.Module):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(in_features, out_features))
        self.bias = nn.Parameter(torch.zeros(out_features))
        nn.init.xavier_uniform_(self.weight)

    def forward(self, input, adj):
        return torch.spmm(adj, input @ self.weight) + self.bias


class GCN(nn.Module):
    def __init__(self, nfeat, nhid, nclass, dropout):
        super().__init__()
        self.gc1 = GraphConvolution(nfeat, nhid)
        self.gc2 = GraphConvolution(nhid, nclass)
        self.dropout = dropout

    def forward(self, x, adj):
        x = F.dropout(F.relu(self.gc1(x, adj)), self.dropout, training=self.training)
        return F.log_softmax(self.gc2(x, adj), dim=1)


def load_data(nodes=96, classes=4):
    rows = torch.Generator().manual_seed(1)
    labels = torch.randint(classes, (nodes,), generator=rows)
    same = labels[:, None] == labels[None]
    chance = torch.where(same, 0.12, 0.02)
    edges = (torch.rand(nodes, nodes, generator=rows) < chance).float()
    adj = ((edges + edges.T) > 0).float().fill_diagonal_(1)
    features = F.one_hot(labels, 12).float() + torch.randn(nodes, 12, generator=rows)
    adj = (adj / adj.sum(1, keepdim=True)).to_sparse()
    return adj, features, labels, torch.arange(48), torch.arange(48, 72), torch.arange(72, 96)


def accuracy(output, labels):
    return (output.argmax(1) == labels).double().mean()


adj, features, labels, idx_train, idx_val, idx_test = load_data()
model = GCN(features.shape[1], args.hidden, 4, args.dropout)
optimizer = optim.Adam(model.parameters(), lr=args.lr, weight_decay=args.weight_decay)
session = Session(model, optimizer)  #+


def train(epoch):
    t = time.time()
    model.train()
    optimizer.zero_grad()
#-    output = model(features, adj)
#-    loss_train = F.nll_loss(output[idx_train], labels[idx_train])
#-    loss_train.backward()
    loss_train = session.backward(  #+
        lambda rows: F.nll_loss(model(features, adj)[rows], labels[rows]), idx_train.split(12)  #+
    ).loss  #+
    optimizer.step()

    model.eval()
    output = model(features, adj)
    acc_val = accuracy(output[idx_val], labels[idx_val])
    if epoch % 10 == 0:
        print(f"Epoch: {epoch:04d} loss_train: {loss_train:.4f} acc_val: {acc_val.item():.4f}")
    return time.time() - t


def test():
    model.eval()
    output = model(features, adj)
    loss_test = F.nll_loss(output[idx_test], labels[idx_test])
    print(f"Test set: loss= {loss_test.item():.4f}")


t_total = 0.0
#-for epoch in range(args.epochs):
for epoch in session.steps(args.epochs):  #+
    t_total += train(epoch)
print(f"Total time elapsed: {t_total:.1f}s")
test()
