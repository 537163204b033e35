# expect: mixed: is called under torch.func
# Meta learning by torch.func: the model is called inside of a transformation.
import torch
import torch.nn.functional as F
from common import perceptron, report, train

model = perceptron()
# + model = samestep.parallel(model)
parameters = dict(model.named_parameters())


def task_loss(weights, x, y):
    return F.cross_entropy(torch.func.functional_call(model, weights, (x,)), y)


def loss_function(x, y):
    gradients = torch.func.grad(task_loss)(parameters, x[:5], y[:5])
    adapted = {name: parameters[name] - 0.1 * gradients[name] for name in parameters}
    return task_loss(adapted, x[5:], y[5:])


losses = train(model, loss_function)
report(losses, model)
