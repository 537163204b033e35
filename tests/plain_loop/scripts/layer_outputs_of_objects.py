# expect: divided
# Outputs in frozen dataclasses, dictionaries, and objects that compute, with sizes of the batch.
import dataclasses

import torch
import torch.nn.functional as F
from common import perceptron, report, train
from torch import nn


@dataclasses.dataclass(frozen=True)
class Heads:
    logits: torch.Tensor
    extra: list


@dataclasses.dataclass
class Output:
    loss: torch.Tensor
    prediction: object
    policy: torch.distributions.Categorical
    heads: Heads
    bag: dict


class Prediction:
    def __init__(self, logits, name):
        self.logits, self.name = logits, name
        self.rows, self.shape = len(logits), logits.shape

    def loss(self, y):
        assert self.rows == len(y)
        assert isinstance(self.shape, torch.Size)
        assert self.shape[0] == self.rows
        return F.cross_entropy(self.logits, y, reduction="sum") / self.rows


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = perceptron()

    def forward(self, x, y):
        logits = self.net(x)
        normal = torch.distributions.Normal(logits.tanh(), logits.exp())
        return Output(
            loss=F.cross_entropy(logits, y),
            prediction=Prediction(logits, "first"),
            policy=torch.distributions.Categorical(logits=logits),
            heads=Heads(logits * 2, [logits.square(), None]),
            bag=dict(normal=torch.distributions.Independent(normal, 1), rows=len(x)),
        )


model = Net()
# + model = samestep.parallel(model)


def loss_function(x, y):
    output = model(x, y)
    assert type(output.prediction) is Prediction
    assert output.bag["rows"] == len(x)
    assert output.bag["normal"].batch_shape == (len(x),)
    likelihood = output.bag["normal"].log_prob(torch.ones(4)).mean()
    loss = output.loss + output.prediction.loss(y) - 0.1 * output.policy.entropy().mean()
    return loss + 0.1 * output.heads.extra[0].mean() - 0.01 * likelihood


losses = train(model, loss_function)
report(losses, model)
