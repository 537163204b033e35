# expect: whole: draw
# LSTM with dropout between its layers: the numbers are drawn inside one operation of torch.
import torch
from common import report, update
from torch import nn


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(4, 6, num_layers=2, dropout=0.3, bidirectional=True, batch_first=True)
        self.head = nn.Linear(12, 3)

    def forward(self, x):
        return self.head(self.rnn(x)[0])


model = Tagger()
# + model = samestep.parallel(model)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
losses = []
for _ in range(6):
    loss = nn.functional.cross_entropy(model(torch.randn(9, 5, 4)).flatten(0, 1), torch.randint(0, 3, (45,)))
    losses.append(update(optimizer, loss))
report([*losses, torch.rand(())], model)
