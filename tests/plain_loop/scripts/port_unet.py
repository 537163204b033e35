# expect: mixed: fewer rows than ranks
# A U-Net with batch norm, dice and cross entropy; the last batch has one image.
import torch
import torch.nn.functional as F
from common import convolutions, images, report
from torch import nn
from torch.utils.data import DataLoader


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = convolutions(1, 8)
        self.middle = convolutions(8, 16)
        self.up = convolutions(24, 8)
        self.out = nn.Conv2d(8, 1, 1)

    def forward(self, x):
        skipped = self.down(x)
        middle = self.middle(F.max_pool2d(skipped, 2))
        middle = F.interpolate(middle, scale_factor=2)
        return self.out(self.up(torch.cat([skipped, middle], 1)))


def dice_loss(logits, masks):
    p = logits.sigmoid()
    dice = (2 * (p * masks).sum() + 1) / (p.sum() + masks.sum() + 1)
    return F.binary_cross_entropy_with_logits(logits, masks) + 1 - dice


model = UNet()
# + model = samestep.parallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
losses = []
for epoch in range(2):
    for pictures, _ in DataLoader(images(25, 1, 8), batch_size=4, shuffle=True):
        masks = (pictures > 0.5).double()
        optimizer.zero_grad()
        loss = dice_loss(model(pictures), masks)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
report(losses, model)
