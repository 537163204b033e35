"""Exponential moving average of the weights, for evaluation.

Polyak & Juditsky, "Acceleration of Stochastic Approximation by Averaging" (1992). The update is
elementwise on weights that are equal on every rank, so the average has the same bits on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from samestep.errors import InputError


class AveragedWeights:
    """Average of a model's parameters that are or were trained; other parameters and buffers are the model's.

    Args:
        trained: this rank's trained parameters by name.
        decay: fraction of the average that remains at each step, between 0 and 1; smaller in the
            first steps, so that the initial weights lose their influence soon.

    Attributes:
        tensors: the average, by parameter name.
    """

    def __init__(self, trained: Mapping[str, torch.nn.Parameter], decay: float) -> None:
        if not 0 < decay < 1:
            raise InputError(
                f"ema is {decay}", expected="a decay between 0 and 1, or None", fix="ema=0.9999"
            )
        self._trained = list(trained.values())
        self.tensors = {name: parameter.detach().clone() for name, parameter in trained.items()}
        self._decay = decay

    def update(self, step: int) -> None:
        """Update the average with the weights after step number `step`, from 1."""
        # The schedule of TensorFlow's ExponentialMovingAverage with `num_updates`.
        decay = min(self._decay, (1 + step) / (10 + step))
        current, averages = self._values()
        if current:
            torch._foreach_lerp_(averages, current, 1 - decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Replace the model's weights by the average for the duration of the block."""
        current, averages = self._values()
        own = [weights.clone() for weights in current]
        copy_tensors(current, averages)
        try:
            yield
        finally:
            copy_tensors(current, own)

    def _values(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        return [parameter.detach() for parameter in self._trained], list(self.tensors.values())


def copy_tensors(to: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Copy `values` to `to`.

    One call per pair of types: torch raises on empty lists, CUDA copies lists of several types one
    tensor at a time, and torch 2.10 writes all of them as the type of the first
    (https://github.com/pytorch/pytorch/issues/173383).
    """
    groups: dict[tuple[torch.dtype, ...], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for target, value in zip(to, values, strict=True):
        targets, sources = groups.setdefault((target.dtype, value.dtype), ([], []))
        targets.append(target)
        sources.append(value)
    for targets, sources in groups.values():
        torch._foreach_copy_(targets, sources)
