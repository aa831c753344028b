"""Actor and critic, each a network with a loss and an optimizer of its own, on a line world."""

import argparse

import torch
from torch import nn, optim
from torch.distributions import Categorical
from torch.nn import functional as F
#+
from orchestrator import Session  #+

SIZE, LENGTH = 8, 12


def act(state, action):
    """Left or right; the right end is rewarded."""
    state = (state + 2 * action - 1).clamp(0, SIZE - 1)
    return state, (state == SIZE - 1).float()


class Memory:
    def __init__(self, states, actions, returns):
        self.states, self.actions, self.returns = states, actions, returns


class Agent:
    def __init__(self, lr, gamma):
        self.actor = nn.Sequential(nn.Embedding(SIZE, 16), nn.Tanh(), nn.Linear(16, 2))
        self.critic = nn.Sequential(nn.Embedding(SIZE, 16), nn.Tanh(), nn.Linear(16, 1))
        self.actor_optim = optim.Adam(self.actor.parameters(), lr=lr)
        self.critic_optim = optim.Adam(self.critic.parameters(), lr=10 * lr)
        self.gamma = gamma
        self.entropy_weight = 0.05

    @torch.no_grad()
    def rollout(self, count):
        state = torch.randint(SIZE // 2, (count,))
        states, actions, rewards = [], [], []
        for _ in range(LENGTH):
            action = Categorical(logits=self.actor(state)).sample()
            states.append(state)
            actions.append(action)
            state, reward = act(state, action)
            rewards.append(reward)
        returns, R = [], torch.zeros(count)
        for reward in reversed(rewards):
            R = reward + self.gamma * R
            returns.insert(0, R)
        return Memory(torch.cat(states), torch.cat(actions), torch.cat(returns))

    def critic_loss(self, memory):
        return F.smooth_l1_loss(self.critic(memory.states).squeeze(1), memory.returns)

    def actor_loss(self, memory):
        advantage = memory.returns - self.critic(memory.states).squeeze(1).detach()
        dist = Categorical(logits=self.actor(memory.states))
        gain = dist.log_prob(memory.actions) * advantage
        return -(gain + self.entropy_weight * dist.entropy()).mean()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--lr", type=float, default=5e-3)
    args = parser.parse_args()
    torch.manual_seed(777)
    agent = Agent(args.lr, 0.9)
    scores = []
#-    for it in range(args.iterations):
    session = Session(agent.actor, agent.critic, agent.actor_optim, agent.critic_optim, agent)  #+
    for it in session.steps(args.iterations):  #+
        memory = agent.rollout(32)
        parts = [Memory(*part) for part in zip(*[x.chunk(4) for x in vars(memory).values()])]  #+
        agent.critic_optim.zero_grad()
#-        value_loss = agent.critic_loss(memory)
#-        value_loss.backward()
        value_loss = session.backward(agent.critic_loss, parts).loss  #+
        agent.critic_optim.step()
        agent.actor_optim.zero_grad()
#-        policy_loss = agent.actor_loss(memory)
#-        policy_loss.backward()
        policy_loss = session.backward(agent.actor_loss, parts).loss  #+
        agent.actor_optim.step()
        agent.entropy_weight *= 0.95
        scores.append(memory.returns.mean().item())
        if it % 5 == 0:
            print(f"{it}: value {value_loss:.4f} policy {policy_loss:.4f} score {scores[-1]:.3f}")


if __name__ == "__main__":
    main()
