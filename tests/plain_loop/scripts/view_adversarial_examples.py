# expect: divided
# Adversarial training: the gradient of the inputs alone, then the step.
import torch
import torch.nn.functional as F
from common import perceptron, report, train

model = perceptron()
# + model = samestep.parallel(model)


def loss_function(x, y):
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(F.cross_entropy(model(x), y), x)
    attacked = (x + 0.1 * gradient.sign()).detach()
    return F.cross_entropy(model(attacked), y)


losses = train(model, loss_function)
report(losses, model)
