"""Twin delayed policy gradients, in the manner of sfujim/TD3's TD3.py, utils.py and main.py."""

import copy

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
#+
from orchestrator import Session, Variables  #+

device = torch.device("cpu")


class ReplayBuffer(object):
    def __init__(self, state_dim, action_dim, max_size=256):
        self.max_size = max_size
        self.ptr = 0
        self.size = 0
        self.state = np.zeros((max_size, state_dim))
        self.action = np.zeros((max_size, action_dim))
        self.next_state = np.zeros((max_size, state_dim))
        self.reward = np.zeros((max_size, 1))
        self.not_done = np.zeros((max_size, 1))
        self.device = torch.device("cpu")

    def add(self, state, action, next_state, reward, done):
        self.state[self.ptr] = state
        self.action[self.ptr] = action
        self.next_state[self.ptr] = next_state
        self.reward[self.ptr] = reward
        self.not_done[self.ptr] = 1.0 - done
        self.ptr = (self.ptr + 1) % self.max_size
        self.size = min(self.size + 1, self.max_size)

    def sample(self, batch_size):
        ind = np.random.randint(0, self.size, size=batch_size)
        return (
            torch.FloatTensor(self.state[ind]).to(self.device),
            torch.FloatTensor(self.action[ind]).to(self.device),
            torch.FloatTensor(self.next_state[ind]).to(self.device),
            torch.FloatTensor(self.reward[ind]).to(self.device),
            torch.FloatTensor(self.not_done[ind]).to(self.device),
        )


class Actor(nn.Module):
    def __init__(self, state_dim, action_dim, max_action):
        super(Actor, self).__init__()
        self.l1, self.l2, self.l3 = nn.Linear(state_dim, 32), nn.Linear(32, 32), nn.Linear(32, action_dim)
        self.max_action = max_action

    def forward(self, state):
        a = F.relu(self.l2(F.relu(self.l1(state))))
        return self.max_action * torch.tanh(self.l3(a))


class Critic(nn.Module):
    def __init__(self, state_dim, action_dim):
        super(Critic, self).__init__()
        self.l1, self.l2, self.l3 = nn.Linear(state_dim + action_dim, 32), nn.Linear(32, 32), nn.Linear(32, 1)
        self.l4, self.l5, self.l6 = nn.Linear(state_dim + action_dim, 32), nn.Linear(32, 32), nn.Linear(32, 1)

    def forward(self, state, action):
        sa = torch.cat([state, action], 1)
        q2 = self.l6(F.relu(self.l5(F.relu(self.l4(sa)))))
        return self.Q1(state, action), q2

    def Q1(self, state, action):
        sa = torch.cat([state, action], 1)
        return self.l3(F.relu(self.l2(F.relu(self.l1(sa)))))


class TD3(object):
    def __init__(self, state_dim, action_dim, max_action, discount=0.99, tau=0.005, policy_noise=0.2, noise_clip=0.5, policy_freq=2):
        self.actor = Actor(state_dim, action_dim, max_action).to(device)
        self.actor_target = copy.deepcopy(self.actor)
        self.actor_optimizer = torch.optim.Adam(self.actor.parameters(), lr=3e-4)
        self.critic = Critic(state_dim, action_dim).to(device)
        self.critic_target = copy.deepcopy(self.critic)
        self.critic_optimizer = torch.optim.Adam(self.critic.parameters(), lr=3e-4)
        self.max_action = max_action
        self.discount, self.tau = discount, tau
        self.policy_noise, self.noise_clip, self.policy_freq = policy_noise, noise_clip, policy_freq
        self.total_it = 0

    def select_action(self, state):
        state = torch.FloatTensor(state.reshape(1, -1)).to(device)
        return self.actor(state).cpu().data.numpy().flatten()

    def train(self, replay_buffer, batch_size=256):
        self.total_it += 1
        # Sample replay buffer
        state, action, next_state, reward, not_done = replay_buffer.sample(batch_size)
        with torch.no_grad():
            # Select action according to policy and add clipped noise
            noise = (torch.randn_like(action) * self.policy_noise).clamp(-self.noise_clip, self.noise_clip)
            next_action = (self.actor_target(next_state) + noise).clamp(-self.max_action, self.max_action)
            # Compute the target Q value
            target_Q1, target_Q2 = self.critic_target(next_state, next_action)
            target_Q = torch.min(target_Q1, target_Q2)
            target_Q = reward + not_done * self.discount * target_Q
#-        # Get current Q estimates
#-        current_Q1, current_Q2 = self.critic(state, action)
#-        # Compute critic loss
#-        critic_loss = F.mse_loss(current_Q1, target_Q) + F.mse_loss(current_Q2, target_Q)
        # Optimize the critic
        self.critic_optimizer.zero_grad()
#-        critic_loss.backward()
        session.backward(lambda s, a, q: sum(F.mse_loss(each, q) for each in self.critic(s, a)), state, action, target_Q)  #+
        self.critic_optimizer.step()
        # Delayed policy updates
        if self.total_it % self.policy_freq == 0:
#-            # Compute actor loss
#-            actor_loss = -self.critic.Q1(state, self.actor(state)).mean()
            # Optimize the actor
            self.actor_optimizer.zero_grad()
#-            actor_loss.backward()
            session.backward(lambda s: -self.critic.Q1(s, self.actor(s)).mean(), state)  #+
            self.actor_optimizer.step()
            # Update the frozen target models
            for param, target_param in zip(self.critic.parameters(), self.critic_target.parameters()):
                target_param.data.copy_(self.tau * param.data + (1 - self.tau) * target_param.data)
            for param, target_param in zip(self.actor.parameters(), self.actor_target.parameters()):
                target_param.data.copy_(self.tau * param.data + (1 - self.tau) * target_param.data)


class Env:
    """Push a cart to the origin."""

    def reset(self):
        self.t, self.s = 0, np.random.uniform(-1, 1, 2)
        return self.s

    def step(self, action):
        x, v = self.s
        v = np.clip(v + 0.1 * float(action[0]), -1, 1)
        self.t, self.s = self.t + 1, np.array([x + 0.1 * v, v])
        return self.s, -float(x * x + 0.1 * v * v), self.t >= 20


torch.manual_seed(0)
np.random.seed(0)
env, start_timesteps, max_timesteps, batch_size, expl_noise, max_action = Env(), 16, 100, 32, 0.1, 1.0
policy = TD3(2, 1, max_action)
replay_buffer = ReplayBuffer(2, 1)
state, done = env.reset(), False
episode_reward, episode_timesteps, episode_num = 0, 0, 0
#-for t in range(max_timesteps):
more = Variables(globals(), "state", "done", "episode_reward", "episode_timesteps", "episode_num")  #+
session = Session(*(each for each in vars(policy).values() if hasattr(each, "state_dict")), policy, replay_buffer, env, more, microbatches=4)  #+
for t in session.steps(max_timesteps):  #+
    episode_timesteps += 1
    # Select action randomly or according to policy
    if t < start_timesteps:
        action = np.random.uniform(-1, 1, 1)
    else:
        action = (policy.select_action(np.array(state)) + np.random.normal(0, max_action * expl_noise, size=1)).clip(-max_action, max_action)
    # Perform action
    next_state, reward, done = env.step(action)
    # Store data in replay buffer
    replay_buffer.add(state, action, next_state, reward, float(done))
    state = next_state
    episode_reward += reward
    # Train agent after collecting sufficient data
    if t >= start_timesteps:
        policy.train(replay_buffer, batch_size)
    if done:
        print(f"Total T: {t + 1} Episode Num: {episode_num + 1} Episode T: {episode_timesteps} Reward: {episode_reward:.3f}")
        state, done = env.reset(), False
        episode_reward = 0
        episode_timesteps = 0
        episode_num += 1
