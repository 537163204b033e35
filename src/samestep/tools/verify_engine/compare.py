"""Comparison of two trials: equal quantities, distances and the first difference.

Differences are ordered by cause and effect: state before the step, samples, inputs, rates, outputs, loss, gradients,
state after the step. So the first difference is never a consequence of another one in the list.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from samestep.tools.verify_engine.trials import Note, Record, StepRecord
from samestep.units import plural

# Stages in the order of cause and effect, as named in a location.
STAGES = {
    "before": "before the step",
    "order": "order of samples",
    "microbatches": "number of microbatches",
    "inputs": "inputs",
    "targets": "targets",
    "rates": "learning rates",
    "settings": "optimizer settings",
    "outputs": "outputs",
    "loss": "loss",
    "gradients": "gradient",
    "after": "after the step",
    "optimizer": "optimizer state",
    "steps": "number of steps",
    "evaluation": "values",
}
# Rows of the certificate's table.
QUANTITIES = {
    "order": "order of samples",
    "inputs": "inputs as augmented",
    "targets": "targets",
    "rates": "learning rates",
    "outputs": "outputs",
    "loss": "losses and counts",
    "gradients": "gradients",
    "weights": "weights",
    "buffers": "buffers",
    "optimizer": "optimizer state",
    "evaluation": "evaluation",
}
# Quantities of the stages that are not named like one.
_QUANTITY_OF_STAGE = {"microbatches": "order", "settings": "rates", "steps": "order"}


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One difference."""

    quantity: str  # key of `QUANTITIES`
    stage: str  # key of `STAGES`
    step: int | None  # optimizer step; None for an evaluation
    microbatch: int | None = None
    module: str | None = None
    tensor: str | None = None  # name of the tensor in the model or the optimizer, or of the metric
    ranks: tuple[int, int] | None = None  # of the second trial, for a difference between its ranks
    distance: float | None = None  # largest difference relative to the largest element; None if only bits were compared
    detail: str = ""  # both values, if they are short
    fails: bool = True  # whether the distance is beyond the tolerance, or not measured

    @property
    def order_key(self) -> tuple[float, int]:
        """Sort key in the order of cause and effect."""
        return (math.inf if self.step is None else self.step, list(STAGES).index(self.stage))

    @property
    def location(self) -> str:
        """Location as text: `step 2, microbatch 3, module layer1.0.bn1, outputs`."""
        words = ["evaluation" if self.step is None else f"step {self.step}"]
        if self.microbatch is not None:
            words.append(f"microbatch {self.microbatch}")
        if self.module:
            words.append(f"module {self.module}")
        if self.tensor and self.stage != "evaluation":
            words.append(self.tensor)
        words.append(STAGES[self.stage])
        if self.ranks:
            words.append(f"ranks {self.ranks[0]} and {self.ranks[1]}")
        text = ", ".join(words)
        return f"{text}: {self.detail}" if self.detail else text


@dataclass
class Comparison:
    """Result of a comparison."""

    label: str  # description of the second trial
    differences: list[Difference] = field(default_factory=list)  # differences of any size
    compared: Counter[str] = field(default_factory=Counter)  # number of compared values, by quantity

    @property
    def failing(self) -> list[Difference]:
        """Differences beyond the tolerance."""
        return [difference for difference in self.differences if difference.fails]

    @property
    def first(self) -> Difference | None:
        """First failing difference."""
        return first_of(self.failing)

    def verdict(self, quantity: str) -> str:
        """Return `bits`, the largest distance, `differs`, or `-` if the trials contain no such values."""
        if any(difference.quantity == quantity for difference in self.failing):
            return "differs"
        if not self.compared[quantity]:
            return "-"
        largest = self.distance(quantity)
        return f"{largest:.1e}" if largest else "bits"

    def distance(self, quantity: str) -> float | None:
        """Return the largest measured distance, within the tolerance or not."""
        sizes = [difference.distance for difference in self.differences if difference.quantity == quantity]
        return max((size for size in sizes if size is not None), default=None)


def first_of(differences: list[Difference]) -> Difference | None:
    """Return the first difference in the order of cause and effect."""
    return min(differences, key=lambda difference: difference.order_key, default=None)


def compare(reference: Record, other: Record, tolerance: float | None) -> Comparison:
    """Compare `other` with `reference`, bit for bit or within a relative tolerance.

    Order, inputs, targets, counts and rates have to be equal under any tolerance.
    """
    result = Comparison(other.label or plural(other.processes, "process"))
    parameters = reference.engine.get("parameters", ())
    for number in sorted({*reference.steps, *other.steps}):
        comparer = _Comparer(result, parameters, tolerance, number)
        if number in reference.steps and number in other.steps:
            comparer.compare_steps(reference.steps[number], other.steps[number])
            comparer.compare_ranks(other.steps[number])
        else:
            comparer.add("steps", detail="missing" if number in reference.steps else "absent from the reference")
    evaluations = reference.notes("evaluation"), other.notes("evaluation")
    _Comparer(result, parameters, tolerance, None).compare_evaluations(*evaluations)
    return result


class _Comparer:
    """Adds the differences of one step, or of the evaluations, to a comparison."""

    def __init__(
        self, result: Comparison, parameters: Collection[str], tolerance: float | None, step: int | None
    ) -> None:
        self._result, self._compared = result, result.compared
        self._parameters, self._tolerance, self._step = parameters, tolerance, step

    def add(self, stage: str, distance: float | None = None, rounding: float = 0.0, **fields: Any) -> None:
        """Add a difference, which fails unless its distance is measured and within the tolerance or `rounding`."""
        fields.setdefault("quantity", _QUANTITY_OF_STAGE.get(stage, stage))
        allowed = -1.0 if self._tolerance is None else max(self._tolerance, rounding)
        fails = distance is None or not distance <= allowed
        difference = Difference(stage=stage, step=self._step, distance=distance, fails=fails, **fields)
        self._result.differences.append(difference)

    def compare_steps(self, expected: StepRecord, actual: StepRecord) -> None:
        one, other = expected.main, actual.main
        distances = other["distances"]
        self._tensors("before", one, other, {})
        self._compared["order"] += len(one["order"])
        self._compared["rates"] += 1
        self._facts(one, other)
        if one["microbatches_of_batch"] != other["microbatches_of_batch"]:
            detail = f"{one['microbatches_of_batch']} microbatches and {other['microbatches_of_batch']}"
            self.add("microbatches", detail=detail)
        outputs = {key: size for rank in actual.by_rank for key, size in rank["distances"].get("outputs", {}).items()}
        for number in sorted(expected.microbatches.keys() & actual.microbatches.keys()):
            self._microbatch(number, expected.microbatches[number], actual.microbatches[number], outputs)
        self._numbers(one, other, ("loss", "count"))
        for stage, kind in (("gradients", "gradients"), ("after", "state"), ("optimizer", "optimizer")):
            self._tensors(stage, one, other, distances.get(kind, {}))

    def compare_ranks(self, step: StepRecord) -> None:
        """Compare ranks with rank 0: their state has to be equal, bit for bit."""
        for rank, note in enumerate(step.by_rank[1:], start=1):
            pair = (0, rank)
            self._facts(step.main, note, ranks=pair)
            for stage in ("before", "gradients", "after", "optimizer"):
                self._tensors(stage, step.main, note, {}, ranks=pair)

    def compare_evaluations(self, expected: list[Note], actual: list[Note]) -> None:
        if len(expected) != len(actual):
            self.add("evaluation", detail=f"{len(expected)} evaluations and {len(actual)}")
        for one, other in zip(expected, actual, strict=False):
            values, others = one["values"], other["values"]
            # Rounding may move one sample across the border between two classes.
            border = 1.5 / max(1.0, float(values.get("samples", 1)))
            for name in sorted({*values, *others}, key=lambda name: (name != "samples", name)):
                value, other_value = values.get(name), others.get(name)
                self._compared["evaluation"] += 1
                if value != other_value:
                    distance = None if name == "samples" else _relative(value, other_value)
                    rounding = 0.0 if name.startswith("loss") else border
                    detail = f"{name} {value} and {other_value}"
                    self.add("evaluation", distance, rounding, tensor=name, detail=detail)

    def _facts(self, one: Note, other: Note, ranks: tuple[int, int] | None = None) -> None:
        """Compare the order of samples, learning rates and optimizer settings."""
        for stage, describe in (("order", _order_detail), ("rates", _settings_detail), ("settings", _settings_detail)):
            if one[stage] != other[stage]:
                self.add(stage, detail=describe(one[stage], other[stage]), ranks=ranks)

    def _microbatch(self, number: int, one: Note, other: Note, distances: Mapping[str, float]) -> None:
        for stage in ("inputs", "targets"):
            self._compared[stage] += 1
            if one[stage] != other[stage]:
                self.add(stage, microbatch=number)
        self._compared["outputs"] += 1
        if one["outputs"] != other["outputs"]:
            sizes = [size for name, size in distances.items() if name.partition("/")[0] == str(number)]
            module = next((name for name, bits in one["modules"] if [name, bits] not in other["modules"]), None)
            self.add("outputs", max(sizes, default=None), microbatch=number, module=module)
        self._numbers(one, other, ("sum", "count"), number)

    def _numbers(self, one: Note, other: Note, names: tuple[str, ...], microbatch: int | None = None) -> None:
        for name in names:
            self._compared["loss"] += 1
            value, other_value = one[name], other[name]
            if value != other_value and not (math.isnan(value) and math.isnan(other_value)):
                distance = None if name == "count" else _relative(value, other_value)
                detail = f"{name} {value!r} and {other_value!r}"
                self.add("loss", distance, microbatch=microbatch, detail=detail)

    def _tensors(
        self, stage: str, one: Note, other: Note, distances: Mapping[str, float], ranks: tuple[int, int] | None = None
    ) -> None:
        """Compare tensors by digest; `distances` has the distances of those that differ, if they were measured."""
        # Weights that differ within the tolerance after a step also differ before the next one.
        if stage == "before" and self._tolerance is not None and ranks is None and self._step != 1:
            return
        digests, other_digests = one[stage], other[stage]
        for name in sorted({*digests, *other_digests}):
            quantity = stage if stage in QUANTITIES else ("weights" if name in self._parameters else "buffers")
            if stage != "before":
                self._compared[quantity] += 1
            if digests.get(name) != other_digests.get(name):
                self.add(stage, distances.get(name), quantity=quantity, tensor=name, ranks=ranks)


def _relative(value: Any, other: Any) -> float | None:
    if not isinstance(value, int | float) or not isinstance(other, int | float):
        return None
    scale = max(abs(value), abs(other))
    return abs(value - other) / scale if scale and math.isfinite(scale) else None


def _settings_detail(one: list[Any], other: list[Any]) -> str:
    """Return learning rates, or the differing settings of the first parameter group that differs."""
    for settings, others in zip(one, other, strict=False):
        if isinstance(settings, Mapping) and settings != others:
            keys = [key for key in settings if settings[key] != others.get(key)]
            return ", ".join(f"{key} {settings[key]} and {others.get(key)}" for key in keys)
    return f"{one} and {other}"


def _order_detail(one: list[int], other: list[int]) -> str:
    if len(one) != len(other):
        return f"{len(one)} samples and {len(other)}"
    position = next((i for i, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]), 0)
    return f"position {position} of the batch is sample {one[position]} and sample {other[position]}"
