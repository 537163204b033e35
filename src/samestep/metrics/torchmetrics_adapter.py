"""Metrics of torchmetrics, with the same bits on every number of ranks."""

from __future__ import annotations

from typing import Any

import torch

from samestep.distributed.world import World, all_gather
from samestep.errors import InputError


class TorchMetric:
    """A metric of torchmetrics whose states are sums over samples.

    Integer states are added while the evaluation runs. Other states are kept for each microbatch and added in sorted
    order, because a sum of floating-point numbers depends on the order.

    Args:
        name: key of the metric in the results of an evaluation.
        metric: a metric of torchmetrics; it is reset.

    Raises:
        InputError: a state is a list, or is not a sum.
    """

    def __init__(self, name: str, metric: Any) -> None:
        self.name, self._metric = name, metric
        self.higher_is_better: bool | None = metric.higher_is_better
        for state, reduction in metric._reductions.items():
            if isinstance(metric._defaults[state], list) or getattr(reduction, "__name__", "") != "dim_zero_sum":
                raise InputError(
                    f"metric {name}: the state {state!r} is not a sum over samples",
                    expected="metrics of torchmetrics whose states are sums, such as those of counts",
                    fix="pass thresholds=200 to a curve; or write a class with update, compute(world) and reset",
                    code="E_METRIC",
                )
        self._inexact = [state for state, default in metric._defaults.items() if default.is_floating_point()]
        self._values: list[list[list[float]]] = []  # of each microbatch and inexact state
        self.reset()

    def update(self, outputs: Any, targets: Any) -> None:
        """Add one microbatch."""
        if isinstance(outputs, torch.Tensor) and self._metric.device != outputs.device:
            self._metric.to(outputs.device)
        self._metric.update(outputs, targets)
        if self._inexact:
            self._values.append([getattr(self._metric, state).double().flatten().tolist() for state in self._inexact])
            self._set(dict.fromkeys(self._inexact))

    def compute(self, world: World) -> float:
        """Return the value over all ranks, and reset the states. A collective.

        Raises:
            InputError: the value is not one number.
        """
        self._metric.to(world.device)
        for state in self._metric._defaults.keys() - set(self._inexact):
            world.all_reduce(getattr(self._metric, state))
        if self._inexact:
            parts = [part for values in all_gather(self._values, world) for part in values]
            columns = [zip(*state, strict=True) for state in zip(*parts, strict=True)]
            sums = [[sum(sorted(column)) for column in state] for state in columns]
            self._set(dict(zip(self._inexact, sums, strict=True)))
        # `compute` of the class: that of the instance warns if this rank has no samples, even if other ranks have.
        value = type(self._metric).compute(self._metric)
        self.reset()
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            shape = f" of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""
            raise InputError(
                f"metric {self.name} returned a {type(value).__name__}{shape}",
                expected="one number",
                fix="pass average='macro' or 'micro' instead of average=None",
                code="E_METRIC",
            )
        return float(value)

    def reset(self) -> None:
        """Reset the states."""
        self._metric.reset()
        self._values = []

    def _set(self, values: dict[str, list[float] | None]) -> None:
        """Set inexact states to values, or to zero."""
        for name, value in values.items():
            default = self._metric._defaults[name]
            new = torch.zeros_like(default) if value is None else torch.tensor(value, dtype=torch.float64)
            setattr(self._metric, name, new.to(default.dtype).view(default.shape).to(self._metric.device))
