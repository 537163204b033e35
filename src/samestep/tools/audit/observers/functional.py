"""Observers of functions of `torch.nn.functional`: dropout, attention, batch norm and losses.

An experiment turns dropout and batch norm off. The losses are means over a number of targets that
varies between ranks and batches.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from samestep.tools.audit.events import user_line
from samestep.tools.audit.observers.loading import state_hash
from samestep.tools.audit.observers.session import Session

_STEPS = 10
_CALLS = 4  # of a step


class ModuleObserver:
    """Observer of dropout, in attention too, and of batch norm in training mode."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._step = -1
        self._calls = 0
        self._has_batch_norm = False

    def dropout(self, values: torch.Tensor) -> None:
        """Write the state of the generator before a dropout."""
        session = self._session
        if session.steps >= _STEPS:
            return
        if session.steps != self._step:
            self._step = session.steps
            self._calls = 0
        self._calls += 1
        if self._calls <= _CALLS:
            state = state_hash(_generator_state(values.device))
            session.emit(
                "dropout", call=self._calls, shape=list(values.shape), state=state, line=user_line()
            )

    def batch_norm(self) -> None:
        """Write that batches are normalised with their own statistics, once."""
        if not self._has_batch_norm:
            self._has_batch_norm = True
            self._session.emit("batch_norm", line=user_line())


def observe_modules(session: Session) -> None:
    """Observe the functions of dropout, attention and batch norm."""
    observer = ModuleObserver(session)
    dropped = session.guarded(observer.dropout)
    normalised = session.guarded(observer.batch_norm)
    dropout = F.dropout
    attention = F.scaled_dot_product_attention
    batch_norm = F.batch_norm
    has_dropout = "dropout" not in session.without
    has_batch_norm = "batch norm" not in session.without

    def observed_dropout(
        input: Any, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Any:
        if training and p > 0 and not torch.compiler.is_compiling():
            dropped(input)
        return dropout(input, p, training and has_dropout, inplace)

    def observed_attention(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if dropout_p > 0 and not torch.compiler.is_compiling():
            dropped(query)
        return attention(
            query, key, value, attn_mask, dropout_p if has_dropout else 0.0, *args, **kwargs
        )

    def observed_batch_norm(
        input: Any,
        running_mean: Any,
        running_var: Any,
        weight: Any = None,
        bias: Any = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Any:
        if training and not torch.compiler.is_compiling():
            normalised()
        has_statistics = training and (has_batch_norm or running_mean is None)
        return batch_norm(
            input, running_mean, running_var, weight, bias, has_statistics, momentum, eps
        )

    replace_function("dropout", observed_dropout)
    replace_function("scaled_dot_product_attention", observed_attention)
    replace_function("batch_norm", observed_batch_norm)


def replace_function(name: str, observed: Any) -> None:
    """Replace a function of `torch.nn.functional`, except while TorchScript compiles a module."""
    functional: Any = F
    jit: Any = torch.jit
    original = getattr(F, name)
    script = torch.jit.script

    def observed_script(*args: Any, **kwargs: Any) -> Any:
        setattr(functional, name, original)
        try:
            return script(*args, **kwargs)
        finally:
            setattr(functional, name, observed)

    setattr(functional, name, observed)
    jit.script = observed_script


def _generator_state(device: torch.device) -> torch.Tensor:
    if device.type == "cpu":
        return torch.get_rng_state()
    state: torch.Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def observe_losses(session: Session) -> None:
    """Observe calls of `cross_entropy` with class indices and a mean over targets that are not ignored."""
    cross_entropy = F.cross_entropy

    def backward(gradient: torch.Tensor, value: torch.Tensor, count: int, line: str) -> None:
        session.emit("loss", count=count, value=float(value), scale=float(gradient), line=line)

    observed_backward = session.guarded(backward)

    def observe(loss: torch.Tensor, target: torch.Tensor, ignore_index: int) -> None:
        if not session.is_observed or not loss.requires_grad or target.is_floating_point():
            return
        count = int((target != ignore_index).sum())
        line = user_line()
        value = loss.detach()
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
        loss = cross_entropy(
            input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing
        )
        is_mean = reduction == "mean" and weight is None and size_average is None and reduce is None
        if is_mean and not torch.compiler.is_compiling():
            observed(loss, target, ignore_index)
        return loss

    replace_function("cross_entropy", observed_cross_entropy)
