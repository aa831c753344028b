"""A character-level MLP on names, in the manner of karpathy/makemore's makemore.py."""

import time

import torch
import torch.nn as nn
from torch.nn import functional as F
from torch.utils.data import Dataset
from torch.utils.data.dataloader import DataLoader
#+
from orchestrator import Session, Variables  #+


class CharDataset(Dataset):
    def __init__(self, words, chars, max_word_length):
        self.words, self.chars, self.max_word_length = words, chars, max_word_length
        self.stoi = {ch: i + 1 for i, ch in enumerate(chars)}

    def __len__(self):
        return len(self.words)

    def __getitem__(self, idx):
        ix = torch.tensor([self.stoi[w] for w in self.words[idx]], dtype=torch.long)
        x = torch.zeros(self.max_word_length + 1, dtype=torch.long)
        y = torch.zeros(self.max_word_length + 1, dtype=torch.long)
        x[1 : 1 + len(ix)] = ix
        y[: len(ix)] = ix
        y[len(ix) + 1 :] = -1  # index -1 will mask the loss at the inactive locations
        return x, y


class MLP(nn.Module):
    def __init__(self, vocab_size, block_size=8, n_embd=16, n_embd2=32):
        super().__init__()
        self.block_size, self.vocab_size = block_size, vocab_size
        self.wte = nn.Embedding(vocab_size + 1, n_embd)
        self.mlp = nn.Sequential(nn.Linear(block_size * n_embd, n_embd2), nn.Tanh(), nn.Linear(n_embd2, vocab_size))

    def forward(self, idx, targets=None):
        embs = []
        for k in range(self.block_size):
            embs.append(self.wte(idx))
            idx = torch.roll(idx, 1, 1)
            idx[:, 0] = self.vocab_size  # special <BLANK> token
        logits = self.mlp(torch.cat(embs, -1))
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, loss


@torch.inference_mode()
def evaluate(model, dataset, batch_size=50, max_batches=None):
    model.eval()
    loader = DataLoader(dataset, shuffle=True, batch_size=batch_size, num_workers=0)
    losses = []
    for i, batch in enumerate(loader):
        X, Y = batch
        logits, loss = model(X, Y)
        losses.append(loss.item())
        if max_batches is not None and i >= max_batches:
            break
    mean_loss = torch.tensor(losses).mean().item()
    model.train()  # reset model back to training mode
    return mean_loss


class InfiniteDataLoader:
    """this is really hacky and I'm not proud of it, but there doesn't seem to be a better way in PyTorch"""

    def __init__(self, dataset, **kwargs):
        train_sampler = torch.utils.data.RandomSampler(dataset, replacement=True, num_samples=int(1e5))
        self.train_loader = DataLoader(dataset, sampler=train_sampler, **kwargs)
        self.data_iter = iter(self.train_loader)

    def next(self):
        try:
            batch = next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.train_loader)
            batch = next(self.data_iter)
        return batch


torch.manual_seed(3407)
words = ["anna", "bob", "carla", "dora", "emil", "frida", "gina", "hans", "ida", "jonas", "karl", "lena", "mia", "nora"] * 8
chars = sorted(set("".join(words)))
train_dataset, test_dataset = CharDataset(words[:96], chars, 6), CharDataset(words[96:], chars, 6)
model = MLP(len(chars) + 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.01, betas=(0.9, 0.99), eps=1e-8)
#-batch_loader = InfiniteDataLoader(train_dataset, batch_size=16, num_workers=0)

best_loss = None
#-step = 0
#-while True:
session = Session(model, optimizer, Variables(globals(), "best_loss"), microbatches=4)  #+
batch_loader = session.data(train_dataset, batch_size=16, order=lambda epoch: torch.randint(96, (96,)).tolist())  #+
for step in session.steps(60):  #+
    t0 = time.time()
#-    batch = batch_loader.next()
    batch = batch_loader.at(step)  #+
    X, Y = batch
#-    # feed into the model
#-    logits, loss = model(X, Y)
    # calculate the gradient, update the weights
    model.zero_grad(set_to_none=True)
#-    loss.backward()
    loss = session.backward(lambda X, Y: model(X, Y)[1], X, Y)  #+
    optimizer.step()
    t1 = time.time()
    # logging
    if step % 10 == 0:
        print(f"step {step} | loss {loss.item():.4f} | step time {(t1 - t0) * 1000:.2f}ms")
    # evaluate the model
    if step > 0 and step % 20 == 0:
        train_loss = evaluate(model, train_dataset, batch_size=100, max_batches=10)
        test_loss = evaluate(model, test_dataset, batch_size=100, max_batches=10)
        print(f"step {step} train loss: {train_loss} test loss: {test_loss}")
        # save the model to disk if it has improved
        if best_loss is None or test_loss < best_loss:
            torch.save(model.state_dict(), "model.pt")
            best_loss = test_loss
#-    step += 1
#-    # termination conditions
#-    if step >= 60:
#-        break
