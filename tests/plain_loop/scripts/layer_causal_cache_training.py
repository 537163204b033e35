# expect: divided
# Segments of sequences with the states of the segment before, which come in and go out as tuples of tensors.
import torch
import torch.nn.functional as F
from common import report, sgd, update
from torch import nn


class Segments(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(15, 8)
        self.cell = nn.LSTMCell(8, 8)
        self.out = nn.Linear(8, 15)

    def forward(self, tokens, state=None):
        outputs = []
        for position in range(tokens.shape[1]):
            state = self.cell(self.words(tokens[:, position]), state)
            outputs.append(self.out(state[0]))
        return torch.stack(outputs, 1), state


model = Segments()
# + model = samestep.parallel(model)
optimizer = sgd(model, lr=0.5)
losses = []
for _ in range(3):
    text = torch.randint(0, 15, (9, 17)).cumsum(1) % 15
    state = None
    for start in range(0, 16, 4):
        out, state = model(text[:, start : start + 4], state)
        state = tuple(part.detach() for part in state)
        loss = F.cross_entropy(out.flatten(0, 1), text[:, start + 1 : start + 5].flatten())
        losses.append(update(optimizer, loss))
report(losses, model)
