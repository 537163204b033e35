# expect: divided
# CLIP: two towers in one module; the loss over the batch uses the model's own temperature outside of the call.
import torch
from common import report, update
from torch import nn
from torch.nn import functional as F


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(nn.Flatten(), nn.Linear(16, 8))
        self.text = nn.EmbeddingBag(20, 8)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, images, tokens):
        return F.normalize(self.image(images), dim=1), F.normalize(self.text(tokens), dim=1)


model = Towers()
# + model = samestep.parallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
losses = []
for _ in range(10):
    images, texts = model(torch.randn(11, 1, 4, 4), torch.randint(0, 20, (11, 5)))
    logits = model.scale.exp() * images @ texts.T
    labels = torch.arange(11)
    loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2
    losses += [update(optimizer, loss), model.scale.item()]
report(losses, model)
