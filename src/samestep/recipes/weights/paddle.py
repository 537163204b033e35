"""Weights of PaddleViT's ViT under timm's names and in torch's layout."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch

from samestep.errors import DataError
from samestep.recipes.weights.paddle_arrays import read_arrays

# From Paddle's names to timm's, in the two forms that PaddleViT has had: `transformer.py`, where class token and
# position embeddings belong to the patch embedding, and `vit.py`, where they are the model's own. `{}` is the block.
NAMES = {
    "patch_embedding.cls_token": "cls_token",
    "cls_token": "cls_token",
    "patch_embedding.position_embeddings": "pos_embed",
    "position_embedding": "pos_embed",
    "patch_embedding.patch_embedding": "patch_embed.proj",
    "encoder.layers.{}.attn_norm": "blocks.{}.norm1",
    "encoder.layers.{}.attn.qkv": "blocks.{}.attn.qkv",
    "encoder.layers.{}.attn.out": "blocks.{}.attn.proj",
    "encoder.layers.{}.mlp_norm": "blocks.{}.norm2",
    "encoder.layers.{}.mlp.fc1": "blocks.{}.mlp.fc1",
    "encoder.layers.{}.mlp.fc2": "blocks.{}.mlp.fc2",
    "encoder.encoder_norm": "norm",
    "classifier": "head",
}
_ALONE = ("cls_token", "pos_embed")  # the others are modules, with a weight and most of them a bias
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True)
class Converted:
    """Weights for timm's model.

    Attributes:
        tensors: by timm's names.
        sources: Paddle's name of each.
        left_out: what the file holds besides the model.
    """

    tensors: dict[str, torch.Tensor]
    sources: dict[str, str]
    left_out: tuple[str, ...]


def read_pdparams(file: Path) -> Converted:
    """The weights of a ViT that PaddleViT saved.

    Paddle keeps the weight of a linear layer as (in, out), torch as (out, in), so matrices are transposed; kernels of
    convolutions, (out, in, height, width), and everything else are the same in both.

    Raises:
        DataError: the file holds anything but arrays, or an array that timm's ViT has no place for.
    """
    arrays = read_arrays(file)
    unknown = [name for name in arrays.by_name if timm_name(name) is None]
    if unknown:
        raise DataError(
            f"{file}: timm's ViT has no {', '.join(unknown[:5])}" + (" ..." if len(unknown) > 5 else ""),
            rule="names of PaddleViT's ViT: " + ", ".join(NAMES).replace("{}", "N"),
            do="convert weights of image_classification/ViT; other models, and heads of two layers, are not known here",
        )
    tensors: dict[str, torch.Tensor] = {}
    sources: dict[str, str] = {}
    for name, array in arrays.by_name.items():
        target = str(timm_name(name))
        if target in tensors:
            raise DataError(
                f"{file}: both {sources[target]} and {name} are {target}",
                rule="one array a name",
                do="keep one of them",
            )
        plain = array.T if array.ndim == 2 and name.endswith(".weight") else array
        tensors[target], sources[target] = torch.from_numpy(numpy.ascontiguousarray(plain)), name
    return Converted(tensors, sources, arrays.left_out)


def timm_name(name: str) -> str | None:
    """timm's name for an array of Paddle's, or None where it has none."""
    number = _NUMBER.search(name)
    pattern = _NUMBER.sub("{}", name, count=1)
    stem, _, ending = pattern.rpartition(".")
    if NAMES.get(pattern) in _ALONE:
        return NAMES[pattern]
    if stem not in NAMES or NAMES[stem] in _ALONE or ending not in ("weight", "bias"):
        return None
    return f"{NAMES[stem]}.{ending}".replace("{}", number[0] if number else "")
