"""A GRU forecaster with truncated back-propagation: its state is carried over windows, detached."""

import torch
from torch import nn
#+
from orchestrator import Session, Variables  #+

torch.manual_seed(3)
streams, window, hidden_size, epochs = 16, 12, 16, 3
t = torch.arange(0, 97, dtype=torch.float)
phase = torch.rand(streams, 1, generator=torch.Generator().manual_seed(1)) * 6.28
series = (t * 0.3 + phase).sin() + 0.3 * (t * 0.07 + 2 * phase).cos()
windows = [
    (series[:, i : i + window, None], series[:, i + 1 : i + window + 1, None])
    for i in range(0, 96, window)
]


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(1, hidden_size, batch_first=True)
        self.head = nn.Linear(hidden_size, 1)

    def forward(self, x, h=None):
        out, h = self.gru(x, h)
        return self.head(out), h


model = Forecaster()
criterion = nn.MSELoss()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
#-for epoch in range(epochs):
session = Session(model, optimizer, Variables(globals(), "h", "epoch_loss"), microbatches=4)  #+
for epoch in session.epochs(epochs, windows):  #+
    h, epoch_loss = torch.zeros(1, streams, hidden_size), 0.0
#-    for x, y in windows:
    for x, y in session.each(windows):  #+
        optimizer.zero_grad()
#-        out, h = model(x, h.detach())
#-        loss = criterion(out, y)
#-        loss.backward()
#-        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        loss = session.backward(lambda x, y, h: criterion(model(x, h[None])[0], y), x, y, h[0])  #+
        h = model(x, h)[1].detach()  #+
        session.clip_grad_norm_(1.0)  #+
        optimizer.step()
        epoch_loss += loss.item()
    print(f"epoch {epoch + 1}: {epoch_loss / len(windows):.5f}")
