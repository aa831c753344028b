"""Proximal policy optimization, in the manner of vwxyzjn/cleanrl's ppo.py: environments go on, and observations are normalized."""
import numpy as np
import torch
import torch.nn as nn
from torch.distributions.categorical import Categorical
from orchestrator import Session, Variables  #+
N, T, GAMMA, LAMBDA, CLIP = 4, 16, 0.99, 0.95, 0.2


class RunningMeanStd:
    def __init__(self, shape):
        self.mean, self.var, self.count = np.zeros(shape), np.ones(shape), 1e-4

    def update(self, x):
        delta, n, total = x.mean(0) - self.mean, len(x), self.count + len(x)
        self.mean = self.mean + delta * n / total
        self.var = (self.var * self.count + x.var(0) * n + delta**2 * self.count * n / total) / total
        self.count = total


class VecEnv:
    def __init__(self):
        self.rms = RunningMeanStd(2)

    def reset(self):
        self.s, self.t = np.random.uniform(-1, 1, (N, 2)), np.zeros(N, int)
        return self.normalized()

    def normalized(self):
        self.rms.update(self.s)
        return torch.Tensor((self.s - self.rms.mean) / np.sqrt(self.rms.var + 1e-8))

    def step(self, a):
        v = np.clip(self.s[:, 1] + 0.2 * (a - 1), -1, 1)
        self.s, self.t = np.stack([self.s[:, 0] + 0.2 * v, v], 1), self.t + 1
        reward, done = -np.abs(self.s[:, 0]), (self.t >= 12) | (np.abs(self.s[:, 0]) > 2)
        for i in np.nonzero(done)[0]:
            self.s[i], self.t[i] = np.random.uniform(-1, 1, 2), 0
        return self.normalized(), torch.Tensor(reward), torch.Tensor(done)


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))
        self.actor = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 3))

    def loss(self, obs, action, logprob, adv, ret):
        probs = Categorical(logits=self.actor(obs))
        ratio = (probs.log_prob(action) - logprob).exp()
        pg = torch.max(-adv * ratio, -adv * ratio.clamp(1 - CLIP, 1 + CLIP)).mean()
        return pg - 0.01 * probs.entropy().mean() + 0.25 * (self.critic(obs).view(-1) - ret).square().mean()


np.random.seed(1)
torch.manual_seed(1)
envs, agent = VecEnv(), Agent()
optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-3, eps=1e-5)
obs, dones, values, rewards = torch.zeros(T, N, 2), torch.zeros(T, N), torch.zeros(T, N), torch.zeros(T, N)
actions, logprobs = torch.zeros(T, N), torch.zeros(T, N)
next_obs, next_done = envs.reset(), torch.zeros(N)
#-for update in range(10):
session = Session(agent, optimizer, envs.rms, envs, Variables(globals(), "next_obs", "next_done"), microbatches=4)  #+
for update in session.steps(10):  #+
    optimizer.param_groups[0]["lr"] = (1 - update / 10) * 2.5e-3
    for t in range(T):
        obs[t], dones[t] = next_obs, next_done
        with torch.no_grad():
            probs, values[t] = Categorical(logits=agent.actor(next_obs)), agent.critic(next_obs).view(-1)
        actions[t] = action = probs.sample()
        logprobs[t] = probs.log_prob(action)
        next_obs, rewards[t], next_done = envs.step(action.numpy())
    advantages, last = torch.zeros(T, N), 0
    with torch.no_grad():
        following = agent.critic(next_obs).view(-1)
    for t in reversed(range(T)):
        going = 1 - (next_done if t == T - 1 else dones[t + 1])
        delta = rewards[t] + GAMMA * (following if t == T - 1 else values[t + 1]) * going - values[t]
        advantages[t] = last = delta + GAMMA * LAMBDA * going * last
    batch = [each.flatten(0, 1) for each in (obs, actions, logprobs, advantages, advantages + values)]
    for indices in np.random.permutation(T * N).reshape(-1, 32):
        optimizer.zero_grad()
#-        agent.loss(*(each[indices] for each in batch)).backward()
#-        nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
        session.backward(agent.loss, *(each[indices] for each in batch))  #+
        session.clip_grad_norm_(0.5)  #+
        optimizer.step()
print(float(rewards.mean()))
