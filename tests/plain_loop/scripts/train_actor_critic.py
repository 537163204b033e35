# expect: divided
# Advantage actor-critic: actions are sampled in the loop, and two outputs of one model enter the loss.
import torch
from common import batches, report
from torch import nn
from torch.distributions import Categorical


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 16), nn.Tanh())
        self.actor, self.critic = nn.Linear(16, 4), nn.Linear(16, 1)

    def forward(self, state):
        hidden = self.body(state)
        return self.actor(hidden), self.critic(hidden).squeeze(1)


model = ActorCritic()
# + model = samestep.parallel(model)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
losses = []
for state, good in batches():
    logits, value = model(state)
    policy = Categorical(logits=logits)
    action = policy.sample()
    reward = (action == good).double()
    advantage = reward - value
    normal = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    actor_loss = -(policy.log_prob(action) * normal.detach()).mean()
    loss = actor_loss + 0.5 * advantage.pow(2).mean() - 0.01 * policy.entropy().mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    losses += [loss.item(), reward.sum().item()]
report(losses, model)
