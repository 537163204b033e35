"""Components of recipes that do not fit each other."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional

_FEATURES = 64  # of a digit


class _Model(nn.Module):
    """Returns something else than logits."""

    def __init__(self, num_classes: int, kind: str) -> None:
        super().__init__()
        self.layer = nn.Linear(_FEATURES, num_classes)
        self.kind = kind

    def forward(self, images: torch.Tensor) -> Any:
        logits = self.layer(images.flatten(1))
        results = {
            "None": None,
            "text": "logits",
            "integers": logits.argmax(1),
            "booleans": logits > 0,
            "half": logits[: len(logits) // 2],
            "flat": logits.flatten(),
            "detached": logits.detach(),
        }
        return results[self.kind]


def model(num_classes: int, *, kind: str) -> nn.Module:
    """Return a model with results of a kind."""
    return _Model(num_classes, kind)


def no_model() -> None:
    """Build a model and forget `return`."""
    nn.Linear(_FEATURES, 10)


def model_class() -> type[nn.Module]:
    """Return the class in place of a model."""
    return nn.Linear


def of_other_inputs(num_classes: int) -> nn.Module:
    """Return a model of inputs of another width."""
    return nn.Linear(5, num_classes)


def of_integers(num_classes: int) -> nn.Module:
    """Return a model of token numbers."""
    return nn.Embedding(100, num_classes)


def of_two_inputs(num_classes: int) -> nn.Module:
    """Return a model of pairs."""
    return nn.Bilinear(_FEATURES, _FEATURES, num_classes)


def no_loss(outputs: torch.Tensor, targets: torch.Tensor) -> None:
    """Compute a loss and forget `return`."""
    functional.cross_entropy(outputs, targets)


def number(outputs: torch.Tensor, targets: torch.Tensor) -> float:
    """Return the loss as a number."""
    return functional.cross_entropy(outputs, targets).item()


def of_other_targets(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return a loss of targets of the shape of the outputs."""
    return (outputs - targets).square().mean()


def no_optimizer(params: Any, lr: float) -> None:
    """Build an optimizer and forget `return`."""
    torch.optim.SGD(params, lr)


def no_data() -> None:
    """Build datasets and forget `return`."""
