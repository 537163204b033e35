"""An exponential moving average of the weights, to evaluate with.

Polyak & Juditsky, "Acceleration of Stochastic Approximation by Averaging" (1992). It is one elementwise function of the
same weights on every rank, so it has the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from samestep.errors import InputError


class AveragedWeights:
    """The average of a model's trained parameters; frozen ones and buffers are the model's own.

    Args:
        trained: what this rank holds of the trained parameters, by name.
        decay: how much of the average stays at each step, between 0 and 1; in the first steps it is less, so that the
            weights at the start are soon forgotten.
    """

    def __init__(self, trained: Mapping[str, torch.nn.Parameter], decay: float) -> None:
        if not 0 < decay < 1:
            raise InputError(f"ema is {decay}", rule="a decay between 0 and 1, or None", do="ema=0.9999")
        self._trained = dict(trained)
        self._average = {name: p.detach().clone() for name, p in self._trained.items()}
        self._decay = decay

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The average, by the model's names."""
        return self._average

    def update(self, step: int) -> None:
        """Take in the weights as they are after step number `step`, from 1."""
        # As TensorFlow's ExponentialMovingAverage with `num_updates` has it.
        decay = min(self._decay, (1 + step) / (10 + step))
        if current := self._current():
            torch._foreach_lerp_(self._averages(), current, 1 - decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """While the block runs the model's weights are the average."""
        current = self._current()
        own = [weights.clone() for weights in current]
        _copy(current, self._averages())
        try:
            yield
        finally:
            _copy(current, own)

    def _current(self) -> list[torch.Tensor]:
        return [parameter.detach() for parameter in self._trained.values() if not parameter.is_meta]

    def _averages(self) -> list[torch.Tensor]:
        """Those that have values: of parameters on other ranks there are only names and shapes."""
        return [average for average in self._average.values() if not average.is_meta]


def _copy(to: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    """Set tensors from others; torch's own refuses to set none."""
    if to:
        torch._foreach_copy_(to, values)
