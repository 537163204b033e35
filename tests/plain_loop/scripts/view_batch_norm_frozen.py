# expect: divided
# One batch norm is in evaluation mode in training; then the whole model is trained in evaluation mode.
import torch.nn.functional as F
from common import report, train
from torch import nn

model = nn.Sequential(
    nn.Linear(12, 8),
    nn.BatchNorm1d(8),
    nn.ReLU(),
    nn.Linear(8, 8),
    nn.BatchNorm1d(8),
    nn.Linear(8, 4),
)
# + model = samestep.parallel(model)
model.train()
model[1].eval()
losses = train(model, lambda x, y: F.cross_entropy(model(x), y))
model.eval()
losses += train(model, lambda x, y: F.cross_entropy(model(x), y))
report(losses, model)
