# expect: divided
# limit: 120
# imports: torch._dynamo.backends.debugging torch._functorch.compilers torch._dynamo.repro.after_aot
# A part of the model is compiled.
import torch
import torch.nn.functional as F
from common import report, train
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.compile(nn.Sequential(nn.Linear(12, 16), nn.Tanh()), backend="aot_eager")
        self.dropout = nn.Dropout(0.2)
        self.out = nn.Linear(16, 4)

    def forward(self, x):
        return self.out(self.dropout(self.first(x)))


model = Net()
# + model = samestep.parallel(model)
losses = train(model, lambda x, y: F.cross_entropy(model(x), y))
report(losses, model)
