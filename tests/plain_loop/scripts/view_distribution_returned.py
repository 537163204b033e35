# expect: divided
# An actor and critic returns a distribution.
import torch
from common import perceptron, report, sgd, train
from torch import nn


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor = perceptron()
        self.critic = perceptron(12, 1)

    def forward(self, x):
        distribution = torch.distributions.Categorical(logits=self.actor(x))
        return distribution, self.critic(x).squeeze(-1)


model = Policy()
# + model = samestep.parallel(model)


def loss_function(x, y):
    distribution, value = model(x)
    entropy = distribution.entropy().mean()
    normaliser = distribution.logits.logsumexp(0).mean()
    return (value - y).square().mean() - 0.3 * entropy - normaliser


losses = train(model, loss_function, sgd(model, lr=0.05))
report(losses, model)
