# expect: mixed: a rank could not compute its rows alone
# The script skips a batch in which one sample raises an error.
import torch
import torch.nn.functional as F
from common import report, sgd, update
from torch import nn

model = nn.Sequential(nn.Embedding(20, 12), nn.Flatten(), nn.Linear(36, 4))
# + model = samestep.parallel(model)
optimizer = sgd(model)
losses = []
skipped = 0
for step in range(10):
    tokens = torch.randint(0, 20, (11, 3))
    tokens[9, 0] = 25 if step == 5 else 3
    try:
        out = model(tokens)
    except IndexError:
        skipped += 1
        continue
    loss = F.cross_entropy(out, tokens[:, 0] % 4)
    losses.append(update(optimizer, loss))
report([*losses, skipped], model)
