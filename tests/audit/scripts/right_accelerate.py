"""Accumulation, a schedule of the length before `prepare`, and `gather_for_metrics`."""

import torch
from accelerate_parts import count_gathered, end, start, train_one_epoch
from parts import dataset
from torch.utils.data import DataLoader

accelerator, net, optimizer, loader = start(gradient_accumulation_steps=2)
validation = DataLoader(dataset(37), 8)
length = 3 * len(loader)  # before the loader is divided
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / length))
net, optimizer, loader, validation, schedule = accelerator.prepare(net, optimizer, loader, validation, schedule)
for _ in range(3):
    train_one_epoch(accelerator, net, optimizer, loader, schedule)
    assert count_gathered(accelerator, net, validation)[1] == 37
end(accelerator)
