"""Equal numbers of samples: the mean of the means of ranks, which an audit cannot judge."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from parts import dataset, end, replicated, sgd, sharded, start, train

_, size = start()
net = replicated()
train(net, sharded(dataset()), sgd(net))
losses = []
net.eval()
with torch.no_grad():
    for inputs, targets in sharded(dataset(32), shuffle=False):
        losses.append(F.cross_entropy(net(inputs), targets))
loss = torch.stack(losses).mean()
dist.all_reduce(loss)
print(f"loss {loss / size:.3f}")
end()
