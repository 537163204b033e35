# expect: divided
# Transformer encoder with its default dropout in attention and feed-forward, and padding masks.
import torch
from common import report, update
from torch import nn
from torch.nn import functional as F


class Sentences(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 8, padding_idx=0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens):
        padding = tokens == 0
        hidden = self.encoder(self.embed(tokens), src_key_padding_mask=padding)
        hidden = hidden.masked_fill(padding[:, :, None], 0)
        return self.head(hidden.sum(1) / (~padding).sum(1, keepdim=True))


model = Sentences()
# + model = samestep.parallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
losses = []
for _ in range(8):
    tokens = torch.randint(1, 20, (10, 7))
    tokens[::3, 5:] = 0
    loss = F.cross_entropy(model(tokens), torch.randint(0, 3, (10,)))
    losses.append(update(optimizer, loss))
report(losses, model)
