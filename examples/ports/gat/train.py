"""A graph attention network with early stopping, in the manner of Diego999/pyGAT's train.py."""

import glob
import os
import time

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
#+
from orchestrator import Session, Variables  #+

epochs, patience, hidden, nb_heads, dropout, alpha, lr, weight_decay = 60, 12, 8, 2, 0.3, 0.2, 0.01, 5e-4
np.random.seed(72)
torch.manual_seed(72)


def load_data(n=60):
    labels = torch.arange(n) % 3
    adj = (torch.rand(n, n) < torch.where(labels[:, None] == labels, 0.3, 0.03)).float()
    adj = ((adj + adj.T + torch.eye(n)) > 0).float()
    features = F.one_hot(labels, 8).float() + torch.randn(n, 8)
    return adj, features, labels, torch.arange(0, 20), torch.arange(20, 40), torch.arange(40, n)


class GraphAttentionLayer(nn.Module):
    def __init__(self, in_features, out_features, dropout, alpha, concat=True):
        super(GraphAttentionLayer, self).__init__()
        self.dropout, self.concat, self.out_features = dropout, concat, out_features
        self.W = nn.Parameter(torch.empty(size=(in_features, out_features)))
        nn.init.xavier_uniform_(self.W.data, gain=1.414)
        self.a = nn.Parameter(torch.empty(size=(2 * out_features, 1)))
        nn.init.xavier_uniform_(self.a.data, gain=1.414)
        self.leakyrelu = nn.LeakyReLU(alpha)

    def forward(self, h, adj):
        Wh = torch.mm(h, self.W)
        e = self.leakyrelu(Wh @ self.a[: self.out_features] + (Wh @ self.a[self.out_features :]).T)
        attention = torch.where(adj > 0, e, -9e15 * torch.ones_like(e))
        attention = F.dropout(F.softmax(attention, dim=1), self.dropout, training=self.training)
        h_prime = torch.matmul(attention, Wh)
        return F.elu(h_prime) if self.concat else h_prime


class GAT(nn.Module):
    def __init__(self, nfeat, nhid, nclass, dropout, alpha, nheads):
        super(GAT, self).__init__()
        self.dropout = dropout
        self.attentions = [GraphAttentionLayer(nfeat, nhid, dropout=dropout, alpha=alpha, concat=True) for _ in range(nheads)]
        for i, attention in enumerate(self.attentions):
            self.add_module("attention_{}".format(i), attention)
        self.out_att = GraphAttentionLayer(nhid * nheads, nclass, dropout=dropout, alpha=alpha, concat=False)

    def forward(self, x, adj):
        x = F.dropout(x, self.dropout, training=self.training)
        x = torch.cat([att(x, adj) for att in self.attentions], dim=1)
        x = F.dropout(x, self.dropout, training=self.training)
        return F.log_softmax(F.elu(self.out_att(x, adj)), dim=1)


adj, features, labels, idx_train, idx_val, idx_test = load_data()
model = GAT(nfeat=features.shape[1], nhid=hidden, nclass=int(labels.max()) + 1, dropout=dropout, nheads=nb_heads, alpha=alpha)
optimizer = optim.Adam(model.parameters(), lr=lr, weight_decay=weight_decay)


def accuracy(output, labels):
    return output.max(1)[1].eq(labels).double().sum() / len(labels)


def train(epoch):
    t = time.time()
    model.train()
    optimizer.zero_grad()
#-    output = model(features, adj)
#-    loss_train = F.nll_loss(output[idx_train], labels[idx_train])
#-    loss_train.backward()
    loss_train = session.backward(lambda idx: F.nll_loss(model(features, adj)[idx], labels[idx]), idx_train)  #+
    optimizer.step()
    # Evaluate validation set performance separately, deactivates dropout during validation run.
    model.eval()
    output = model(features, adj)
    loss_val = F.nll_loss(output[idx_val], labels[idx_val])
    acc_val = accuracy(output[idx_val], labels[idx_val])
    print(
        "Epoch: {:04d}".format(epoch + 1),
        "loss_train: {:.4f}".format(loss_train.data.item()),
        "loss_val: {:.4f}".format(loss_val.data.item()),
        "acc_val: {:.4f}".format(acc_val.data.item()),
        "time: {:.4f}s".format(time.time() - t),
    )
    return loss_val.data.item()


def compute_test():
    model.eval()
    output = model(features, adj)
    print("Test set results:", "accuracy= {:.4f}".format(accuracy(output[idx_test], labels[idx_test]).item()))


# Train model
loss_values = []
bad_counter = 0
best = epochs + 1
best_epoch = 0
#-for epoch in range(epochs):
best_state = {}  #+
session = Session(model, optimizer, Variables(globals(), "loss_values", "bad_counter", "best", "best_epoch", "best_state"), microbatches=4)  #+
for epoch in session.steps(epochs):  #+
    loss_values.append(train(epoch))

#-    torch.save(model.state_dict(), "{}.pkl".format(epoch))
    if loss_values[-1] < best:
        best = loss_values[-1]
#-        best_epoch = epoch
        best_epoch, best_state = epoch, {k: v.clone() for k, v in model.state_dict().items()}  #+
        bad_counter = 0
    else:
        bad_counter += 1

    if bad_counter == patience:
        break

# Restore best model
print("Loading {}th epoch".format(best_epoch))
#-model.load_state_dict(torch.load("{}.pkl".format(best_epoch)))
#-for file in glob.glob("*.pkl"):
#-    os.remove(file)
model.load_state_dict(best_state)  #+
compute_test()
