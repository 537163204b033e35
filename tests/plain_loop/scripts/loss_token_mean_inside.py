# expect: divided
# Language model that returns its loss, torch's mean over the tokens that are not padding.
import torch
from common import report, update
from torch import nn
from torch.nn import functional as F


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 8, padding_idx=0)
        self.rnn = nn.GRU(8, 8, batch_first=True)
        self.head = nn.Linear(8, 16)

    def forward(self, tokens):
        logits = self.head(self.rnn(self.embed(tokens[:, :-1]))[0])
        return logits, F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=0)


model = LanguageModel()
# + model = samestep.parallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
losses = []
for step in range(10):
    tokens = torch.randint(1, 16, (10, 7 + step % 3))
    for row, length in enumerate(torch.randint(2, 7, (10,)).tolist()):
        tokens[row, length:] = 0
    logits, loss = model(tokens)
    losses += [update(optimizer, loss), loss.exp().item()]
report(losses, model)
