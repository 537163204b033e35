# expect: whole
# Truncated backpropagation through time: the batch is the second dimension and the state is an argument.
import torch
from common import report
from torch import nn
from torch.nn import functional as F


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.rnn, self.head = nn.Embedding(12, 8), nn.GRU(8, 8), nn.Linear(8, 12)

    def forward(self, tokens, state):
        hidden, state = self.rnn(self.embed(tokens), state)
        return self.head(hidden), state


text = torch.randint(0, 12, (49, 6))
model = LanguageModel()
# + model = samestep.parallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
state, losses = torch.zeros(1, 6, 8), []
for start in range(0, 48, 6):
    logits, state = model(text[start : start + 6], state.detach())
    loss = F.cross_entropy(logits.flatten(0, 1), text[start + 1 : start + 7].flatten())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    optimizer.step()
    losses.append(loss.item())
report(losses, model)
