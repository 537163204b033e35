"""Losses as a sum and a count, so that the mean is taken once, over the global batch.

PyTorch's loss modules and functions are recognized, with their `reduction`, `weight` and `ignore_index`.

Decisions: docs/decisions/losses.md
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules import loss as torch_losses

from samestep.data.batch import GlobalBatch
from samestep.distributed.logging import logger
from samestep.distributed.world import World
from samestep.engine.nested_data import has_rows, rows
from samestep.errors import InputError

_CHECKED_SAMPLES = 16  # a power of two


@dataclass(frozen=True)
class Loss:
    """Loss of one microbatch.

    Attributes:
        sum: scalar tensor; the summed loss of the samples (or tokens) of the microbatch.
        count: number of samples (or tokens), as a number or a scalar tensor.
    """

    sum: torch.Tensor
    count: torch.Tensor | float


LossFunction = Callable[[Any, Any], Loss | torch.Tensor]
_NOT_A_MEAN = (
    "the loss is not a mean over samples, so results depend on the number of microbatches. Return "
    "samestep.Loss(sum, count), pass a loss of torch.nn itself, or set StepConfig(gather='global') for a loss that "
    "compares samples; see docs/concepts/losses.md"
)


class StepLoss:
    """A loss function as a step and an evaluation use it; the subclass `MultiLoss` has several terms.

    Attributes:
        ignore_index: targets of this value are not counted by the loss, nor by metrics.
    """

    ignore_index = -100
    _returns_scalar = False

    def __init__(self, function: LossFunction) -> None:
        self._function = function
        if isinstance(function, partial):
            self.ignore_index = function.keywords.get("ignore_index", self.ignore_index)

    @property
    def term_count(self) -> int:
        """Number of terms."""
        return 1

    def global_counts(self, batch: GlobalBatch, world: World) -> list[float]:
        """Return the terms' counts in the global batch, if a step needs them before the first forward; a collective."""
        return []

    def term_losses(self, outputs: Any, targets: Any, samples: int) -> list[Loss]:
        """Return sum and count of each term for one microbatch of `samples` samples."""
        value = self._function(outputs, targets)
        self._returns_scalar = not isinstance(value, Loss)
        return [as_loss(value, samples)]

    def require_mean(self, outputs: Any, targets: Any, samples: int) -> None:
        """Compare a scalar loss of the first samples of a microbatch with the losses of both halves of them.

        The mean of the halves is that of all if the scalar is a mean over samples. If the loss is no mean for another
        reason than a sum, such as weights or a comparison of samples, there is a warning.

        Raises:
            InputError: the loss function returns a sum.
        """
        size = 2 ** (min(samples, _CHECKED_SAMPLES).bit_length() - 1)
        if not self._returns_scalar or size < 2 or not (has_rows(outputs, samples) and has_rows(targets, samples)):
            return
        pieces = ((0, size), (0, size // 2), (size // 2, size))
        try:
            with torch.no_grad():
                values: list[Any] = [
                    self._function(rows(outputs, samples, *piece), rows(targets, samples, *piece)) for piece in pieces
                ]
                total, first, second = (float(value) for value in values)
        except Exception as error:  # boundary: a loss that compares samples may need a number of them
            logger.warning(f"the loss of {size} samples raised {type(error).__name__}: {_NOT_A_MEAN}")
            return
        tolerance = torch.finfo(values[0].dtype).eps ** 0.5 * max(abs(total), abs(first), abs(second))
        if not math.isfinite(total) or abs(total - (first + second) / 2) <= tolerance:
            return
        observed = f"the loss of {size} samples is {total:.6g}, that of their halves {first:.6g} and {second:.6g}"
        if abs(total - (first + second)) <= tolerance:
            raise InputError(
                f"the loss function returned a sum over samples: {observed}",
                expected="a scalar that is the mean over samples, or samestep.Loss(sum, count)",
                fix="return samestep.Loss(loss, len(targets)), or compute the loss with reduction='mean'",
                code="E_LOSS",
            )
        logger.warning(f"{observed}: {_NOT_A_MEAN}")

    def combine(self, losses: Sequence[Loss], counts: Sequence[float], batch_size: int, samples: int) -> Loss:
        """Return the one loss of a microbatch from its terms and the result of `global_counts`.

        `samples` is the nominal size of the microbatch: the sizes of all microbatches add up to `batch_size`.
        """
        return losses[0]

    def combine_whole(self, losses: Sequence[Loss], samples: int) -> Loss:
        """Return the one loss of a whole global batch of `samples` samples from its terms."""
        return losses[0]

    def means(self, sums: Sequence[tuple[float, float]]) -> dict[str, float]:
        """Return `loss` and the mean of each of several terms, from sums and counts over a whole dataset."""
        ((total, count),) = sums
        return {"loss": total / count}


def as_loss(value: Loss | torch.Tensor, samples: int, name: str = "") -> Loss:
    """Return the result of a loss function as a sum and a count; a scalar is the mean over the microbatch's samples.

    Raises:
        InputError: `value` is neither a `Loss` of a scalar nor a scalar tensor.
    """
    advice = "return samestep.Loss(sum, count), or a scalar that is the mean over the microbatch's samples"
    source = f"the forward function, as {name}," if name else "the loss function"
    if isinstance(value, Loss):
        require_scalar(value.sum, source, advice)
        return value
    return Loss(require_scalar(value, source, advice) * samples, samples)


def require_scalar(value: object, source: str, advice: str) -> torch.Tensor:
    """Return the result of a loss function if it is a scalar tensor.

    Raises:
        InputError: it is not; `source` returned `value`, and `advice` is a fix.
    """
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value
    shape = f" of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""
    raise InputError(
        f"{source} returned a {type(value).__name__}{shape}",
        expected="a scalar tensor, or a samestep.Loss whose sum is one",
        fix=advice,
        code="E_LOSS",
    )


def cross_entropy(
    outputs: torch.Tensor,
    targets: torch.Tensor,
    *,
    weight: Sequence[float] | torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Loss:
    """Return the summed cross entropy of logits, with the count for which sum / count is torch's mean.

    Args:
        outputs: logits, `(N, C)` or `(N, C, ...)`.
        targets: class numbers, `(N)` or `(N, ...)`; or probabilities of the shape of the logits.
        weight: one weight per class; a target counts with the weight of its class.
        ignore_index: targets with this value (padding) add nothing to sum and count.
        label_smoothing: as in `torch.nn.CrossEntropyLoss`.

    Raises:
        InputError: the shapes do not match, a target is not the number of an output, or an option is invalid.
    """
    if not (isinstance(label_smoothing, int | float) and 0 <= label_smoothing <= 1):  # torch ignores negative values
        raise InputError(
            f"label_smoothing is {label_smoothing!r}", "a number from 0 to 1", "such as 0.1; 0 for none", code="E_VALUE"
        )
    function = partial(functional.cross_entropy, label_smoothing=label_smoothing)
    if targets.is_floating_point():
        if targets.shape != outputs.shape:
            raise InputError(
                f"outputs have the shape {tuple(outputs.shape)} and targets of {targets.dtype} {tuple(targets.shape)}",
                expected="probabilities of the shape of the outputs, or class numbers of torch.int64",
                fix="give the model one output per class (num_classes), or convert class numbers: targets.long()",
                code="E_SHAPE",
            )
        dtype = _sum_dtype(outputs)
        total = function(outputs.to(dtype), targets.to(dtype), weight=_weights(weight, outputs), reduction="sum")
        return Loss(total, targets.numel() // targets.shape[1])
    return class_loss(function, outputs, targets, weight, ignore_index)


def class_loss(
    function: Callable[..., torch.Tensor],
    outputs: torch.Tensor,
    targets: torch.Tensor,
    weight: Sequence[float] | torch.Tensor | None,
    ignore_index: int,
) -> Loss:
    """Return the sum and count of `cross_entropy` or `nll_loss` of `torch.nn.functional` for class numbers.

    Raises:
        InputError: the shapes do not match, or a target is not the number of an output.
    """
    weights, dtype = _weights(weight, outputs), _sum_dtype(outputs)
    rows, classes, *inner = outputs.shape
    if targets.shape != (rows, *inner):
        raise InputError(
            f"outputs have the shape {tuple(outputs.shape)} and targets {tuple(targets.shape)}",
            expected="logits (N, C, ...) and class numbers (N, ...)",
            fix="put the classes second: outputs.transpose(1, 2) for (N, T, C)",
            code="E_SHAPE",
        )
    if outputs.dim() > 2:  # as rows, because torch has no deterministic CUDA kernel for more dimensions
        outputs, targets = outputs.movedim(1, -1).reshape(-1, classes), targets.reshape(-1)
    counted = targets != ignore_index
    try:
        total = function(outputs.to(dtype), targets, weight=weights, ignore_index=ignore_index, reduction="sum")
    except IndexError as error:
        raise InputError(
            f"the model has {classes} outputs per target, and one of the targets is not a number of them: {error}",
            expected=f"class numbers from 0 to {classes - 1}, or ignore_index",
            fix="give the model one output per class (num_classes), or correct the targets",
            code="E_SHAPE",
        ) from error
    counts = counted if weights is None else weights.double()[targets.where(counted, 0)] * counted
    return Loss(total, counts.sum())


def _sum_dtype(outputs: torch.Tensor) -> torch.dtype:
    return torch.promote_types(outputs.dtype, torch.float32)  # 16 bits lose accuracy over thousands of terms


def _weights(weight: Sequence[float] | torch.Tensor | None, outputs: torch.Tensor) -> torch.Tensor | None:
    """Return class weights like the outputs; raise `InputError` unless there is one weight per class."""
    if weight is None:
        return None
    try:
        weights = torch.as_tensor(weight, dtype=_sum_dtype(outputs), device=outputs.device)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"the loss has the weights {weight!r}",
            "a list of one number per class",
            "such as [1.0, 5.0]",
            code="E_VALUE",
        ) from error
    if weights.shape != outputs.shape[1:2]:
        raise InputError(
            f"the loss has weights of shape {tuple(weights.shape)} for {outputs.shape[1]} classes",
            expected="one weight per class",
            fix=f"pass a list of {outputs.shape[1]} numbers",
            code="E_SHAPE",
        )
    return weights


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
        InputError: the reduction does not give one number.
    """

    def __init__(self, module: Any) -> None:
        self._module, self._reduction = deepcopy(module), module.reduction
        self.ignore_index = getattr(module, "ignore_index", self.ignore_index)
        reductions = ("mean", "sum", "batchmean") if isinstance(module, nn.KLDivLoss) else ("mean", "sum")
        if self._reduction not in reductions:
            name = type(module).__name__
            raise InputError(
                f"the loss is {name}(reduction={self._reduction!r})",
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
        return Loss(values.sum(dtype=_sum_dtype(values)), values.numel())


def recognized_loss(function: LossFunction) -> TorchLoss | None:
    """Return one of PyTorch's losses as a `TorchLoss`; None for any other function.

    Modules of `torch.nn` are recognized, subclasses with the same forward, and functions of `torch.nn.functional`, with
    arguments from `functools.partial` too.

    Raises:
        InputError: the reduction does not give one number, or the loss takes more than outputs and targets.
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


def no_loss(outputs: Any, targets: Any) -> NoReturn:
    """Refuse a step or an evaluation without a loss."""
    raise InputError(
        "the engine has no loss",
        expected="a loss, or a forward function that returns one",
        fix="samestep.Engine(model, optimizer, loss, ...), or engine.step(batch, forward=...)",
        code="E_LOSS",
    )


def as_step_loss(loss: LossFunction | StepLoss | None) -> StepLoss:
    """Return the loss of an engine as a `StepLoss`.

    Raises:
        InputError: the loss has parameters to train, or is one of PyTorch's that cannot be used.
    """
    if isinstance(loss, torch.nn.Module) and any(parameter.requires_grad for parameter in loss.parameters()):
        raise InputError(
            f"the loss {type(loss).__name__} has parameters to train",
            expected="all trained parameters belong to the model, whose gradients are reduced",
            fix='put the loss into the model: nn.ModuleDict({"net": net, "loss": loss}), and call both in '
            "engine.step(batch, forward=...)",
            code="E_LOSS",
        )
    if loss is None:
        return StepLoss(no_loss)
    return loss if isinstance(loss, StepLoss) else recognized_loss(loss) or StepLoss(loss)
