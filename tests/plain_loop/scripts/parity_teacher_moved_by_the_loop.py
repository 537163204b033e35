# expect: divided
# A mean teacher is moved in each step; the model is called twice.
import copy

import torch
import torch.nn.functional as F
from common import perceptron, report, train

model = perceptron()
teacher = copy.deepcopy(model)
# + model = samestep.parallel(model)
# + teacher = samestep.parallel(teacher)


def loss_function(x, y):
    with torch.no_grad():
        for own, other in zip(teacher.parameters(), model.parameters()):
            own.mul_(0.9).add_(other, alpha=0.1)
    return F.cross_entropy(model(x), y) + F.mse_loss(model(x), teacher(x).detach())


losses = train(model, loss_function)
report(losses, model, teacher)
