"""Sums over tokens are divided by the number of tokens of all ranks; the checkpoint is saved by Accelerate."""

import torch
import torch.nn.functional as F
from accelerate_parts import end, start, train

accelerator, net, optimizer, loader = start()
net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
for _ in range(2):
    for inputs, labels in loader:
        targets = torch.where(inputs[:, 0] > 0, labels, -100)  # padding
        total = accelerator.reduce((targets != -100).sum())
        loss = F.cross_entropy(net(inputs), targets, reduction="sum")
        accelerator.backward(loss * accelerator.num_processes / total)
        optimizer.step()
        optimizer.zero_grad()
train(accelerator, net, optimizer, accelerator.skip_first_batches(loader, 3))
accelerator.save_state("accelerate")
accelerator.wait_for_everyone()
accelerator.load_state("accelerate")
train(accelerator, net, optimizer, loader)
end(accelerator)
