"""U-Nets: those of segmentation_models_pytorch with well-known encoders, and a small one for two or three dimensions.

The form is that of Ronneberger et al., "U-Net" (2015). All that is used here has deterministic kernels on GPUs too:
upsampling takes the nearest pixel or is a transposed convolution, because torch has no deterministic backward of
linear interpolation there.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from samestep.errors import RecipeError
from samestep.runtime.vision import make_torchvision_importable

_DEPTH = 5  # times that an encoder halves its input
_STEP = 2**_DEPTH


def unet(
    num_classes: int = 1,
    *,
    encoder: str = "resnet34",
    in_channels: int = 3,
    decoder_channels: Sequence[int] = (256, 128, 64, 32, 16),
    attention: str | None = None,
) -> nn.Module:
    """segmentation_models_pytorch's U-Net, without weights: those are files that a recipe names.

    Args:
        num_classes: output channels.
        encoder: a name of the library's encoders.
        decoder_channels: of the five blocks that bring the resolution back.
        attention: `scse` for squeeze and excitation in the decoder.

    Raises:
        RecipeError: the library is not there, or knows no such encoder.
    """
    make_torchvision_importable()
    try:
        from segmentation_models_pytorch import Unet
        from segmentation_models_pytorch.encoders import encoders
    except ImportError as error:
        raise RecipeError(
            f"segmentation_models_pytorch cannot be imported: {error}",
            rule="the U-Nets with known encoders are its own",
            do="pip install 'samestep[zoo]', or model.name=unet_small",
        ) from error
    if encoder not in encoders:
        close = get_close_matches(encoder, encoders, n=1)
        raise RecipeError(
            f"model.options.encoder is {encoder!r}",
            rule="a name of segmentation_models_pytorch.encoders, such as vgg16_bn or resnet34",
            do=f"did you mean {close[0]}?" if close else "look at its list",
        )
    model: nn.Module = Unet(
        encoder,
        encoder_weights=None,
        in_channels=in_channels,
        classes=num_classes,
        decoder_channels=tuple(decoder_channels),
        decoder_attention_type=attention,
        decoder_interpolation="nearest",
    )
    model.register_forward_pre_hook(_require_sides)
    return model


unet_vgg16 = partial(unet, encoder="vgg16")
unet_resnet34 = partial(unet, encoder="resnet34")
unet_resnet101 = partial(unet, encoder="resnet101")


def _require_sides(model: nn.Module, inputs: tuple[Any, ...]) -> None:
    # The library itself would take other sides and bring its layers together askew.
    sides = tuple(inputs[0].shape[-2:])
    if all(side % _STEP == 0 and side > _STEP for side in sides):
        return
    below, above = ([max(2, side // _STEP + more) * _STEP for side in sides] for more in (0, 1))
    raise RecipeError(
        f"the model is given images of {sides[0]} x {sides[1]} pixels",
        rule=f"a U-Net that halves {_DEPTH} times takes sides that are multiples of {_STEP}, from {2 * _STEP} on",
        do=f"data.options.image_size={below}, or {above}",
    )


class UNet(nn.Module):
    """A small U-Net with batch norm; strided convolutions go down, transposed ones up.

    An input of any size is padded with zeros at its end to what can be halved, and the output cut back.

    Args:
        num_classes: output channels.
        dimensions: 2 for images, 3 for volumes.
        in_channels: of the input.
        width: channels at full resolution; each level below has twice as many.
        levels: how often the resolution is halved.
        dropout: probability, of channels at the lowest level.
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
            raise RecipeError(
                f"model.options: dimensions is {dimensions}, levels is {levels}, width is {width}",
                rule="2 or 3 dimensions, at least 1 level and a width of at least 1",
                do="dimensions: 2, levels: 3, width: 16",
            )
        kind: Any = nn.ConvTranspose2d if dimensions == 2 else nn.ConvTranspose3d
        widths = [width * 2**level for level in range(levels + 1)]
        self.stem = _twice(dimensions, in_channels, widths[0])
        self.down = nn.ModuleList(_twice(dimensions, before, after, stride=2) for before, after in pairwise(widths))
        self.dropout = nn.Dropout2d(dropout) if dimensions == 2 else nn.Dropout3d(dropout)
        pairs = list(pairwise(widths[::-1]))
        self.up = nn.ModuleList(kind(below, here, 2, stride=2) for below, here in pairs)
        self.joined = nn.ModuleList(_twice(dimensions, 2 * here, here) for _, here in pairs)
        self.head = (nn.Conv2d if dimensions == 2 else nn.Conv3d)(widths[0], num_classes, 1)
        self._step = 2**levels

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits `(N, num_classes, ...)` of inputs `(N, in_channels, ...)`."""
        sides = images.shape[2:]
        # At least two places a channel at the lowest level, or the batch norm of a single sample would have one.
        whole = [max(2, -(-side // self._step)) * self._step for side in sides]
        padding = [part for side, wanted in zip(sides[::-1], whole[::-1], strict=True) for part in (0, wanted - side)]
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


def _twice(dimensions: int, before: int, after: int, stride: int = 1) -> nn.Sequential:
    convolution: Any = nn.Conv2d if dimensions == 2 else nn.Conv3d
    norm: Any = nn.BatchNorm2d if dimensions == 2 else nn.BatchNorm3d
    layers: list[nn.Module] = []
    for inputs, step in ((before, stride), (after, 1)):
        layers += [convolution(inputs, after, 3, stride=step, padding=1, bias=False), norm(after), nn.ReLU()]
    return nn.Sequential(*layers)
