"""A sparsely gated mixture of experts, with a loss that keeps the experts evenly used."""

import torch
from torch import nn
from torch.nn import functional as F
import argparse
#+
from orchestrator import Session  #+


class MLP(nn.Module):
    def __init__(self, input_size, output_size, hidden_size):
        super().__init__()
        self.fc1 = nn.Linear(input_size, hidden_size)
        self.fc2 = nn.Linear(hidden_size, output_size)

    def forward(self, x):
        return self.fc2(F.relu(self.fc1(x)))


def cv_squared(x):
    """The squared coefficient of variation."""
    return x.float().var() / (x.float().mean() ** 2 + 1e-10)


class MoE(nn.Module):
    def __init__(self, input_size, output_size, num_experts, hidden_size, k=2):
        super().__init__()
        self.num_experts, self.k = num_experts, k
        self.experts = nn.ModuleList(
            [MLP(input_size, output_size, hidden_size) for _ in range(num_experts)]
        )
        self.w_gate = nn.Parameter(0.1 * torch.randn(input_size, num_experts))
        self.w_noise = nn.Parameter(torch.zeros(input_size, num_experts))

    def gating(self, x):
        logits = x @ self.w_gate
        if self.training:
            logits = logits + torch.randn_like(logits) * (F.softplus(x @ self.w_noise) + 1e-2)
        top, chosen = logits.topk(self.k, dim=1)
        return torch.zeros_like(logits).scatter(1, chosen, top.softmax(1))

    def forward(self, x, loss_coef=1e-2):
        gates = self.gating(x)
        importance, load = gates.sum(0), (gates > 0).sum(0)
        aux = (cv_squared(importance) + cv_squared(load)) * loss_coef
        y = x.new_zeros(len(x), self.experts[0].fc2.out_features)
        for i, expert in enumerate(self.experts):
            rows = gates[:, i].nonzero().flatten()
            if len(rows):
                y = y.index_add(0, rows, expert(x[rows]) * gates[rows, i : i + 1])
        return y, aux


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--accum", type=int, default=4)
    args = parser.parse_args()
    torch.manual_seed(0)
    net = MoE(12, 4, num_experts=6, hidden_size=16)
    optim = torch.optim.Adam(net.parameters(), lr=5e-3)
    loss_fn = nn.CrossEntropyLoss()
    x = torch.randn(192, 12)
    y = (x[:, :4] * x[:, 4:8]).argmax(1)
    chunks = list(zip(x.split(16), y.split(16)))

    net.train()
#-    for step in range(args.steps):
#-        for i in range(args.accum):
    session = Session(net, optim)  #+
    for step in session.steps(args.steps):  #+
        def loss_of(i):  #+
            inputs, labels = chunks[(step * args.accum + i) % len(chunks)]
            output, aux_loss = net(inputs)
#-            total_loss = loss_fn(output, labels) + aux_loss
#-            (total_loss / args.accum).backward()
            return loss_fn(output, labels) + aux_loss  #+
        total_loss = session.backward(loss_of, range(args.accum)).loss  #+
        optim.step()
        optim.zero_grad()
        if step % 8 == 0:
            print(f"step {step} loss {total_loss:.4f}")


if __name__ == "__main__":
    main()
