# expect: divided
# Supervised contrastive loss: positives are all samples of the same class in the batch.
import torch
from common import report
from torch import nn
from torch.nn import functional as F

model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 5))
# + model = samestep.parallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
losses = []
for _ in range(10):
    x, y = torch.randn(12, 8), torch.randint(0, 3, (12,))
    z = F.normalize(model(x), dim=1)
    others = ~torch.eye(12, dtype=torch.bool)
    positive = (y[:, None] == y) & others
    logits = z @ z.T / 0.3
    log_p = logits - torch.logsumexp(logits.masked_fill(~others, float("-inf")), dim=1, keepdim=True)
    loss = -((log_p * positive).sum(1) / positive.sum(1).clamp(min=1)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
report(losses, model)
