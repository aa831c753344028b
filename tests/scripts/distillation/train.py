"""Distil a teacher into a smaller student; the teacher is frozen, and set to eval once."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
#+
from orchestrator import Session  #+

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--T", type=float, default=2.0)
parser.add_argument("--soft_weight", type=float, default=0.75)
args = parser.parse_args()
torch.manual_seed(0)

x = torch.randn(256, 16)
dataset = TensorDataset(x, (x[:, :4] * x[:, 4:8]).argmax(1))
teacher = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 4))
student = nn.Sequential(nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 4))


def soft_labels(teacher, inputs, T):
    with torch.no_grad():
        return F.softmax(teacher(inputs) / T, dim=-1)


def kd_loss(student_logits, soft_targets, labels, T, soft_weight):
    soft_prob = F.log_softmax(student_logits / T, dim=-1)
    soft_loss = F.kl_div(soft_prob, soft_targets, reduction="batchmean") * T**2
    return soft_weight * soft_loss + (1 - soft_weight) * F.cross_entropy(student_logits, labels)


def train_knowledge_distillation(teacher, student, train_loader, epochs, lr, T, soft_weight):
    optimizer = torch.optim.Adam(student.parameters(), lr=lr)
    teacher.eval()
    student.train()
#-    for epoch in range(epochs):
    session = Session(student, optimizer)  #+
    data = session.data(train_loader.dataset, batch_size=train_loader.batch_size, microbatches=4, shuffle=True)  #+
    for epoch in session.epochs(epochs):  #+
        running_loss = 0.0
#-        for inputs, labels in train_loader:
        for batch in data:  #+
            optimizer.zero_grad()
#-            soft_targets = soft_labels(teacher, inputs, T)
#-            loss = kd_loss(student(inputs), soft_targets, labels, T, soft_weight)
#-            loss.backward()
            loss = session.backward(lambda b: kd_loss(student(b[0]), soft_labels(teacher, b[0], T), b[1], T, soft_weight), batch).loss  #+
            optimizer.step()
            running_loss += float(loss)
        print(f"Epoch {epoch + 1}/{epochs}, Loss: {running_loss / len(train_loader):.4f}")


train_loader = DataLoader(dataset, batch_size=32, shuffle=True)
train_knowledge_distillation(teacher, student, train_loader, args.epochs, 5e-3, args.T, args.soft_weight)
