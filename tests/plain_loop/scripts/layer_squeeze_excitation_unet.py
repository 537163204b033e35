# expect: divided
# Small U-Net: squeeze and excitation, transposed convolution, pixel shuffle, pooling, interpolation, concatenation.
import torch
from common import report
from torch import nn
from torch.nn import functional as F


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.SiLU())
        self.middle = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(4, 8, 3, padding=1, groups=2), nn.BatchNorm2d(8))
        self.squeeze = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 2, 1), nn.ReLU(), nn.Conv2d(2, 8, 1))
        self.up, self.shuffle = nn.ConvTranspose2d(8, 4, 2, stride=2), nn.PixelShuffle(2)
        self.head = nn.Conv2d(14, 2, 1)

    def forward(self, x):
        high = self.down(x)
        low = self.middle(high)
        low = low * self.squeeze(low).sigmoid()
        smooth = F.interpolate(low[:, :4], scale_factor=2, mode="bilinear", align_corners=False)
        return self.head(torch.cat([high, self.up(low), self.shuffle(low), smooth], dim=1))


model = Net()
# + model = samestep.parallel(model)
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
losses = []
for _ in range(6):
    image = torch.randn(9, 1, 8, 8)
    loss = F.cross_entropy(model(image), (image[:, 0] > 0).long())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
report(losses, model)
