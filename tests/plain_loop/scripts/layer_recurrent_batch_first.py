# expect: divided
# LSTM, GRU and a plain recurrent network in one model, batch first, without a state from outside.
import torch
from common import report, update
from torch import nn


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 6, num_layers=2, batch_first=True, proj_size=5)
        self.gru = nn.GRU(5, 6, batch_first=True, bidirectional=True)
        self.rnn = nn.RNN(12, 4, batch_first=True, nonlinearity="relu")
        self.cell = nn.LSTMCell(4, 3)

    def forward(self, x):
        x = self.rnn(self.gru(self.lstm(x)[0])[0])[0]
        state = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        return state[0]


model = Recurrent()
# + model = samestep.parallel(model)
optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01)
losses = []
for _ in range(8):
    loss = nn.functional.cross_entropy(model(torch.randn(9, 5, 4)), torch.randint(0, 3, (9,)))
    losses.append(update(optimizer, loss))
report(losses, model)
