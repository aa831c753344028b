"""REINFORCE: play episodes of balancing a pole, and make rewarded actions likelier."""

import argparse
import math

import torch
from torch import nn, optim
from torch.distributions import Categorical
from torch.nn import functional as F
#+
from orchestrator import Session  #+

parser = argparse.ArgumentParser()
parser.add_argument("--gamma", type=float, default=0.99)
parser.add_argument("--seed", type=int, default=543)
parser.add_argument("--updates", type=int, default=16)
parser.add_argument("--episodes", type=int, default=4, help="episodes per update")
parser.add_argument("--log-interval", type=int, default=4)
args = parser.parse_args()
torch.manual_seed(args.seed)


class CartPole:
    def reset(self):
        self.state, self.t = (torch.rand(4) * 0.1 - 0.05).tolist(), 0
        return torch.tensor(self.state)

    def step(self, action):
        x, v, angle, spin = self.state
        force = 10.0 if action == 1 else -10.0
        push = (force + 0.05 * spin**2 * math.sin(angle)) / 1.1
        turn = (9.8 * math.sin(angle) - math.cos(angle) * push) / (0.67 - 0.05 * math.cos(angle) ** 2)
        speed = push - 0.05 * turn * math.cos(angle)
        self.state = [x + 0.02 * v, v + 0.02 * speed, angle + 0.02 * spin, spin + 0.02 * turn]
        self.t += 1
        done = abs(self.state[0]) > 2.4 or abs(self.state[2]) > 0.21 or self.t >= 40
        return torch.tensor(self.state), 1.0, done


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.affine1 = nn.Linear(4, 32)
        self.dropout = nn.Dropout(p=0.2)
        self.affine2 = nn.Linear(32, 2)

    def forward(self, x):
        return F.softmax(self.affine2(F.relu(self.dropout(self.affine1(x)))), dim=-1)


policy = Policy()
optimizer = optim.Adam(policy.parameters(), lr=1e-2)


def play(env):
    """The loss of one episode, and its reward."""
    log_probs, rewards, state, done = [], [], env.reset(), False
    while not done:
        m = Categorical(policy(state))
        action = m.sample()
        log_probs.append(m.log_prob(action))
        state, reward, done = env.step(action.item())
        rewards.append(reward)
    returns, R = [], 0.0
    for r in reversed(rewards):
        R = r + args.gamma * R
        returns.insert(0, R)
    returns = torch.tensor(returns)
    returns = (returns - returns.mean()) / (returns.std() + 1e-6)
#-    return -(torch.stack(log_probs) * returns).sum(), sum(rewards)
    return -(torch.stack(log_probs) * returns).sum(), {"reward": sum(rewards)}  #+


envs = [CartPole() for _ in range(args.episodes)]
#-running_reward = 10.0
#-for i_update in range(args.updates):
session = Session(policy, optimizer)  #+
for i_update in session.steps(args.updates):  #+
    optimizer.zero_grad()
#-    ep_reward = 0.0
#-    for env in envs:
#-        loss, reward = play(env)
#-        (loss / args.episodes).backward()
#-        ep_reward += reward / args.episodes
    ep_reward = session.backward(lambda i: play(envs[i]), range(args.episodes))["reward"]  #+
    optimizer.step()
#-    running_reward = 0.05 * ep_reward + (1 - 0.05) * running_reward
    running_reward = 0.05 * ep_reward + (1 - 0.05) * session.state.get("running", 10.0)  #+
    session.state["running"] = running_reward  #+
    if i_update % args.log_interval == 0:
        print(f"Update {i_update}\tLast: {ep_reward:.2f}\tAverage: {running_reward:.2f}")
    if running_reward > 35.0:
        print(f"Solved! Running reward is now {running_reward}")
        break
