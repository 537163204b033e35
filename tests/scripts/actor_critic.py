"""Actor-critic with two heads: the loss of an episode is a sum over actions that were chosen one by one."""

import random
from collections import namedtuple

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.distributions import Categorical

SavedAction = namedtuple("SavedAction", ["log_prob", "value"])
gamma = 0.9
torch.manual_seed(543)
random.seed(543)


class Corridor:
    """Fuel decreases, wind pushes; the reward is to be near the middle."""

    def reset(self):
        self.place, self.wind, self.time = random.uniform(-1, 1), random.uniform(-0.2, 0.2), 0
        return [self.place, self.wind, 1.0]

    def step(self, action):
        self.place += self.wind + (-0.25, 0.0, 0.25)[action]
        self.wind = 0.8 * self.wind + random.gauss(0, 0.05)
        self.time += 1
        done = abs(self.place) > 2 or self.time == 30
        return [self.place, self.wind, 1 - self.time / 30], 1.0 - abs(self.place), done


class Policy(nn.Module):
    """Actor and critic in one model."""

    def __init__(self):
        super().__init__()
        self.affine1 = nn.Linear(3, 64)
        self.action_head = nn.Linear(64, 3)
        self.value_head = nn.Linear(64, 1)
        self.saved_actions = []
        self.rewards = []

    def forward(self, x):
        x = F.relu(self.affine1(x))
        action_prob = F.softmax(self.action_head(x), dim=-1)
        return action_prob, self.value_head(x)


env = Corridor()
model = Policy()
optimizer = optim.Adam(model.parameters(), lr=2e-2)


def select_action(state):
    probs, state_value = model(torch.tensor(state))
    m = Categorical(probs)
    action = m.sample()
    model.saved_actions.append(SavedAction(m.log_prob(action), state_value))
    return action.item()


def finish_episode():
    R = 0
    policy_losses, value_losses, returns = [], [], []
    for r in model.rewards[::-1]:
        R = r + gamma * R
        returns.insert(0, R)
    returns = torch.tensor(returns)
    returns = (returns - returns.mean()) / (returns.std() + 1e-6)
    for (log_prob, value), R in zip(model.saved_actions, returns):
        advantage = R - value.item()
        policy_losses.append(-log_prob * advantage)
        value_losses.append(F.smooth_l1_loss(value, torch.tensor([R])))
    optimizer.zero_grad()
    loss = torch.stack(policy_losses).sum() + torch.stack(value_losses).sum()
    loss.backward()
    optimizer.step()
    del model.rewards[:]
    del model.saved_actions[:]
    return loss.item()


running_reward = 0
for i_episode in range(1, 31):
    state = env.reset()
    ep_reward = 0
    done = False
    while not done:
        action = select_action(state)
        state, reward, done = env.step(action)
        model.rewards.append(reward)
        ep_reward += reward
    running_reward = 0.1 * ep_reward + 0.9 * running_reward
    loss = finish_episode()
    if i_episode % 5 == 0:
        print(
            f"Episode {i_episode}\tLast reward: {ep_reward:.2f}\tAverage reward: {running_reward:.2f}\tLoss: {loss:.4f}"
        )
