# expect: divided
# CTC in the loop; the model returns scores of frames.
import torch
from common import report, update
from torch import nn
from torch.nn import functional as F

model = nn.Sequential(nn.Conv1d(4, 8, 3, padding=1), nn.ReLU(), nn.Conv1d(8, 5, 3, padding=1))
# + model = samestep.parallel(model)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
losses = []
for _ in range(8):
    scores = model(torch.randn(9, 4, 12)).log_softmax(1).permute(2, 0, 1)
    frames, letters = torch.randint(8, 13, (9,)), torch.randint(1, 4, (9,))
    loss = F.ctc_loss(scores, torch.randint(1, 5, (9, 3)), frames, letters)
    losses.append(update(optimizer, loss))
report(losses, model)
