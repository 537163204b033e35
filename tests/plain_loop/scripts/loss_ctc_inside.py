# expect: whole
# CTC inside a model for speech. Its mean divides by the lengths of the targets, which arrive joined in one tensor.
import torch
from common import report, update
from torch import nn


class Speech(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(4, 8, batch_first=True)
        self.head = nn.Linear(8, 5)
        self.criterion = nn.CTCLoss(zero_infinity=True)

    def forward(self, sound, targets, frames, letters):
        scores = self.head(self.rnn(sound)[0]).log_softmax(2)
        return self.criterion(scores.transpose(0, 1), targets, frames, letters)


model = Speech()
# + model = samestep.parallel(model)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
losses = []
for _ in range(6):
    letters = torch.randint(1, 4, (9,))
    targets = torch.randint(1, 5, (int(letters.sum()),))
    loss = model(torch.randn(9, 12, 4), targets, torch.randint(8, 13, (9,)), letters)
    losses.append(update(optimizer, loss))
report(losses, model)
