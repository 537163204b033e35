"""The schedule has the steps of one process; accelerate makes one step for each process."""

import torch
from accelerate_parts import count_gathered, end, start, train_one_epoch
from parts import dataset
from torch.utils.data import DataLoader

accelerator, net, optimizer, loader = start()
validation = DataLoader(dataset(37), 8)
length = 3 * len(loader) // 2
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / length))
net, optimizer, loader, validation, schedule = accelerator.prepare(net, optimizer, loader, validation, schedule)
for _ in range(3):
    train_one_epoch(accelerator, net, optimizer, loader, schedule)
    count_gathered(accelerator, net, validation)
end(accelerator)
