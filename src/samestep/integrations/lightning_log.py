"""Values that modules of Lightning log, and metrics of torchmetrics.

`BatchLog` combines the values of the microbatches of a batch over all ranks. The state of a metric belongs to the
microbatches of one rank.
"""

from __future__ import annotations

import inspect
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule
from torchmetrics import Metric, MetricCollection

from samestep.data.batch import GlobalBatch, Microbatch
from samestep.distributed.logging import logger
from samestep.distributed.world import World, all_gather
from samestep.engine.callbacks import Callback
from samestep.engine.engine import Engine
from samestep.engine.step_stats import StepValues, ValueRow
from samestep.integrations.torch_loader import integration_error

_SIGNATURE = inspect.signature(LightningModule.log)
_LOG, _METRIC = "log", "metric"  # first parts of the keys of logged numbers, and of metrics of torchmetrics
_OMITTED = ("self", "name", "value", "batch_size", "enable_graph", "sync_dist", "sync_dist_group")
_REDUCTIONS: dict[str, Callable[[list[float]], float]] = {"sum": math.fsum, "min": min, "max": max}


class BatchLog(Callback):
    """Replaces `log` of a module during a batch, and then logs one value of the global batch for each name.

    The value of `reduce_fx="mean"` is the mean over microbatches, weighted by their numbers of samples or by
    `batch_size`. All ranks log the same bits, so `sync_dist` is not needed. Metrics of torchmetrics are updated by each
    rank, and combine their own states at the end of the epoch. Every rank logs those that any rank has logged, in the
    same order, because each of them is a collective.
    """

    def __init__(self, module: LightningModule, world: World) -> None:
        self._module, self._world = module, world
        self._values = StepValues()
        self._ordinals: Counter[tuple[int, str]] = Counter()  # number of values of each name in each microbatch
        self._attributes: dict[int, str] = {}  # names of metrics in the module
        self._of_single_ranks: set[str] = set()  # names of values that hooks log on rank 0 alone
        self._microbatch = Microbatch(0, 0, None)

    def begin_step(self, engine: Engine, batch: GlobalBatch) -> None:
        """Exchange the values of this step with its statistics."""
        self._values = engine.step_runner.forward.values

    @contextmanager
    def batch(self, *, is_training: bool) -> Iterator[None]:
        """Collect the values of the block, which computes a step of an engine in training, and log them at its end.

        A collective.
        """
        self._values = StepValues()
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
        options["reduce_fx"] = _reduction_name(name, options.get("reduce_fx", "mean"))
        number, weight = self._microbatch.number, bound.get("batch_size")
        if isinstance(value, Metric):
            self._require_epoch(name, options)
            self._values.add(number, (_METRIC, name, self._attribute_of(name, value), json.dumps(options)), 0.0, 0.0)
            return
        weight = self._microbatch.size if weight is None else int(weight)
        ordinal = self._ordinals[number, name]
        self._ordinals[number, name] += 1
        number_or_scalar = value.detach().reshape(()) if isinstance(value, torch.Tensor) else float(value)
        if self._microbatch.size:
            key = (_LOG, name, str(ordinal), json.dumps(options))
            self._values.add(number, key, number_or_scalar, weight)

    def _attribute_of(self, name: str, metric: Metric) -> str:
        if id(metric) not in self._attributes:
            modules = self._module.named_modules()
            self._attributes = {id(module): attribute for attribute, module in modules if isinstance(module, Metric)}
        if (attribute := self._attributes.get(id(metric))) is not None:
            return attribute
        raise integration_error(
            f"self.log({name!r}, metric) with a {type(metric).__name__} that the module does not contain",
            "an attribute of the module, set in __init__; for several, a ModuleDict",
        )

    def _require_epoch(self, name: str, options: dict[str, Any]) -> None:
        on_step = options.get("on_step")
        if on_step or (on_step is None and self._is_training):
            fix = f"self.log({name!r}, metric, on_step=False, on_epoch=True)"
            raise integration_error(f"self.log({name!r}, metric) with on_step=True, the default of training", fix)

    def _log(self) -> None:
        groups: dict[tuple[str, str], list[ValueRow]] = {}
        for row in self._values.rows:
            if row.key[0] == _LOG:
                groups.setdefault((row.key[1], row.key[2]), []).append(row)
        for (name, _), rows in groups.items():
            weight, options = int(sum(row.second for row in rows)), json.loads(rows[0].key[3])
            if weight:
                self._module.log(name, _combined(rows, options["reduce_fx"]), batch_size=weight, **options)
        for key in dict.fromkeys(row.key for row in self._values.rows if row.key[0] == _METRIC):
            _, name, attribute, arguments = key
            self._module.log(name, cast("Metric", self._module.get_submodule(attribute)), **json.loads(arguments))

    def require_equal_values(self) -> None:
        """Refuse values that hooks logged and that differ between ranks; a collective."""
        trainer = self._module.trainer
        for results in (trainer._results, trainer.fit_loop.epoch_loop._results):
            items: Iterable[Any] = (results or {}).values()
            self._of_single_ranks |= {item.meta.name for item in items if item.meta.sync.rank_zero_only}
        own = {
            name: ", ".join(map(repr, value.double().flatten().tolist()))
            for name, value in trainer.callback_metrics.items()
            if not self._of_single_ranks & _possible_names(name)
        }
        first, *others = all_gather(own, self._world)
        for rank, values in enumerate(others, start=1):
            for name in sorted({*first, *values}):
                text, other = (f"as {logged[name]}" if name in logged else "not" for logged in (first, values))
                if text != other:
                    raise integration_error(
                        f"a hook logged {name!r} {text} on rank 0, and {other} on rank {rank}",
                        "self.log in the step, which combines all microbatches; or rank_zero_only=True",
                    )


def _possible_names(key: str) -> set[str]:
    """Return the names under which a value with this key of `callback_metrics` can have been logged."""
    name, _, _ = key.partition("/dataloader_idx_")
    return {name, name.removesuffix("_step"), name.removesuffix("_epoch")}


def _combined(rows: list[ValueRow], reduction: str) -> float:
    if (reduce := _REDUCTIONS.get(reduction)) is not None:
        return reduce([row.first for row in rows])
    return math.fsum(row.first * row.second for row in rows) / sum(row.second for row in rows)


def _reduction_name(name: str, reduction: Any) -> str:
    text = str(getattr(reduction, "__name__", reduction)).lower()
    text = "mean" if text == "avg" else text
    if text != "mean" and text not in _REDUCTIONS:
        raise integration_error(f"self.log({name!r}, ..., reduce_fx={reduction!r})", "mean, sum, min or max")
    return text


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
    """Refuse collectives of torchmetrics in the block, such as a step: ranks have different numbers of microbatches."""
    sync = Metric.sync

    def refuse(metric: Metric, *_: Any, should_sync: bool = True, **__: Any) -> None:
        if should_sync:
            raise integration_error(
                f"{type(metric).__name__} with dist_sync_on_step=True, or its compute() in a step",
                "self.log(name, metric), or compute() in a hook such as on_validation_epoch_end",
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
