# expect: divided
# Outputs of 2,000 columns per token.
import torch
import torch.nn.functional as F
from common import report, sgd, update
from torch import nn

model = nn.Embedding(50, 2000)
# + model = samestep.parallel(model)
optimizer = sgd(model)
tokens = torch.arange(12).repeat(20, 1).T
losses = []
for _ in range(10):
    logits = model(tokens).flatten(0, 1)
    loss = F.cross_entropy(logits, tokens.flatten())
    losses.append(update(optimizer, loss))
report(losses, model)
