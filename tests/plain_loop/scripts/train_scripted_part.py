# expect: whole: has parameters of torch.jit
# A part of the model is compiled by torch.jit.script.
import torch
import torch.nn.functional as F
from common import perceptron, report, train
from torch import nn

model = nn.Sequential(nn.Linear(12, 12), torch.jit.script(perceptron()))
# + model = samestep.parallel(model)
losses = train(model, lambda x, y: F.cross_entropy(model(x), y))
report(losses, model)
