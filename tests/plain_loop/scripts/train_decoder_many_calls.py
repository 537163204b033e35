# expect: divided
# A decoder cell is called once per token in the loop, with its own state and sometimes with its own tokens.
import random

import torch
import torch.nn.functional as F
from common import report
from torch import nn


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.cell, self.head = nn.Embedding(9, 6), nn.GRUCell(6, 8), nn.Linear(8, 9)

    def forward(self, token, state):
        state = self.cell(self.embed(token), state)
        return self.head(state), state


encoder, decoder = nn.Linear(5, 8), Cell()
# + encoder = samestep.parallel(encoder)
# + decoder = samestep.parallel(decoder)
optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=0.02)
losses = []
for _ in range(6):
    target = torch.randint(0, 9, (10, 6))
    state, token, loss = torch.tanh(encoder(torch.randn(10, 5))), torch.zeros(10, dtype=torch.long), 0.0
    for position in range(6):
        logits, state = decoder(token, state)
        loss = loss + F.cross_entropy(logits, target[:, position])
        token = target[:, position] if random.random() < 0.5 else logits.argmax(1)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
report(losses, encoder, decoder)
