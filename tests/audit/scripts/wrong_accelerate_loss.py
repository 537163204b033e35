"""Each rank and each accumulated batch divides by its own number of tokens."""

import torch
import torch.nn.functional as F
from accelerate_parts import end, start

accelerator, net, optimizer, loader = start(gradient_accumulation_steps=2)
net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
for _ in range(3):
    for inputs, labels in loader:
        with accelerator.accumulate(net):
            targets = torch.where(inputs[:, 0] > 0, labels, -100)  # padding
            accelerator.backward(F.cross_entropy(net(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
end(accelerator)
