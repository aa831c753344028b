"""Deep Q-learning: balance a pole; act in every turn, and learn in every fourth one after a while."""

import math
import random

import torch
from torch import nn, optim
from torch.nn import functional as F
#+
from orchestrator import Session  #+

TURNS, WARM_UP, EVERY, COPY_EVERY, BATCH = 120, 24, 4, 16, 32
GAMMA, MEMORY = 0.98, 200
torch.manual_seed(0)
random.seed(0)


def reset():
    return [random.uniform(-0.05, 0.05) for _ in range(4)]


def move(state, action):
    x, v, angle, spin = state
    push = ((10.0 if action else -10.0) + 0.05 * spin**2 * math.sin(angle)) / 1.1
    turn = (9.8 * math.sin(angle) - math.cos(angle) * push) / (0.67 - 0.05 * math.cos(angle) ** 2)
    speed = push - 0.05 * turn * math.cos(angle)
    after = [x + 0.02 * v, v + 0.02 * speed, angle + 0.02 * spin, spin + 0.02 * turn]
    return after, float(abs(after[0]) > 2.4 or abs(after[2]) > 0.21)


def network():
    return nn.Sequential(nn.Linear(4, 24), nn.ReLU(), nn.Linear(24, 2))


q, target = network(), network()
target.load_state_dict(q.state_dict())
optimizer = optim.Adam(q.parameters(), lr=2e-3)
session = Session(q, target, optimizer)  #+


def loss_of(rows):
    state, action, reward, after, done = (torch.tensor(x) for x in zip(*rows, strict=True))
    with torch.no_grad():
        best = reward + GAMMA * target(after).max(1).values * (1 - done)
    return F.smooth_l1_loss(q(state).gather(1, action[:, None])[:, 0], best)


#-memory, state, episodes = [], reset(), 0
#-for turn in range(TURNS):
session.state.update(memory=[], state=reset(), episodes=0)  #+
for turn in session.steps(TURNS):  #+
    memory, state, episodes = (session.state[key] for key in ("memory", "state", "episodes"))  #+
    explore = random.random() < max(0.05, 1 - turn / 60)
    with torch.no_grad():
        action = random.randrange(2) if explore else int(q(torch.tensor(state)).argmax())
    after, done = move(state, action)
    memory = [*memory, (state, action, 1.0, after, done)][-MEMORY:]
    state = after
    if done:
        state, episodes = reset(), episodes + 1
    session.state.update(memory=memory, state=state, episodes=episodes)  #+
    if turn < WARM_UP or turn % EVERY:
        continue
    rows = random.sample(memory, min(BATCH, len(memory) // 4 * 4))
    optimizer.zero_grad()
#-    loss = loss_of(rows)
#-    loss.backward()
    session.backward(loss_of, [rows[at : at + len(rows) // 4] for at in range(0, len(rows), len(rows) // 4)])  #+
    optimizer.step()
    if turn % COPY_EVERY == 0:
        target.load_state_dict(q.state_dict())
print(f"{episodes} episodes")
