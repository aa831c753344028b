"""Proximal policy optimization: rollouts by the policy, advantages, and several epochs over minibatches."""

import torch
from torch import nn
from torch.distributions import Categorical
#+
from orchestrator import Session  #+

torch.manual_seed(1)
num_updates, num_envs, num_steps, update_epochs, minibatch_size = 9, 8, 16, 2, 64
gamma, gae_lambda, clip_coef, ent_coef, vf_coef, max_grad_norm = 0.99, 0.95, 0.2, 0.01, 0.5, 0.5


class Corridor:
    """Walk to the right; each step costs a little, the end pays."""

    def reset(self):
        self.at = torch.zeros(num_envs)
        return self.observe()

    def observe(self):
        return torch.stack([self.at / 4, torch.ones(num_envs)], 1)

    def step(self, action):
        self.at = (self.at + action.float() * 2 - 1).clamp(min=-2)
        done = self.at >= 4
        self.at[done] = 0
        return self.observe(), torch.where(done, 1.0, -0.05), done.float()


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
        self.actor = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))

    def get_value(self, x):
        return self.critic(x).squeeze(-1)

    def get_action_and_value(self, x, action=None):
        probs = Categorical(logits=self.actor(x))
        action = probs.sample() if action is None else action
        return action, probs.log_prob(action), probs.entropy(), self.get_value(x)


agent = Agent()
optimizer = torch.optim.Adam(agent.parameters(), lr=3e-3, eps=1e-5)
env = Corridor()
session = Session(agent, optimizer, microbatches=4)  #+


@torch.no_grad()
def rollout():
    obs = env.reset()
    kept = []
    for _ in range(num_steps):
        action, logprob, _, value = agent.get_action_and_value(obs)
        following, reward, done = env.step(action)
        kept.append((obs, action, logprob, value, reward, done))
        obs = following
    obs, actions, logprobs, values, rewards, dones = map(torch.stack, zip(*kept, strict=True))
    advantages, last = torch.zeros_like(rewards), 0.0
    following = torch.cat([values[1:], agent.get_value(env.observe())[None]])
    for t in reversed(range(num_steps)):
        delta = rewards[t] + gamma * following[t] * (1 - dones[t]) - values[t]
        last = advantages[t] = delta + gamma * gae_lambda * (1 - dones[t]) * last
    parts = obs, actions, logprobs, advantages, advantages + values
    return [part.flatten(0, 1) for part in parts], rewards.mean().item()


def ppo_loss(obs, actions, logprobs, advantages, returns):
    _, newlogprob, entropy, newvalue = agent.get_action_and_value(obs, actions)
    ratio = (newlogprob - logprobs).exp()
    clipped = torch.clamp(ratio, 1 - clip_coef, 1 + clip_coef)
    pg_loss = torch.max(-advantages * ratio, -advantages * clipped).mean()
    return pg_loss - ent_coef * entropy.mean() + vf_coef * 0.5 * ((newvalue - returns) ** 2).mean()


#-for update in range(num_updates):
for update in session.steps(num_updates):  #+
    batch, reward = rollout()
    for epoch in range(update_epochs):
        b_inds = torch.randperm(num_envs * num_steps)
        for start in range(0, num_envs * num_steps, minibatch_size):
            minibatch = [part[b_inds[start : start + minibatch_size]] for part in batch]
#-            loss = ppo_loss(*minibatch)
            loss = session.backward(ppo_loss, *minibatch)  #+
            session.clip_grad_norm_(max_grad_norm)  #+
            optimizer.step()  #+
            optimizer.zero_grad()
#-            loss.backward()
#-            nn.utils.clip_grad_norm_(agent.parameters(), max_grad_norm)
#-            optimizer.step()
    print(f"update {update}: reward {reward:.3f} loss {loss.item():.4f}")
