"""Observer of losses that are means over a number of targets that varies between ranks and batches."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from samestep.tools.audit.events import user_line
from samestep.tools.audit.observers.modules import replace_function
from samestep.tools.audit.observers.session import Session


def observe_losses(session: Session) -> None:
    """Observe calls of `cross_entropy` with class indices and a mean over targets that are not ignored."""
    cross_entropy = F.cross_entropy

    def backward(gradient: torch.Tensor, value: torch.Tensor, count: int, line: str) -> None:
        session.emit("loss", count=count, value=float(value), scale=float(gradient), line=line)

    observed_backward = session.guarded(backward)

    def observe(loss: torch.Tensor, target: torch.Tensor, ignore_index: int) -> None:
        if not session.is_observed or not loss.requires_grad or target.is_floating_point():
            return
        count, line, value = int((target != ignore_index).sum()), user_line(), loss.detach()
        loss.register_hook(lambda gradient: observed_backward(gradient, value, count, line))

    observed = session.guarded(observe)

    def observed_cross_entropy(  # with the signature of torch
        input: Any,
        target: Any,
        weight: Any = None,
        size_average: Any = None,
        ignore_index: int = -100,
        reduce: Any = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Any:
        loss = cross_entropy(input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing)
        is_mean = reduction == "mean" and weight is None and size_average is None and reduce is None
        if is_mean and not torch.compiler.is_compiling():
            observed(loss, target, ignore_index)
        return loss

    replace_function("cross_entropy", observed_cross_entropy)
