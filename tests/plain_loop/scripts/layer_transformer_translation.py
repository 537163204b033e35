# expect: divided
# A transformer with encoder and decoder, masks of padding and dropout.
import torch
import torch.nn.functional as F
from common import report, sgd
from torch import nn


class Translation(nn.Module):
    def __init__(self):
        super().__init__()
        self.source = nn.Embedding(20, 8, padding_idx=0)
        self.target = nn.Embedding(20, 8, padding_idx=0)
        self.transformer = nn.Transformer(8, 2, 1, 1, 16, dropout=0.1, batch_first=True)
        self.out = nn.Linear(8, 20)

    def forward(self, source, target):
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        hidden = self.transformer(
            self.source(source),
            self.target(target),
            tgt_mask=mask,
            src_key_padding_mask=source == 0,
            memory_key_padding_mask=source == 0,
            tgt_is_causal=True,
        )
        return self.out(hidden)


model = Translation()
# + model = samestep.parallel(model)
optimizer = sgd(model, lr=0.05)
losses = []
for step in range(8):
    source = torch.randint(1, 20, (9, 7 + step % 2))
    source[2:5, 5:] = 0
    target = torch.randint(1, 20, (9, 6))
    out = model(source, target[:, :-1])
    loss = F.cross_entropy(out.transpose(1, 2), target[:, 1:])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
report(losses, model)
