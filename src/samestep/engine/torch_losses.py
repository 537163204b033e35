"""PyTorch's loss modules and functions as a sum and a count, with their `reduction`, `weight` and `ignore_index`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules import loss as torch_losses

from samestep.engine.loss import Loss, LossFunction, StepLoss, class_loss, cross_entropy
from samestep.errors import InputError

# Losses of outputs and targets whose mean is the mean of the elements that `reduction="none"` returns.
_BY_ELEMENT = (
    nn.BCELoss,
    nn.BCEWithLogitsLoss,
    nn.HingeEmbeddingLoss,
    nn.HuberLoss,
    nn.KLDivLoss,
    nn.L1Loss,
    nn.MSELoss,
    nn.MultiLabelMarginLoss,
    nn.MultiLabelSoftMarginLoss,
    nn.MultiMarginLoss,
    nn.PoissonNLLLoss,
    nn.SmoothL1Loss,
    nn.SoftMarginLoss,
)
_BY_TARGET = (nn.CrossEntropyLoss, nn.NLLLoss)
_BROADCASTING = (nn.HuberLoss, nn.L1Loss, nn.MSELoss, nn.SmoothL1Loss)
_KINDS = (*_BY_TARGET, *_BY_ELEMENT)
_MODULES: dict[Callable[..., Any], type[nn.Module]] = {
    functional.binary_cross_entropy: nn.BCELoss,
    functional.binary_cross_entropy_with_logits: nn.BCEWithLogitsLoss,
    functional.cross_entropy: nn.CrossEntropyLoss,
    functional.huber_loss: nn.HuberLoss,
    functional.kl_div: nn.KLDivLoss,
    functional.l1_loss: nn.L1Loss,
    functional.mse_loss: nn.MSELoss,
    functional.nll_loss: nn.NLLLoss,
    functional.poisson_nll_loss: nn.PoissonNLLLoss,
    functional.smooth_l1_loss: nn.SmoothL1Loss,
}


class TorchLoss(StepLoss):
    """One of PyTorch's losses, with the value that a loop on one device computes from a global batch.

    `reduction="mean"` divides by the count of PyTorch: samples, elements, targets that are not ignored, or the sum of
    their class weights. With `reduction="sum"`, the loss of a step is the sum over the global batch, and evaluation
    returns the mean over samples.

    Args:
        module: an instance of one of `_KINDS`; not changed.

    Raises:
        InputError: the reduction is `none`.
    """

    def __init__(self, module: Any) -> None:
        self._module, self._reduction = deepcopy(module), module.reduction
        self.ignore_index = getattr(module, "ignore_index", self.ignore_index)
        if self._reduction == "none":
            name = type(module).__name__
            raise InputError(
                f"the loss is {name}(reduction='none')",
                expected="one number per step: reduction='mean' or 'sum', or a function that returns a samestep.Loss",
                fix=f"{name}(), or lambda outputs, targets: samestep.Loss(loss.sum(), loss.numel()) of your own values",
                code="E_LOSS",
            )
        self._module.reduction = "none"
        self._on_device: dict[torch.device, nn.Module] = {}

    def term_losses(self, outputs: Any, targets: Any, samples: int) -> list[Loss]:
        if isinstance(self._module, _BY_TARGET):
            loss = self._by_target(outputs, targets)
        else:
            loss = self._by_element(outputs, targets)
        return [loss if self._reduction == "mean" else Loss(loss.sum, samples)]

    def combine(self, losses: Sequence[Loss], counts: Sequence[float], batch_size: int, samples: int) -> Loss:
        """Return the loss of a microbatch; a sum is multiplied by the batch size, by which the step divides."""
        (loss,) = losses
        return Loss(loss.sum * batch_size, samples) if self._reduction == "sum" else loss

    def _by_target(self, outputs: torch.Tensor, targets: torch.Tensor) -> Loss:
        module = self._module
        if isinstance(module, nn.NLLLoss):
            return class_loss(functional.nll_loss, outputs, targets, module.weight, module.ignore_index)
        return cross_entropy(
            outputs,
            targets,
            weight=module.weight,
            ignore_index=module.ignore_index,
            label_smoothing=module.label_smoothing,
        )

    def _by_element(self, outputs: torch.Tensor, targets: torch.Tensor) -> Loss:
        if isinstance(self._module, _BROADCASTING) and outputs.shape != targets.shape:
            raise InputError(
                f"{type(self._module).__name__} received outputs of shape {tuple(outputs.shape)} and targets of shape "
                f"{tuple(targets.shape)}",
                expected="equal shapes; otherwise every output would be compared with every target",
                fix="return outputs.squeeze(1) from the model, or targets.unsqueeze(1) from the dataset",
                code="E_SHAPE",
            )
        if outputs.device not in self._on_device:
            self._on_device[outputs.device] = deepcopy(self._module).to(outputs.device)
        values = self._on_device[outputs.device](outputs, targets)
        dtype = torch.promote_types(values.dtype, torch.float32)  # 16 bits lose accuracy over thousands of terms
        return Loss(values.sum(dtype=dtype), values.numel())


def recognized_loss(function: LossFunction) -> TorchLoss | None:
    """Return one of PyTorch's losses as a `TorchLoss`; None for any other function.

    Modules of `torch.nn` are recognized, subclasses with the same forward, and functions of `torch.nn.functional`, with
    arguments from `functools.partial` too.

    Raises:
        InputError: the reduction is `none`, or the loss takes more than outputs and targets.
    """
    module: Any = function
    called, options = (function.func, function.keywords) if isinstance(function, partial) else (function, {})
    kind = next((kind for known, kind in _MODULES.items() if known is called), None)
    is_partial = isinstance(function, partial) and bool(function.args)
    if kind is not None and not is_partial and options.keys() <= inspect.signature(kind).parameters.keys():
        module = kind(**options)
    forward = getattr(type(module), "forward", None)
    if any(isinstance(module, kind) and forward is kind.forward for kind in _KINDS):
        return TorchLoss(module)
    if isinstance(module, torch_losses._Loss) and type(module).__module__ == torch_losses.__name__:
        name = type(module).__name__
        raise InputError(
            f"the loss is {name}, which takes more than outputs and targets",
            expected="a function from outputs and targets to a samestep.Loss(sum, count)",
            fix=f"define loss(outputs, targets) that calls {name}(reduction='sum') and returns samestep.Loss",
            code="E_LOSS",
        )
    return None
