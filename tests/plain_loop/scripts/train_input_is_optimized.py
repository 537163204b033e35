# expect: divided
# Style transfer: a frozen model with Gram matrices of each image; the optimizer moves the images.
import torch
import torch.nn.functional as F
from common import convolutions, report, update
from torch import nn


class Features(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = convolutions(1, 4)
        self.second = convolutions(4, 6)

    def forward(self, x):
        first = self.first(x)
        second = self.second(F.avg_pool2d(first, 2)).flatten(2)
        return first, second @ second.transpose(1, 2) / second.shape[2]


model = Features().eval().requires_grad_(False)
# + model = samestep.parallel(model)
with torch.no_grad():
    content, _ = model(torch.rand(7, 1, 8, 8))
    _, style = model(torch.rand(7, 1, 8, 8))
image = torch.rand(7, 1, 8, 8).requires_grad_()
optimizer = torch.optim.Adam([image], lr=0.05)
losses = []
for _ in range(10):
    features, gram = model(image)
    loss = F.mse_loss(features, content) + 10 * F.mse_loss(gram, style)
    losses.append(update(optimizer, loss))
report([*losses, image.detach().square().mean()], model)
