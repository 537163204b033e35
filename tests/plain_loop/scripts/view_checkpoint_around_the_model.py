# expect: mixed: checkpoint
# Checkpointing around the whole model by the script, of both kinds.
import torch.nn.functional as F
from common import batches, report, sgd
from torch import nn
from torch.utils.checkpoint import checkpoint

model = nn.Sequential(nn.Linear(12, 16), nn.Dropout(0.2), nn.Tanh(), nn.Linear(16, 16))
head = nn.Linear(16, 4)
# + model = samestep.parallel(model)
optimizer = sgd(model, head)
losses = []
for reentrant in (False, True):
    for x, y in batches(6):
        h = checkpoint(model, x.clone().requires_grad_(), use_reentrant=reentrant)
        loss = F.cross_entropy(head(h), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
report(losses, model, head)
