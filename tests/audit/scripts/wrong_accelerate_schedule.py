"""The schedule has the steps of one process; accelerate makes one step for each process."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from parts import dataset, model
from torch import nn
from torch.utils.data import DataLoader

accelerator = Accelerator(cpu=True)
set_seed(0, device_specific=True)
net = model(nn.BatchNorm1d(16), nn.Dropout(0.2))
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
loader, validation = DataLoader(dataset(), 4, shuffle=True), DataLoader(dataset(37), 8)
length = 3 * len(loader) // 2
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / length))
net, optimizer, loader, validation, schedule = accelerator.prepare(net, optimizer, loader, validation, schedule)
for _ in range(3):
    net.train()
    for inputs, targets in loader:
        with accelerator.accumulate(net):
            accelerator.backward(F.cross_entropy(net(inputs), targets))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    net.eval()
    right = count = 0
    with torch.no_grad():
        for inputs, targets in validation:
            outputs, labels = accelerator.gather_for_metrics((net(inputs).argmax(1), targets))
            right += int((outputs == labels).sum())
            count += len(labels)
accelerator.wait_for_everyone()
accelerator.end_training()
