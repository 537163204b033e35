# expect: divided
# SimCLR: two augmented views, two calls of one encoder per step, and a contrastive loss over the batch.
import torch
from common import report
from torch import nn
from torch.nn import functional as F

encoder = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 6))
# + encoder = samestep.parallel(encoder)
optimizer = torch.optim.Adam(encoder.parameters(), lr=0.01)
losses = []
for _ in range(8):
    x = torch.randn(10, 8)
    first = encoder(x + 0.1 * torch.randn_like(x))
    second = encoder(x * (torch.rand_like(x) > 0.2))
    z = F.normalize(torch.cat([first, second]), dim=1)
    similar = (z @ z.T / 0.5).masked_fill(torch.eye(20, dtype=torch.bool), float("-inf"))
    loss = F.cross_entropy(similar, (torch.arange(20) + 10) % 20)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
report(losses, encoder)
