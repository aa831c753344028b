"""Skip-gram word vectors with negative sampling, in a plain loop over shuffled pairs."""

import random

import torch
from torch import nn
from torch.nn import functional as F
#+
from orchestrator import Session  #+

WINDOW, NEGATIVE, DIM, BATCH, EPOCHS = 2, 4, 12, 64, 3
random.seed(0)
torch.manual_seed(0)
words = [random.choice("king queen man woman crown rule the a".split()) for _ in range(400)]
vocab = sorted(set(words))
ids = [vocab.index(word) for word in words]
pairs = [
    (ids[i], ids[j])
    for i in range(len(ids))
    for j in range(max(0, i - WINDOW), min(len(ids), i + WINDOW + 1))
    if i != j
]
counts = torch.tensor([ids.count(i) for i in range(len(vocab))], dtype=torch.float)
unigram = counts**0.75 / (counts**0.75).sum()


class SkipGram(nn.Module):
    def __init__(self):
        super().__init__()
        self.center, self.context = nn.Embedding(len(vocab), DIM), nn.Embedding(len(vocab), DIM)
        nn.init.uniform_(self.center.weight, -0.5 / DIM, 0.5 / DIM)
        nn.init.zeros_(self.context.weight)

    def forward(self, center, context, negative):
        v = self.center(center)
        positive = F.logsigmoid((v * self.context(context)).sum(1))
        others = F.logsigmoid(-torch.bmm(self.context(negative), v[:, :, None]).squeeze(2)).sum(1)
        return -(positive + others).mean()


model = SkipGram()
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
pairs = torch.tensor(pairs)[: 64 * 24]
#-for epoch in range(EPOCHS):
session = Session(model, optimizer, microbatches=4)  #+
starts = range(0, len(pairs), BATCH)  #+
for epoch in session.epochs(EPOCHS, starts):  #+
    order = torch.randperm(len(pairs))
    total = 0.0
#-    for start in range(0, len(pairs), BATCH):
    for start in session.each(starts):  #+
        batch = pairs[order[start : start + BATCH]]
        negative = torch.multinomial(unigram, len(batch) * NEGATIVE, replacement=True)
#-        loss = model(batch[:, 0], batch[:, 1], negative.view(len(batch), NEGATIVE))
        optimizer.zero_grad()
#-        loss.backward()
        loss = session.backward(model, batch[:, 0], batch[:, 1], negative.view(len(batch), NEGATIVE))  #+
        optimizer.step()
        total += loss.item()
    print(f"epoch {epoch}: loss {total:.3f}")
