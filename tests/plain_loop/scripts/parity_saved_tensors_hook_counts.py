# expect: whole: inside of hooks of saved tensors
# Hooks of saved tensors around the call of the model count, and the count steers the gradient.
import torch
import torch.nn.functional as F
from common import perceptron, report, train

unpacked = []


def pack(tensor):
    return tensor


def unpack(tensor):
    unpacked.append(1)
    if tensor.is_floating_point():
        return tensor * (1 + 1e-3 / len(unpacked))
    return tensor


model = perceptron()
# + model = samestep.parallel(model)


def loss_function(x, y):
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return F.cross_entropy(model(x), y)


losses = train(model, loss_function)
report(losses, model)
