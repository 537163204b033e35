"""Deep Q-learning in a maze: replay buffer, target network with soft updates, epsilon-greedy actions by `random`."""

import math
import random
from collections import deque, namedtuple

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim

seed = 42
random.seed(seed)
torch.manual_seed(seed)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

Transition = namedtuple("Transition", ("state", "action", "next_state", "reward"))

BATCH_SIZE = 48
GAMMA = 0.95
EPS_START = 0.9
EPS_END = 0.05
EPS_DECAY = 100
TAU = 0.05
LR = 3e-3


class Maze:
    """A grid with walls; each step costs, the goal in the corner pays."""

    size = 4
    walls = frozenset({(1, 1), (3, 1)})
    moves = ((0, 1), (1, 0), (0, -1), (-1, 0))

    def reset(self):
        self.position = (0, random.randrange(2))
        self.steps = 0
        return self.observe()

    def observe(self):
        x, y = self.position
        return [x / self.size, y / self.size, *(float(self.blocked(dx, dy)) for dx, dy in self.moves)]

    def blocked(self, dx, dy):
        x, y = self.position[0] + dx, self.position[1] + dy
        return (x, y) in self.walls or not (0 <= x < self.size and 0 <= y < self.size)

    def step(self, action):
        dx, dy = self.moves[action]
        if not self.blocked(dx, dy):
            self.position = (self.position[0] + dx, self.position[1] + dy)
        self.steps += 1
        terminated = self.position == (self.size - 1, self.size - 1)
        reward = 1.0 if terminated else -0.02 * (2 * self.size - 2 - sum(self.position))
        return self.observe(), reward, terminated, self.steps >= 30


class ReplayMemory:
    def __init__(self, capacity):
        self.memory = deque(maxlen=capacity)

    def push(self, *args):
        self.memory.append(Transition(*args))

    def sample(self, batch_size):
        return random.sample(self.memory, batch_size)

    def __len__(self):
        return len(self.memory)


class DQN(nn.Module):
    def __init__(self, n_observations, n_actions):
        super().__init__()
        self.layer1 = nn.Linear(n_observations, 64)
        self.layer2 = nn.Linear(64, 64)
        self.layer3 = nn.Linear(64, n_actions)

    def forward(self, x):
        x = F.relu(self.layer1(x))
        x = F.relu(self.layer2(x))
        return self.layer3(x)


env = Maze()
n_actions = len(Maze.moves)
policy_net = DQN(len(env.reset()), n_actions).to(device)
target_net = DQN(len(env.reset()), n_actions).to(device)
target_net.load_state_dict(policy_net.state_dict())
optimizer = optim.AdamW(policy_net.parameters(), lr=LR, amsgrad=True)
memory = ReplayMemory(300)
steps_done = 0


def select_action(state):
    global steps_done
    sample = random.random()
    eps_threshold = EPS_END + (EPS_START - EPS_END) * math.exp(-1.0 * steps_done / EPS_DECAY)
    steps_done += 1
    if sample > eps_threshold:
        with torch.no_grad():
            return policy_net(state).max(1).indices.view(1, 1)
    return torch.tensor([[random.randrange(n_actions)]], device=device, dtype=torch.long)


def optimize_model():
    if len(memory) < BATCH_SIZE:
        return None
    transitions = memory.sample(BATCH_SIZE)
    batch = Transition(*zip(*transitions))
    non_final_mask = torch.tensor([s is not None for s in batch.next_state], device=device, dtype=torch.bool)
    non_final_next_states = torch.cat([s for s in batch.next_state if s is not None])
    state_batch = torch.cat(batch.state)
    action_batch = torch.cat(batch.action)
    reward_batch = torch.cat(batch.reward)

    state_action_values = policy_net(state_batch).gather(1, action_batch)
    next_state_values = torch.zeros(BATCH_SIZE, device=device)
    with torch.no_grad():
        next_state_values[non_final_mask] = target_net(non_final_next_states).max(1).values
    expected_state_action_values = (next_state_values * GAMMA) + reward_batch
    criterion = nn.SmoothL1Loss()
    loss = criterion(state_action_values, expected_state_action_values.unsqueeze(1))
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_value_(policy_net.parameters(), 100)
    optimizer.step()
    return loss.item(), len(non_final_next_states)


updates = 0
for i_episode in range(12):
    state = torch.tensor(env.reset(), device=device).unsqueeze(0)
    total, losses = 0.0, []
    while True:
        action = select_action(state)
        observation, reward, terminated, truncated = env.step(action.item())
        total += reward
        reward = torch.tensor([reward], device=device)
        next_state = None if terminated else torch.tensor(observation, device=device).unsqueeze(0)
        memory.push(state, action, next_state, reward)
        state = next_state
        if steps_done % 3 == 0 and updates < 40:
            result = optimize_model()
            if result is not None:
                updates += 1
                losses.append(result[0])
                if updates % 5 == 0:
                    print(f"update {updates}: loss {result[0]:.5f}, {result[1]} states are not final")
                target_net_state_dict = target_net.state_dict()
                policy_net_state_dict = policy_net.state_dict()
                for key in policy_net_state_dict:
                    target_net_state_dict[key] = policy_net_state_dict[key] * TAU + target_net_state_dict[key] * (
                        1 - TAU
                    )
                target_net.load_state_dict(target_net_state_dict)
        if terminated or truncated:
            break
    print(f"Episode {i_episode}: duration {env.steps}, reward {total:.2f}, memory {len(memory)}")
print("Complete")
