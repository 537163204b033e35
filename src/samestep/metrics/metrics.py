"""Metrics of an evaluation by name or as objects (counts, functions of the loss, torchmetrics), and the best value."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

import torch

from samestep.distributed.world import World, all_gather
from samestep.errors import InputError, RecipeError
from samestep.metrics.counts import Accuracy, CountMetric, OverlapMetric, rounded_sum

Mode = Literal["min", "max"]
METRICS: dict[str, Callable[[str, int | None, int], CountMetric]] = {
    "accuracy": Accuracy,
    "top5": partial(Accuracy, top_k=5),
    "dice": partial(OverlapMetric, score="dice"),
    "f1": partial(OverlapMetric, score="dice"),
    "iou": partial(OverlapMetric, score="iou"),
}


def _perplexity(loss: float) -> float:
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


LOSS_METRICS: dict[str, Callable[[float], float]] = {"perplexity": _perplexity}


class Metric(Protocol):
    """Number over a dataset, computed microbatch by microbatch."""

    name: str

    def update(self, outputs: Any, targets: Any) -> None:
        """Add one microbatch."""

    def compute(self, world: World | None = None) -> float:
        """Return the value, over all ranks of a world if there is one, and reset the counts."""

    def reset(self) -> None:
        """Reset the counts."""


class LossMetric(NamedTuple):
    """An increasing function of the exact mean loss of an evaluation."""

    name: str
    function: Callable[[float], float]


class FunctionMetric:
    """Mean over all samples of the values of a function.

    Args:
        name: key of the metric in the results of an evaluation.
        function: from outputs and targets of a microbatch to a tensor with one value per sample, or to a sum and a
            count.
    """

    def __init__(self, name: str, function: Callable[[Any, Any], Any]) -> None:
        self.name, self.function = name, function
        self._rows: list[tuple[Any, Any]] = []  # sum and count of each microbatch, on the device

    def update(self, outputs: Any, targets: Any) -> None:
        """Add one microbatch.

        Raises:
            InputError: the function returned neither values nor a sum and a count.
        """
        value = self.function(outputs, targets)
        if isinstance(value, tuple) and len(value) == 2:
            self._rows.append(value)
        elif isinstance(value, torch.Tensor) and value.dim() > 0:
            self._rows.append((value.detach().double().sum(), value.numel()))
        else:
            shape = f" of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""
            raise InputError(
                f"metric {self.name} returned a {type(value).__name__}{shape}",
                expected="a tensor with one value per sample, or a sum and a count, which are added over microbatches",
                fix="return values without .mean(), or (values.sum(), len(values))",
                code="E_METRIC",
            )

    def compute(self, world: World) -> float:
        """Return the mean over all ranks, NaN if nothing was counted, and reset the sums. A collective."""
        scalars = [
            torch.as_tensor(number, dtype=torch.float64).detach().view(1) for row in self._rows for number in row
        ]
        none = torch.empty(0, dtype=torch.float64, device=world.device)
        numbers = torch.cat([none, *(scalar.to(world.device, non_blocking=True) for scalar in scalars)]).tolist()
        own = [numbers[start : start + 2] for start in range(0, len(numbers), 2)]
        rows = [row for rows in all_gather(own, world) for row in rows]
        self.reset()
        total, count = (rounded_sum([row[column] for row in rows]) for column in (0, 1))
        return total / count if count else math.nan

    def reset(self) -> None:
        """Reset the sums."""
        self._rows = []

    def mark(self) -> Callable[[], None]:
        """Return a function that drops later updates."""
        return partial(self._rows.__delitem__, slice(len(self._rows), None))


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
        for state in self._metric._defaults:  # in the same order on every rank
            if state not in self._inexact:
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

    def mark(self) -> Callable[[], None]:
        """Return a function that drops later updates."""
        states = {name: getattr(self._metric, name).clone() for name in self._metric._defaults}
        length = len(self._values)

        def drop() -> None:
            for name, state in states.items():
                setattr(self._metric, name, state.to(self._metric.device))  # the first update moves it
            del self._values[length:]

        return drop

    def _set(self, values: dict[str, list[float] | None]) -> None:
        """Set inexact states to values, or to zero."""
        for name, value in values.items():
            default = self._metric._defaults[name]
            new = torch.zeros_like(default) if value is None else torch.tensor(value, dtype=torch.float64)
            setattr(self._metric, name, new.to(default.dtype).view(default.shape).to(self._metric.device))


# A name, an object with the methods of `Metric`, a function, or a metric of torchmetrics.
Metrics = Iterable[Any] | Mapping[str, Any]


def build_metrics(
    names: Iterable[str], classes: int | None = None, *, ignore_index: int = -100
) -> list[CountMetric | LossMetric]:
    """Return metrics by name; targets of the value `ignore_index` (padding) are not counted.

    Raises:
        RecipeError: a name is unknown.
    """
    metrics: list[CountMetric | LossMetric] = []
    for name in names:
        if name in LOSS_METRICS:
            metrics.append(LossMetric(name, LOSS_METRICS[name]))
        elif name in METRICS:
            metrics.append(METRICS[name](name, classes, ignore_index))
        else:
            raise RecipeError(
                f"metric {name!r} is not known",
                expected=f"one of {', '.join(sorted([*METRICS, *LOSS_METRICS]))}",
                fix="correct the name",
                code="E_METRIC",
            )
    return metrics


def as_metrics(metrics: Metrics, *, ignore_index: int = -100) -> list[Metric | LossMetric]:
    """Return the metrics of a list, or of a mapping from names; see `Metrics`.

    The name of a metric of torchmetrics in a list is that of its class, such as `multiclass_f1_score`.

    Raises:
        InputError: a metric is unknown or cannot be summed over ranks, or two have the same name.
    """
    pairs = list(metrics.items() if isinstance(metrics, Mapping) else ((None, metric) for metric in metrics))
    library = sys.modules.get("torchmetrics")
    if library is not None and any(
        isinstance(one, library.MetricCollection) for one in (metrics, *(metric for _, metric in pairs))
    ):
        raise InputError(
            "the metrics contain a MetricCollection",
            expected="single metrics: each has its own result",
            fix="pass those of the collection: metrics=dict(collection.items())",
            code="E_METRIC",
        )
    result = [_as_metric(name, metric, ignore_index) for name, metric in pairs]
    names = [metric.name for metric in result]
    repeated = [name for name in names if names.count(name) > 1]
    if repeated:
        raise InputError(
            f"several metrics have the name {repeated[0]}",
            expected="different names",
            fix='pass a mapping: metrics={"top1": MulticlassAccuracy(10), "top5": MulticlassAccuracy(10, top_k=5)}',
            code="E_METRIC",
        )
    return result


def _as_metric(name: str | None, metric: Any, ignore_index: int) -> Any:
    library = sys.modules.get("torchmetrics")
    if library is not None and isinstance(metric, library.Metric):
        return TorchMetric(name or _snake_case(type(metric).__name__), metric)
    if callable(metric) and not hasattr(metric, "update"):
        return FunctionMetric(name or _name_of(metric), metric)
    if name is not None:
        raise InputError(
            f"the metric with the name {name} is a {type(metric).__name__}",
            expected="functions and metrics of torchmetrics in a mapping",
            fix="pass other metrics in a list; they have names",
            code="E_METRIC",
        )
    return build_metrics([metric], ignore_index=ignore_index)[0] if isinstance(metric, str) else metric


def _name_of(function: Any) -> str:
    name = getattr(function, "__name__", "")
    if not name.isidentifier():
        raise InputError(
            f"the metric {function!r} has no name",
            expected="a function with a name, or a mapping from names to functions",
            fix='metrics={"error": lambda outputs, targets: ...}',
            code="E_METRIC",
        )
    return str(name)


def require_outputs(outputs: Any, targets: Any, metrics: Iterable[Metric | LossMetric]) -> None:
    """Refuse metrics of outputs that a forward function did not return.

    Raises:
        InputError: outputs or targets are None.
    """
    names = [metric.name for metric in metrics if not isinstance(metric, LossMetric)]
    if names and (outputs is None or targets is None):
        raise InputError(
            f"metric {names[0]} received no outputs or no targets",
            expected="a forward function that returns outputs and targets, if there are metrics of them",
            fix='return {"loss": loss, "outputs": outputs, "targets": targets}',
            code="E_METRIC",
        )


def require_loss(values: Mapping[str, float], metrics: Iterable[Metric | LossMetric]) -> None:
    """Refuse metrics of the loss of an evaluation without a loss.

    Raises:
        InputError: there is such a metric.
    """
    names = [metric.name for metric in metrics if isinstance(metric, LossMetric)]
    if names and "loss" not in values:
        raise InputError(
            f"metric {names[0]} is a function of the loss, and the evaluation has none",
            expected="a loss",
            fix="samestep.evaluate(..., loss=nn.CrossEntropyLoss())",
            code="E_METRIC",
        )


def _snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


@dataclass(frozen=True)
class BestRule:
    """The smallest or largest value of one result of an evaluation.

    Attributes:
        by: key among the results of an evaluation: `loss`, or the name of a metric or of a loss term.
        mode: `min` or `max`.
    """

    by: str
    mode: Mode

    @classmethod
    def of(cls, by: str | None, mode: Mode | None, metrics: Sequence[str] = ()) -> BestRule:
        """Return a rule with defaults.

        Args:
            by: None for the first of `metrics`; the loss without metrics, or if the first is a function of the loss.
            mode: None for `min` of losses and `max` of the built-in metrics.
            metrics: names of metrics.

        Raises:
            InputError: the mode of a metric that is not built in is missing, or is neither `min` nor `max`.
        """
        if by is None:
            by = metrics[0] if metrics and metrics[0] not in LOSS_METRICS else "loss"
        if mode is None and (by == "loss" or by.startswith("loss_") or by in LOSS_METRICS):
            mode = "min"
        if mode is None and by in METRICS:
            mode = "max"
        if mode not in ("min", "max"):
            raise InputError(
                f"best_by is {by} and best_mode is {mode}",
                expected="best_mode min or max for a metric that is not built in",
                fix=f"set best_by: {by} and best_mode: max, if higher values are better",
                code="E_METRIC",
            )
        return cls(by, mode)

    def is_best(self, values: Mapping[str, float], best: float | None) -> bool:
        """Return whether the results of an evaluation are better than the best value so far.

        Results with a loss or a value that is not finite are never the best.

        Raises:
            InputError: the results have no value of this name.
        """
        if self.by not in values:
            raise InputError(
                f"best_by is {self.by}, which the evaluation did not return",
                expected=f"one of {', '.join(name for name in values if name != 'samples')}",
                fix="correct best_by, or add the metric to the evaluation",
                code="E_METRIC",
            )
        value = values[self.by]
        if not (math.isfinite(values.get("loss", 0.0)) and math.isfinite(value)):
            return False
        return best is None or (value < best if self.mode == "min" else value > best)
