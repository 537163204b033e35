"""What a trained model is for: files in, answers out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image

Answer = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Task:
    """How a model meets what people have, without the dataset that it was trained on.

    A data module has a function that makes one from the classes of a run and the options of its data
    (`samestep.recipes.names.TASKS`), so that predicting needs a checkpoint and nothing else.

    Attributes:
        reads: what `read` takes, for errors and help, such as `an image file`.
        read: one input as evaluation makes it, without a batch dimension and without its target.
        tell: what the model's outputs for that input mean, as plain data for JSON.
        picture: what they look like, if there is something to see.
        complete: goes on from a beginning, for models that do; takes the model, the beginning and how many tokens.
    """

    reads: str
    read: Callable[[Path], Any]
    tell: Callable[[Any], Answer]
    picture: Callable[[Path, Any], Image.Image] | None = None
    complete: Callable[[torch.nn.Module, str, int], str] | None = None
