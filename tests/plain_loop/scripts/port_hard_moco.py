# expect: whole: writes into a parameter
# Momentum contrast: a queue in a buffer and a second encoder, both moved in the forward.
import torch
import torch.nn.functional as F
from common import classifier, images, report
from torch import nn
from torch.utils.data import DataLoader


class MomentumContrast(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = classifier(8)
        self.key_encoder = classifier(8)
        self.key_encoder.load_state_dict(self.encoder.state_dict())
        self.register_buffer("queue", F.normalize(torch.randn(64, 8), dim=1))
        self.position = 0

    def forward(self, x):
        queries = F.normalize(self.encoder(x), dim=1)
        with torch.no_grad():
            for own, other in zip(self.key_encoder.parameters(), self.encoder.parameters()):
                own.lerp_(other, 0.01)
            keys = F.normalize(self.key_encoder(x + 0.1), dim=1)
        positive = (queries * keys).sum(1, keepdim=True)
        logits = torch.cat([positive, queries @ self.queue.clone().T], 1)
        stop = min(self.position + len(keys), 64)
        self.queue[self.position : stop] = keys[: stop - self.position]
        self.position = stop % 64
        return logits


model = MomentumContrast()
# + model = samestep.parallel(model)
optimizer = torch.optim.SGD(model.encoder.parameters(), lr=0.05)
losses = []
for epoch in range(2):
    for x, _ in DataLoader(images(120), 24, shuffle=True):
        logits = model(x)
        loss = F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
report(losses, model)
