# expect: divided
# Sequences of different lengths, packed inside the model.
import torch
from common import report, update
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(4, 6, batch_first=True, bidirectional=True)
        self.head = nn.Linear(12, 2)

    def forward(self, x, lengths):
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        hidden, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return self.head(hidden.sum(1) / lengths[:, None])


model = Encoder()
# + model = samestep.parallel(model)
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
losses = []
for _ in range(8):
    loss = nn.functional.cross_entropy(
        model(torch.randn(9, 6, 4), torch.randint(1, 7, (9,))), torch.randint(0, 2, (9,))
    )
    losses.append(update(optimizer, loss))
report(losses, model)
