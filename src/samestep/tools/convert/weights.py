"""Weights of PaddleViT's ViT as a safetensors file for timm's."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import save_file

from samestep.recipes.weights.paddle import Converted, read_pdparams


def convert_weights(file: Path, out: Path) -> Converted:
    """Write what a `.pdparams` file holds, and return it.

    Raises:
        DataError: it holds anything but the arrays of a ViT.
    """
    converted = read_pdparams(file)
    save_file(converted.tensors, out)
    return converted
