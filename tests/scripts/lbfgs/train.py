"""Predict sine waves with two LSTM cells, optimized by LBFGS on the whole of the data."""

import argparse

import torch
from torch import nn, optim
#+
from orchestrator import Session  #+


class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm1 = nn.LSTMCell(1, 8)
        self.lstm2 = nn.LSTMCell(8, 8)
        self.linear = nn.Linear(8, 1)

    def forward(self, input, future=0):
        outputs = []
        h_t = c_t = h_t2 = c_t2 = torch.zeros(input.size(0), 8, dtype=input.dtype)
        for input_t in input.split(1, dim=1):
            h_t, c_t = self.lstm1(input_t, (h_t, c_t))
            h_t2, c_t2 = self.lstm2(h_t, (h_t2, c_t2))
            output = self.linear(h_t2)
            outputs += [output]
        for _ in range(future):
            h_t, c_t = self.lstm1(output, (h_t, c_t))
            h_t2, c_t2 = self.lstm2(h_t, (h_t2, c_t2))
            output = self.linear(h_t2)
            outputs += [output]
        return torch.cat(outputs, dim=1)


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=12, help="steps to run")
opt = parser.parse_args()
torch.manual_seed(0)
phases = torch.arange(12, dtype=torch.float64)[:, None]
data = torch.sin(phases + torch.arange(17, dtype=torch.float64) / 2)
input, target = data[4:, :-1], data[4:, 1:]
test_input, test_target = data[:4, :-1], data[:4, 1:]
seq = Sequence().double()
criterion = nn.MSELoss()
optimizer = optim.LBFGS(seq.parameters(), lr=0.8, max_iter=3)
session = Session(seq, optimizer)  #+
pairs = list(zip(input.split(2), target.split(2), strict=True))  #+

#-for i in range(opt.steps):
for i in session.steps(opt.steps):  #+

    def closure():
        optimizer.zero_grad()
#-        out = seq(input)
#-        loss = criterion(out, target)
#-        loss.backward()
#-        return loss
        return session.backward(lambda pair: criterion(seq(pair[0]), pair[1]), pairs).loss  #+

    loss = optimizer.step(closure)
    with torch.no_grad():
        future = 4
        pred = seq(test_input, future=future)
        test_loss = criterion(pred[:, :-future], test_target)
    print(f"STEP: {i} loss: {loss:.6f} test loss: {test_loss.item():.6f}")
