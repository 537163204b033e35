"""Metrics of torchmetrics in modules of Lightning: their states belong to the microbatches of one rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torchmetrics import Metric, MetricCollection

from samestep.distributed.logging import logger
from samestep.integrations.torch_loader import integration_error


class WithoutMetrics(torch.nn.Module):
    """View of a module that shares its attributes, but does not list metrics of torchmetrics among its modules.

    The state of a metric belongs to the microbatches of one rank; that of a model is the same on every rank.
    """

    __slots__ = ("_viewed",)
    _viewed: torch.nn.Module

    @classmethod
    def of(cls, module: torch.nn.Module) -> WithoutMetrics:
        """Return a view of `module`."""
        view = cls.__new__(cls)
        object.__setattr__(view, "_viewed", module)
        object.__setattr__(view, "__dict__", module.__dict__)
        return view

    def named_modules(
        self, memo: set[torch.nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.nn.Module]]:
        metrics: list[str] = []
        for name, module in self._viewed.named_modules(memo, prefix, remove_duplicate):
            if isinstance(module, Metric | MetricCollection):
                metrics.append(f"{name}.")
            elif not name.startswith(tuple(metrics)):
                yield name, module


@contextmanager
def refused_sync() -> Iterator[None]:
    """Refuse collectives of torchmetrics in the block, such as a step: ranks have different numbers of microbatches.

    Raises:
        InputError: a metric combines its states over ranks.
    """
    sync = Metric.sync

    def refuse(metric: Metric, *_: Any, should_sync: bool = True, **__: Any) -> None:
        if should_sync:
            on_step, name = metric.dist_sync_on_step, type(metric).__name__
            raise integration_error(
                f"{name}(dist_sync_on_step=True)" if on_step else f"{name}.compute() in a step",
                "no collective in a step: it is called once per microbatch, and ranks have different numbers of them",
                "leave out dist_sync_on_step: self.log(name, metric) combines the ranks at the end of the epoch"
                if on_step
                else "self.log(name, metric), or compute() in a hook such as on_validation_epoch_end; with "
                "sync_on_compute=False for the value of a microbatch",
            )

    Metric.sync = refuse  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        Metric.sync = sync  # type: ignore[method-assign]


def warn_of_inexact_metrics(module: torch.nn.Module) -> None:
    """Report metrics of torchmetrics whose last bits depend on the number of processes."""
    names = [
        f"{name} ({type(metric).__name__})"
        for name, metric in module.named_modules()
        if isinstance(metric, Metric) and any(not _is_exact(metric, state) for state in metric._defaults)
    ]
    if names:
        logger.warning(
            f"metrics whose last bits depend on the number of processes: {', '.join(names)}. A state is a list, "
            "or a sum of floating-point numbers, which samestep.evaluate(..., metrics=[...]) adds in a fixed order."
        )


def _is_exact(metric: Metric, state: str) -> bool:
    """Return whether a state is the same for each division of the samples among ranks: counts, minima and maxima."""
    default, reduction = metric._defaults[state], getattr(metric._reductions[state], "__name__", "")
    if not isinstance(default, torch.Tensor):
        return False
    return reduction in ("dim_zero_min", "dim_zero_max") or (
        reduction == "dim_zero_sum" and not default.is_floating_point()
    )
