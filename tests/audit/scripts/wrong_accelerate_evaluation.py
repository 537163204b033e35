"""The padding of the last batches is counted."""

import torch
from accelerate_parts import end, start, train_one_epoch
from parts import count_right, dataset
from torch.utils.data import DataLoader

accelerator, net, optimizer, loader = start()
validation = DataLoader(dataset(37), 8)
length = 3 * len(loader)  # before the loader is divided
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / length))
net, optimizer, loader, validation, schedule = accelerator.prepare(net, optimizer, loader, validation, schedule)
for _ in range(3):
    train_one_epoch(accelerator, net, optimizer, loader, schedule)
    counts = accelerator.reduce(count_right(net, validation))
end(accelerator)
