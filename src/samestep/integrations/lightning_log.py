"""Values that `LightningModule.log` receives in the microbatches of a batch, combined over all ranks."""

from __future__ import annotations

import inspect
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torchmetrics import Metric

from samestep.data.batch import GlobalBatch, Microbatch
from samestep.distributed.world import World
from samestep.engine.callbacks import Callback
from samestep.engine.engine import Engine
from samestep.engine.step_values import StepValues, ValueRow
from samestep.integrations.torch_loader import integration_error

_SIGNATURE = inspect.signature(LightningModule.log)
_LOG = "log"  # first part of the keys of logged values
_OMITTED = ("self", "name", "value", "batch_size", "enable_graph", "sync_dist", "sync_dist_group")
_REDUCTIONS: dict[str, Callable[[list[float]], float]] = {"sum": math.fsum, "min": min, "max": max}


class BatchLog(Callback):
    """Replaces `log` of a module during a batch, and then logs one value of the global batch for each name.

    The value of `reduce_fx="mean"` is the mean over microbatches, weighted by their numbers of samples or by
    `batch_size`. All ranks log the same bits, so `sync_dist` is not needed. Metrics of torchmetrics are updated by each
    rank, and combine their own states at the end of the epoch.

    Args:
        module: the module.
        world: the ranks.
    """

    def __init__(self, module: LightningModule, world: World) -> None:
        self._module, self._world = module, world
        self._values = StepValues()
        self._ordinals: Counter[tuple[int, str]] = Counter()  # number of values of each name in each microbatch
        self._metrics: dict[str, tuple[Metric, dict[str, Any]]] = {}
        self._microbatch = Microbatch(0, 0, None)

    def begin_step(self, engine: Engine, batch: GlobalBatch) -> None:
        """Exchange the values of this step with its statistics."""
        self._values = engine.step_runner.forward.values

    @contextmanager
    def batch(self, *, is_training: bool) -> Iterator[None]:
        """Collect the values of the block, which computes a step of an engine in training, and log them at its end.

        A collective.
        """
        self._metrics, self._values = {}, StepValues()
        self._ordinals.clear()
        self._is_training = is_training
        self._module.log = self._record  # type: ignore[method-assign]
        try:
            yield
        finally:
            del self._module.log
        if not is_training:
            self._values.read((), (), self._world, is_planned=False)
        self._log()

    def begin_microbatch(self, microbatch: Microbatch) -> None:
        """Attribute the next values to a microbatch."""
        self._microbatch = microbatch

    def _record(self, *arguments: Any, **named: Any) -> None:
        """Collect a value, with the arguments of `LightningModule.log`."""
        bound = _SIGNATURE.bind(self._module, *arguments, **named).arguments
        name, value = bound["name"], bound["value"]
        options = {key: option for key, option in bound.items() if key not in _OMITTED}
        if isinstance(value, Metric):
            self._require_epoch(name, options)
            self._metrics[name] = value, options
            return
        options["reduce_fx"] = _reduction_name(name, options.get("reduce_fx", "mean"))
        number, weight = self._microbatch.number, bound.get("batch_size")
        weight = self._microbatch.size if weight is None else int(weight)
        ordinal = self._ordinals[number, name]
        self._ordinals[number, name] += 1
        number_or_scalar = value.detach().reshape(()) if isinstance(value, torch.Tensor) else float(value)
        if self._microbatch.size:
            key = (_LOG, name, str(ordinal), json.dumps(options))
            self._values.add(number, key, number_or_scalar, weight)

    def _require_epoch(self, name: str, options: dict[str, Any]) -> None:
        on_step = options.get("on_step")
        if on_step or (on_step is None and self._is_training):
            raise integration_error(
                f"self.log({name!r}, metric) with a metric of torchmetrics and on_step=True, the default of training",
                "values of the global batch; a metric has those of one microbatch until the end of the epoch",
                f"self.log({name!r}, metric, on_step=False, on_epoch=True)",
            )

    def _log(self) -> None:
        groups: dict[tuple[str, str], list[ValueRow]] = {}
        for row in self._values.rows:
            if row.key[0] == _LOG:
                groups.setdefault((row.key[1], row.key[2]), []).append(row)
        for (name, _), rows in groups.items():
            weight, options = int(sum(row.second for row in rows)), json.loads(rows[0].key[3])
            if weight:
                self._module.log(name, _combined(rows, options["reduce_fx"]), batch_size=weight, **options)
        for name, (metric, options) in self._metrics.items():
            self._module.log(name, metric, **options)


def _combined(rows: list[ValueRow], reduction: str) -> float:
    if (reduce := _REDUCTIONS.get(reduction)) is not None:
        return reduce([row.first for row in rows])
    return math.fsum(row.first * row.second for row in rows) / sum(row.second for row in rows)


def _reduction_name(name: str, reduction: Any) -> str:
    text = str(getattr(reduction, "__name__", reduction)).lower()
    text = "mean" if text == "avg" else text
    if text != "mean" and text not in _REDUCTIONS:
        raise integration_error(
            f"self.log({name!r}, ..., reduce_fx={reduction!r})", "mean, sum, min or max", 'reduce_fx="mean"'
        )
    return text
