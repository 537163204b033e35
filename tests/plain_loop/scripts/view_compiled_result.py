# expect: divided
# limit: 120
# imports: torch._dynamo.backends.debugging torch._functorch.compilers torch._dynamo.repro.after_aot
# The model with the line is compiled.
import torch
import torch.nn.functional as F
from common import report, train
from torch import nn

model = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 4))
# + model = samestep.parallel(model)
compiled = torch.compile(model, backend="aot_eager")
losses = train(model, lambda x, y: F.cross_entropy(compiled(x), y))
report(losses, model)
