"""Outputs are gathered, and the padding is cut off."""

import torch
import torch.distributed as dist
from parts import dataset, end, replicated, sgd, sharded, start, train

rank, size = start()
net = replicated()
train(net, sharded(dataset()), sgd(net))
validation = dataset(37)
outputs = []
net.eval()
for _ in range(2):  # evaluations have the same order
    outputs.clear()
    with torch.no_grad():
        for inputs, _ in sharded(validation, shuffle=False):
            outputs.append(net(inputs).argmax(1))
local = torch.cat(outputs)
parts = [torch.empty_like(local) for _ in range(size)]
dist.all_gather(parts, local)
predictions = torch.stack(parts, 1).flatten()[: len(validation)]
print(float((predictions == validation.tensors[1]).float().mean()))
end()
