# expect: divided
# A shuffled loader of large batches with persistent workers, and one for evaluation with a short last batch.
import torch
import torch.nn.functional as F
from common import images, report, sgd, update
from torch import nn
from torch.utils.data import DataLoader

model = nn.Sequential(
    nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveMaxPool2d(2), nn.Flatten(), nn.Linear(16, 5)
)
# + model = samestep.parallel(model)
optimizer = sgd(model, lr=0.05)
train = DataLoader(images(66, size=32), batch_size=11, shuffle=True, num_workers=2, persistent_workers=True)
test = DataLoader(images(29, size=32, seed=1), batch_size=12)
# + train = samestep.loader(train)
# + test = samestep.loader(test)
losses = []
for epoch in range(3):
    model.train()
    for x, y in train:
        loss = F.cross_entropy(model(x), y)
        losses.append(update(optimizer, loss))
    model.eval()
    with torch.no_grad():
        right = sum((model(x).argmax(1) == y).sum().item() for x, y in test)
    losses.append(right / len(test.dataset))
report([*losses, torch.rand(())], model)
