"""Values that `LightningModule.log` receives in the microbatches of a batch, combined over all ranks."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from torchmetrics import Metric

from samestep.data.batch import Microbatch
from samestep.distributed.world import World, all_gather
from samestep.engine.callbacks import Callback
from samestep.integrations.torch_loader import integration_error

_SIGNATURE = inspect.signature(LightningModule.log)
_OMITTED = ("self", "name", "value", "batch_size", "enable_graph", "sync_dist", "sync_dist_group")
_REDUCTIONS: dict[str, Callable[[list[float]], float]] = {"sum": math.fsum, "min": min, "max": max}


class _Entry(NamedTuple):
    """One value of one microbatch."""

    microbatch: int
    name: str
    ordinal: int  # number of earlier values of this name in the microbatch
    weight: int
    options: dict[str, Any]
    value: float = 0.0


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
        self._entries: list[tuple[_Entry, torch.Tensor]] = []
        self._metrics: dict[str, tuple[Metric, dict[str, Any]]] = {}
        self._microbatch = Microbatch(0, 0, None)

    @contextmanager
    def batch(self, *, is_training: bool) -> Iterator[None]:
        """Collect the values of the block, and log them at its end; a collective."""
        self._entries, self._metrics = [], {}
        self._is_training = is_training
        self._module.log = self._record  # type: ignore[method-assign]
        try:
            yield
        finally:
            del self._module.log
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
        ordinal = sum(entry.microbatch == number and entry.name == name for entry, _ in self._entries)
        tensor = value.detach() if isinstance(value, torch.Tensor) else torch.tensor(float(value))
        if self._microbatch.size:
            self._entries.append((_Entry(number, name, ordinal, weight, options), tensor))

    def _require_epoch(self, name: str, options: dict[str, Any]) -> None:
        on_step = options.get("on_step")
        if on_step or (on_step is None and self._is_training):
            raise integration_error(
                f"self.log({name!r}, metric) with a metric of torchmetrics and on_step=True, the default of training",
                "values of the global batch; a metric has those of one microbatch until the end of the epoch",
                f"self.log({name!r}, metric, on_step=False, on_epoch=True)",
            )

    def _log(self) -> None:
        tensors = [tensor.reshape(1).double().to(self._world.device) for _, tensor in self._entries]
        numbers = torch.cat(tensors).tolist() if tensors else []
        own = [entry._replace(value=number) for (entry, _), number in zip(self._entries, numbers, strict=True)]
        self._entries = []
        groups: dict[tuple[str, int], list[_Entry]] = {}
        for row in sorted((row for rows in all_gather(own, self._world) for row in rows), key=lambda row: row[0]):
            entry = _Entry(*row)
            groups.setdefault((entry.name, entry.ordinal), []).append(entry)
        for entries in groups.values():
            weight = sum(entry.weight for entry in entries)
            if weight:
                self._module.log(entries[0].name, _combined(entries), batch_size=weight, **entries[0].options)
        for name, (metric, options) in self._metrics.items():
            self._module.log(name, metric, **options)


def _combined(entries: list[_Entry]) -> float:
    reduce = _REDUCTIONS.get(entries[0].options["reduce_fx"])
    if reduce is not None:
        return reduce([entry.value for entry in entries])
    return math.fsum(entry.value * entry.weight for entry in entries) / sum(entry.weight for entry in entries)


def _reduction_name(name: str, reduction: Any) -> str:
    text = str(getattr(reduction, "__name__", reduction)).lower()
    text = "mean" if text == "avg" else text
    if text != "mean" and text not in _REDUCTIONS:
        raise integration_error(
            f"self.log({name!r}, ..., reduce_fx={reduction!r})", "mean, sum, min or max", 'reduce_fx="mean"'
        )
    return text
