# expect: divided
# Sequences of different lengths are packed in the forward.
import torch
import torch.nn.functional as F
from common import ROWS, report, train
from torch import nn


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(1, 8, batch_first=True)
        self.out = nn.Linear(8, 4)

    def forward(self, x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(x[:, :, None], lengths, batch_first=True, enforce_sorted=False)
        _, (hidden, _) = self.lstm(packed)
        return self.out(hidden[-1])


model = Recurrent()
# + model = samestep.parallel(model)
lengths = torch.arange(ROWS) % 9 + 3
losses = train(model, lambda x, y: F.cross_entropy(model(x, lengths), y))
report(losses, model)
