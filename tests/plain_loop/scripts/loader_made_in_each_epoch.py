# expect: divided
# A loader that is made in each epoch, of a part of a data set, with an epoch that is left early.
import torch
import torch.nn.functional as F
from common import images, report, sgd, update
from torch import nn
from torch.utils.data import DataLoader, random_split

train, _ = random_split(images(70), [50, 20], generator=torch.Generator().manual_seed(2))
model = nn.Sequential(nn.Flatten(), nn.Linear(100, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 5))
# + model = samestep.parallel(model)
optimizer = sgd(model, lr=0.05)
losses = []
for epoch in range(4):
    loader = DataLoader(train, batch_size=9, shuffle=True, num_workers=epoch % 2)
    # + loader = samestep.loader(loader)
    for number, (x, y) in enumerate(loader):
        if epoch == 1 and number == 3:
            break
        loss = F.cross_entropy(model(x), y)
        losses.append(update(optimizer, loss))
report(losses, model)
