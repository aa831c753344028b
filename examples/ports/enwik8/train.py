"""A language model on bytes, in the manner of lucidrains/x-transformers' train_enwik8.py."""

import random

import numpy as np
import torch
import torch.nn.functional as F
import torch.optim as optim
from torch import nn
from torch.utils.data import DataLoader, Dataset
#+
from orchestrator import Session  #+

# constants

NUM_BATCHES = 40
BATCH_SIZE = 4
GRADIENT_ACCUMULATE_EVERY = 4
LEARNING_RATE = 1e-3
VALIDATE_EVERY = 10
GENERATE_EVERY = 20
GENERATE_LENGTH = 16
SEQ_LEN = 16

# helpers


def cycle(loader):
    while True:
        for data in loader:
            yield data


def decode_token(token):
    return str(chr(max(32, token)))


def decode_tokens(tokens):
    return "".join(list(map(decode_token, tokens)))


class AutoregressiveWrapper(nn.Module):
    def __init__(self, num_tokens=64, dim=32, depth=2, heads=2):
        super().__init__()
        self.emb = nn.Embedding(num_tokens, dim)
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(dim, heads, dim * 4, 0.1, batch_first=True) for _ in range(depth)])
        self.to_logits = nn.Linear(dim, num_tokens)

    def net(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        x = self.emb(x)
        for layer in self.layers:
            x = layer(x, src_mask=mask)
        return self.to_logits(x)

    @torch.no_grad()
    def generate(self, prompt, seq_len):
        self.eval()
        out = prompt
        for _ in range(seq_len):
            logits = self.net(out[:, -SEQ_LEN:])[:, -1]
            sample = torch.multinomial(F.softmax(logits, dim=-1), 1)
            out = torch.cat((out, sample), dim=-1)
        self.train()
        return out[:, prompt.shape[1] :]

    def forward(self, x):
        inp, target = x[:, :-1], x[:, 1:]
        return F.cross_entropy(self.net(inp).transpose(1, 2), target)


torch.manual_seed(0)
random.seed(0)
# instantiate GPT-like decoder model

model = AutoregressiveWrapper()

# prepare data

data = np.frombuffer(b"the quick brown fox jumps over the lazy dog, and runs away. " * 40, dtype=np.uint8) % 64
data_train, data_val = (torch.from_numpy(part.copy()) for part in np.split(data, [int(len(data) * 0.9)]))


class TextSamplerDataset(Dataset):
    def __init__(self, data, seq_len):
        super().__init__()
        self.data = data
        self.seq_len = seq_len

    def __getitem__(self, index):
        rand_start = torch.randint(0, self.data.size(0) - self.seq_len - 1, (1,))
        full_seq = self.data[rand_start : rand_start + self.seq_len + 1].long()
        return full_seq

    def __len__(self):
        return self.data.size(0) // self.seq_len


train_dataset = TextSamplerDataset(data_train, SEQ_LEN)
val_dataset = TextSamplerDataset(data_val, SEQ_LEN)
#-train_loader = cycle(DataLoader(train_dataset, batch_size=BATCH_SIZE, drop_last=True))
val_loader = cycle(DataLoader(val_dataset, batch_size=BATCH_SIZE, drop_last=True))

# optimizer

optim = optim.Adam(model.parameters(), lr=LEARNING_RATE)

session = Session(model, optim)  #+
train_data = session.data(train_dataset, batch_size=BATCH_SIZE * GRADIENT_ACCUMULATE_EVERY, microbatches=GRADIENT_ACCUMULATE_EVERY, drop_last=True)  #+
#+
# training

#-for i in range(NUM_BATCHES):
for i in session.steps(NUM_BATCHES):  #+
    model.train()

#-    for __ in range(GRADIENT_ACCUMULATE_EVERY):
#-        loss = model(next(train_loader))
#-        (loss / GRADIENT_ACCUMULATE_EVERY).backward()
    loss = session.backward(model, train_data.at(i))  #+

    print(f"training loss: {loss.item()}")
#-    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    session.clip_grad_norm_(0.5)  #+
    optim.step()
    optim.zero_grad()

    if i % VALIDATE_EVERY == 0:
        model.eval()
        with torch.no_grad():
            loss = model(next(val_loader))
            print(f"validation loss: {loss.item()}")

    if i % GENERATE_EVERY == 0:
        model.eval()
        inp = random.choice(val_dataset)[:-1]
        prime = decode_tokens(inp)
        print(f"{prime} \n\n {'*' * 100}")
        sample = model.generate(inp[None], GENERATE_LENGTH)
        print(decode_tokens(sample[0]))
