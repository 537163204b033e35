"""U-Nets (Ronneberger et al., 2015): one of a library, and a small one for images and volumes.

All kernels are deterministic on GPUs. Upsampling takes the nearest pixel or is a transposed
convolution, because linear interpolation has no deterministic backward on GPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from samestep.zoo.model_libraries import find_in_library


def unet(num_classes: int = 1, *, encoder: str = "resnet34", **options: Any) -> nn.Module:
    """Return `Unet` of segmentation_models_pytorch with random weights.

    Args:
        num_classes: output channels.
        encoder: name of an encoder of the library.
        options: other options of the class.

    Raises:
        RecipeError: the library is not installed, or refuses an option.
    """
    build = find_in_library("segmentation_models_pytorch:Unet")
    assert build is not None
    options.setdefault("decoder_interpolation", "nearest")
    return build(num_classes=num_classes, encoder_name=encoder, **options)


unet_vgg16 = partial(unet, encoder="vgg16")
unet_resnet34 = partial(unet, encoder="resnet34")
unet_resnet101 = partial(unet, encoder="resnet101")


class UNet(nn.Module):
    """Small U-Net with batch norm, strided and transposed convolutions.

    Inputs of any size are padded with zeros at the end, and the output is cropped.

    Args:
        num_classes: output channels.
        dimensions: 2 for images, 3 for volumes.
        in_channels: input channels.
        width: channels at full resolution; doubled at each level.
        levels: number of halvings of the resolution.
        dropout: dropout probability of channels at the lowest level.
    """

    def __init__(
        self,
        num_classes: int = 1,
        *,
        dimensions: int = 2,
        in_channels: int = 3,
        width: int = 16,
        levels: int = 3,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if dimensions not in (2, 3) or levels < 1 or width < 1:
            raise ValueError("dimensions is not 2 or 3, levels or width is less than 1")
        widths = [width * 2**level for level in range(levels + 1)]
        self.stem = _double_convolution(dimensions, in_channels, widths[0])
        self.down = nn.ModuleList(
            _double_convolution(dimensions, before, after, stride=2)
            for before, after in pairwise(widths)
        )
        self.dropout = _layer("Dropout", dimensions)(dropout)
        pairs = list(pairwise(widths[::-1]))
        up_convolution = _layer("ConvTranspose", dimensions)
        self.up = nn.ModuleList(up_convolution(below, above, 2, stride=2) for below, above in pairs)
        self.joined = nn.ModuleList(
            _double_convolution(dimensions, 2 * above, above) for _, above in pairs
        )
        self.head = _layer("Conv", dimensions)(widths[0], num_classes, 1)
        self._step = 2**levels

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits `(N, num_classes, ...)` of inputs `(N, in_channels, ...)`."""
        sides = images.shape[2:]
        # Batch norm of one sample needs at least two positions per channel at the lowest level.
        padded = [max(2, -(-side // self._step)) * self._step for side in sides]
        padding = []
        for side, size in zip(sides[::-1], padded[::-1], strict=True):
            padding += [0, size - side]
        features = [self.stem(functional.pad(images, padding))]
        for block in self.down:
            features.append(block(features[-1]))
        lowest = self.dropout(features.pop())
        for up, joined in zip(self.up, self.joined, strict=True):
            lowest = joined(torch.cat([up(lowest), features.pop()], dim=1))
        logits: torch.Tensor = self.head(lowest)
        return logits[(slice(None), slice(None), *(slice(side) for side in sides))]


unet_small = partial(UNet, dimensions=2)
unet_3d = partial(UNet, dimensions=3, in_channels=1)


def _double_convolution(dimensions: int, before: int, after: int, stride: int = 1) -> nn.Sequential:
    convolution = _layer("Conv", dimensions)
    norm = _layer("BatchNorm", dimensions)
    layers: list[nn.Module] = []
    for inputs, step in ((before, stride), (after, 1)):
        layers += [
            convolution(inputs, after, 3, stride=step, padding=1, bias=False),
            norm(after),
            nn.ReLU(),
        ]
    return nn.Sequential(*layers)


def _layer(kind: str, dimensions: int) -> Callable[..., nn.Module]:
    layer: Callable[..., nn.Module] = getattr(nn, f"{kind}{dimensions}d")
    return layer
