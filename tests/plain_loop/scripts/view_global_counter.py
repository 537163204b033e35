# expect: whole: changes the global variable count
# The forward counts in a global variable.
import torch.nn.functional as F
from common import perceptron, report, train
from torch import nn

count = 0


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = perceptron()

    def forward(self, x):
        global count
        count += 1
        return self.net(x) / count


model = Net()
# + model = samestep.parallel(model)
losses = train(model, lambda x, y: F.cross_entropy(model(x), y))
report([*losses, count], model)
