# expect: divided
# Model and images in channels_last.
import torch
from common import report
from torch import nn

model = nn.Sequential(
    nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)
)
model = model.to(memory_format=torch.channels_last)
# + model = samestep.parallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)
losses = []
for _ in range(8):
    x = torch.randn(10, 3, 6, 6).to(memory_format=torch.channels_last)
    loss = nn.functional.cross_entropy(model(x), torch.randint(0, 3, (10,)))
    optimizer.zero_grad()
    loss.backward()
    assert model[0].weight.grad.is_contiguous(memory_format=torch.channels_last)
    optimizer.step()
    losses.append(loss.item())
report(losses, model)
