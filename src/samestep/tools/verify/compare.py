"""Comparison of two trials: equal quantities, distances and the first difference.

Differences are ordered by cause and effect: state before the step, batches, rates, calls in order,
losses, gradients, state after the step. So the first difference is never a consequence of another
one in the list.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

from samestep.tools.verify.texts import Printed, differing_lines, numbers_of
from samestep.tools.verify.trials import Note, Record, described

# Stages in the order of cause and effect, as named in a location. Those of calls are ordered by
# call first.
STAGES = {
    "before": "before the step",
    "order": "order of samples",
    "inputs": "inputs",
    "targets": "targets",
    "settings": "settings of the step",
    "rates": "learning rates",
    "calls": "sequence of calls",
    "arguments": "arguments",
    "outputs": "outputs",
    "loss": "loss",
    "gradients": "gradient",
    "after": "after the step",
    "optimizer": "optimizer state",
    "steps": "number of steps",
    "printed": "printed numbers",
    "files": "written files",
}
TEXTS = ("printed", "files")  # stages without a step
# Rows of the certificate's table.
QUANTITIES = {
    "order": "order of samples",
    "inputs": "inputs as augmented",
    "targets": "targets",
    "rates": "learning rates",
    "arguments": "arguments of calls",
    "outputs": "outputs of calls",
    "loss": "losses",
    "gradients": "gradients",
    "weights": "weights",
    "buffers": "buffers",
    "optimizer": "optimizer state",
    "evaluation": "evaluation",
    "printed": "printed numbers",
    "files": "written files",
}
# Quantities of the stages that are not named like one.
_QUANTITY_OF_STAGE = {"settings": "rates", "steps": "order", "calls": "arguments"}
# A difference within rounding is at most this factor above that of a run with perturbed weights:
# another sum of n terms has an error of about the square root of n units in the last place, the
# perturbation one.
_FACTOR = 16.0
# In float64 rounding is far below, and a mistake far above.
ROUNDING = 1e-9


@dataclass(frozen=True)
class Tolerance:
    """Largest difference that is rounding, by quantity and step.

    Attributes:
        distances: distances of a run with weights moved by a unit in the last place before each
            step.
        eps: unit in the last place of the weights. At most half of the digits can differ: a
            decision of the model, such as that of a ReLU, can turn any rounding into a large
            difference, which float64 tells from a mistake.
    """

    distances: Mapping[str, Mapping[int, float]]
    eps: float

    @classmethod
    def of(cls, reference: Record, perturbed: Record) -> Tolerance:
        """Measure the tolerance; distances count for all later steps."""
        distances: dict[str, dict[int, float]] = {}
        for one in compare(reference, perturbed, None).differences:
            size = one.distance
            if size is not None and math.isfinite(size) and one.ranks is None:
                by_step = distances.setdefault(one.quantity, {})
                by_step[one.step] = max(by_step.get(one.step, 0.0), size)
        return cls(distances, float(reference.end.get("eps", 0.0)))

    def at(self, quantity: str, step: int) -> float:
        """Return the tolerance of a quantity in a step."""
        # A printed number can be of any quantity.
        quantities = self.distances if quantity in TEXTS else (quantity,)
        by_step = [pair for name in quantities for pair in self.distances.get(name, {}).items()]
        earlier = (size for number, size in by_step if number <= step)
        # 4 units at least: the perturbed run can have the bits of the reference by chance.
        return max(4 * self.eps, min(math.sqrt(self.eps), _FACTOR * max(earlier, default=0.0)))

    def data(self) -> dict[str, str]:
        """Return the largest tolerance of each quantity as text."""
        # 2^62: after all steps.
        return {QUANTITIES[name]: f"{self.at(name, 2**62):.1e}" for name in self.distances}


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One difference."""

    quantity: str  # key of `QUANTITIES`
    stage: str  # key of `STAGES`
    step: int  # of the optimizers, from 1
    number: int | None = None  # of the call or the batch in this step, from 0
    module: str | None = None
    tensor: str | None = None  # name of the tensor in the model or the optimizer
    ranks: tuple[int, int] | None = None  # of the second trial, for a difference between its ranks
    # Largest difference relative to the largest element; None if only bits were compared.
    distance: float | None = None
    detail: str = ""  # both values, if they are short
    fails: bool = True  # whether the distance is beyond the tolerance, or not measured

    @property
    def order_key(self) -> tuple[int, int, int, int]:
        """Sort key in the order of cause and effect."""
        stages = list(STAGES)
        stage = stages.index(self.stage)
        if self.stage in ("calls", "arguments", "outputs"):
            return (self.step, stages.index("calls"), self.number or 0, stage)
        return (self.step, stage, 0, stage)

    @property
    def location(self) -> str:
        """Location as text: `step 2, call 1 of Net, outputs`."""
        words = []
        if self.step and self.stage not in TEXTS:
            words.append(f"step {self.step}")
        elif self.stage not in TEXTS:
            words.append("samestep.parallel")
        if self.module is not None and self.number is not None:
            words.append(f"call {self.number + 1} of {self.module}")
        elif self.number is not None and self.stage in ("order", "inputs", "targets"):
            words.append(f"batch {self.number + 1}")
        if self.quantity == "evaluation":
            words.append("evaluation")
        if self.tensor:
            words.append(self.tensor)
        if self.step:
            words.append(STAGES[self.stage])
        if self.ranks:
            words.append(f"ranks {self.ranks[0]} and {self.ranks[1]}")
        return ": ".join(filter(None, (", ".join(words), self.detail)))


@dataclass
class Comparison:
    """Result of a comparison."""

    label: str  # description of the second trial
    has_failed: bool = False  # one of the trials; differences are those before its end
    differences: list[Difference] = field(default_factory=list)  # of any size
    compared: Counter[str] = field(default_factory=Counter)  # number of values, by quantity

    @property
    def failing(self) -> list[Difference]:
        """Differences beyond the tolerance."""
        return [difference for difference in self.differences if difference.fails]

    @property
    def first(self) -> Difference | None:
        """First failing difference."""
        return first_of(self.failing)

    @property
    def holds(self) -> bool:
        """Whether both trials computed everything, and the same."""
        return not self.has_failed and not self.failing

    def verdict(self, quantity: str) -> str:
        """Return `bits`, the largest distance, `differs`, or `-` without such values.

        A trial that failed did not compute its results: the verdict on each is `failed`.
        """
        if self.has_failed:
            return "failed"
        if any(difference.quantity == quantity for difference in self.failing):
            return "differs"
        if not self.compared[quantity]:
            return "-"
        largest = self.distance(quantity)
        if largest:
            return f"{largest:.1e}"
        return "bits"

    def distance(self, quantity: str) -> float | None:
        """Return the largest measured distance, within the tolerance or not."""
        sizes = (one.distance for one in self.differences if one.quantity == quantity)
        return max((size for size in sizes if size is not None), default=None)


def accepted(comparison: Comparison, exact: Comparison) -> Comparison:
    """Return a comparison whose measured differences are rounding if those in float64 are small.

    Args:
        comparison: the comparison.
        exact: that of the same runs in float64.
    """
    sizes = [one.distance for one in (*comparison.failing, *exact.failing)]
    if exact.has_failed or None in sizes or any(one.ranks for one in exact.failing):
        return comparison
    if any((one.distance or 0.0) >= ROUNDING for one in exact.failing):
        return comparison
    differences = [replace(one, fails=False) for one in comparison.differences]
    return replace(comparison, differences=differences)


def first_of(differences: list[Difference]) -> Difference | None:
    """Return the first difference in the order of cause and effect."""
    return min(differences, key=lambda difference: difference.order_key, default=None)


def compare(
    reference: Record,
    other: Record,
    tolerance: Tolerance | None,
    texts: Mapping[str, Printed] | None = None,
) -> Comparison:
    """Compare `other` with `reference`; also the ranks of `other`, bit for bit.

    Without a tolerance, all bits have to be equal; order, inputs, targets and rates always. `texts`
    has lines of repeated runs of the reference, by quantity; None compares none.
    """
    has_failed = reference.failure is not None or other.failure is not None
    result = Comparison(other.label or described(other.processes), has_failed)
    weights = {name for notes in reference.steps.values() for name in notes[0]["weights"]}
    for number in sorted({*reference.steps, *other.steps}):
        comparer = _StepComparer(result, weights, tolerance, number)
        if number in reference.steps and number in other.steps:
            one = reference.steps[number][0]
            actual = other.steps[number][0]
            if number == other.resumed_at:  # it may have evaluated before the kill
                one = _without_evaluation(one)
                actual = _without_evaluation(actual)
            comparer.compare(one, actual)
        elif number in reference.steps and other.failure is None:
            comparer.add("steps", detail="missing")
        elif number not in reference.steps:
            comparer.add("steps", detail="absent from the reference")
        notes = other.steps.get(number, ())
        for rank, note in enumerate(notes[1:], start=1):
            replace(comparer, ranks=(0, rank)).compare(notes[0], note)
    _compare_modules(result, reference, other)
    _compare_ends(_StepComparer(result, weights, tolerance), reference, other)
    # A resumed run prints only the lines after its resumption.
    if texts is not None and not other.label and not has_failed:
        # After all steps and the end: texts are consequences.
        comparer = _StepComparer(result, weights, tolerance, max(reference.steps, default=0) + 2)
        for stage, printed in texts.items():
            if stage == "printed":
                result.compared[stage] += sum(len(numbers_of(line)[1]) for line in printed.lines)
            else:
                result.compared[stage] += len(printed.lines)
            is_exact = tolerance is None
            for detail, size in differing_lines(printed, other.texts[stage], is_exact=is_exact):
                comparer.add(stage, size, detail=detail)
    return result


def _without_evaluation(note: Note) -> Note:
    kept = {
        key: [one for one in note[key] if not one["evaluation"]] for key in ("batches", "calls")
    }
    return {**note, **kept}


def _compare_modules(result: Comparison, reference: Record, other: Record) -> None:
    """Compare the weights of modules when the script gives them to `samestep.parallel`."""
    # A resumed script can load its checkpoint before or after this call.
    if other.label:
        return
    ranks = [other.notes("module", rank) for rank in range(len(other.events))]
    for number, note in enumerate(reference.modules):
        present = [notes[number] for notes in ranks if number < len(notes)]
        for rank, one in enumerate(present):
            comparer = _StepComparer(result, (), None)
            expected = note
            if rank:
                comparer = replace(comparer, ranks=(0, rank))
                expected = present[0]
            comparer.compare_tensors("before", expected, one, {})


def _compare_ends(comparer: _StepComparer, reference: Record, other: Record) -> None:
    """Compare the events after the last step, or before a failure."""
    ends = []
    for rank in range(len(other.events)):
        notes = [*other.notes("end", rank), *other.notes("unfinished", rank)]
        ends.append(next(iter(notes), None))
    first = next(iter(ends), None)
    if first is None:
        return
    step = first["step"]
    comparer = replace(comparer, step=step, is_partial=other.failure is not None)
    expected = reference.end
    if step in reference.steps:
        expected = reference.steps[step][0]
    if expected.get("step") == step and (comparer.is_partial or expected is reference.end):
        comparer.compare(expected, first)
    for rank, end in enumerate(ends[1:], start=1):
        if end is not None and end["step"] == step:
            replace(comparer, ranks=(0, rank), is_partial=True).compare(first, end)


@dataclass(frozen=True)
class _StepComparer:
    """Adds the differences of one step, between two trials or two ranks, to a comparison."""

    result: Comparison
    weights: Collection[str]  # names of the parameters; other tensors are buffers
    tolerance: Tolerance | None
    step: int = 0
    ranks: tuple[int, int] | None = None  # of which everything has to be equal, bit for bit
    is_partial: bool = False  # the second trial or rank failed in this step

    def add(self, stage: str, distance: float | None = None, **fields: Any) -> None:
        """Add a difference; it fails unless its distance is measured and within the tolerance."""
        fields.setdefault("quantity", _QUANTITY_OF_STAGE.get(stage, stage))
        allowed = -1.0
        if self.tolerance is not None:
            allowed = self.tolerance.at(fields["quantity"], self.step)
        fields["fails"] = distance is None or not distance <= allowed
        fields |= {"stage": stage, "step": self.step, "ranks": self.ranks}
        self.result.differences.append(Difference(distance=distance, **fields))

    def count(self, quantity: str, number: int = 1) -> None:
        """Count values of both trials."""
        if self.ranks is None:
            self.result.compared[quantity] += number

    def compare(self, one: Note, other: Note) -> None:
        """Compare the entries of both notes, in the order of cause and effect."""
        # Within a tolerance, weights differ from the second step on.
        if self.ranks is not None or self.tolerance is None or self.step == 1:
            self.compare_tensors("before", one, other, {})
        self.count("order", sum(batch["size"] for batch in other["batches"]))
        self.count("rates", "rates" in other)
        self._compare_batches(one["batches"], other["batches"])
        for stage in ("settings", "rates"):
            if stage in one and stage in other and one[stage] != other[stage]:
                self.add(stage, detail=_settings_detail(one[stage], other[stage]))
        distances: Mapping[str, Mapping[str, float]] = {}
        if self.ranks is None:
            distances = other["distances"]
        self._compare_calls(one["calls"], other["calls"], distances)
        self._compare_losses(one["losses"], other["losses"])
        stages = {"gradients": "gradients", "after": "state", "optimizer": "optimizer"}
        for stage, kind in stages.items():
            if stage in one and stage in other:
                self.compare_tensors(stage, one, other, distances.get(kind, {}))

    def _compare_batches(self, one: Sequence[Note], other: Sequence[Note]) -> None:
        for number, (batch, actual) in enumerate(zip_longest(one, other)):
            if batch is None or actual is None:
                if not self.is_partial:
                    detail = f"{len(one)} batches and {len(other)}"
                    self.add("order", number=number, detail=detail)
                return
            if batch["evaluation"] != actual["evaluation"]:
                return  # for other calls, which are compared below
            self.count("inputs")
            self.count("targets")
            fields: dict[str, Any] = {"number": number}
            if batch["evaluation"]:
                fields["quantity"] = "evaluation"
            if batch["size"] != actual["size"] or batch["order"] != actual["order"]:
                self.add("order", detail=_order_detail(batch, actual), **fields)
            for stage in ("inputs", "targets"):
                if batch[stage] != actual[stage]:
                    self.add(stage, **fields)

    def _compare_calls(
        self,
        one: Sequence[Note],
        other: Sequence[Note],
        distances: Mapping[str, Mapping[str, float]],
    ) -> None:
        for number, (call, actual) in enumerate(zip_longest(one, other)):
            if call is None or actual is None:
                if not self.is_partial:
                    self.add("calls", number=number, detail=f"{len(one)} calls and {len(other)}")
                return
            names = [_call_name(note) for note in (call, actual)]
            if names[0] != names[1]:
                self.add("calls", number=number, detail=" and ".join(names))
                return
            for stage in ("arguments", "outputs"):
                if stage not in call or stage not in actual:
                    return
                fields = {"quantity": stage, "number": number, "module": call["module"]}
                if call["evaluation"]:
                    fields["quantity"] = "evaluation"
                self.count(fields["quantity"])
                if call[stage] != actual[stage]:
                    measured = distances.get(stage, {}).items()
                    sizes = [s for name, s in measured if name.partition("/")[0] == call["key"]]
                    self.add(stage, max(sizes, default=None), **fields)

    def _compare_losses(self, one: Sequence[float], other: Sequence[float]) -> None:
        for value, actual in zip(one, other, strict=False):
            self.count("loss")
            if value != actual and not (math.isnan(value) and math.isnan(actual)):
                scale = max(abs(value), abs(actual))
                distance = None
                if self.ranks is None and scale and math.isfinite(scale):
                    distance = abs(value - actual) / scale
                self.add("loss", distance, detail=f"{value!r} and {actual!r}")

    def compare_tensors(
        self, stage: str, one: Note, other: Note, distances: Mapping[str, float]
    ) -> None:
        """Compare tensors by hashes; `distances` has the measured ones of those that differ."""
        digests = one[stage] or {}
        other_digests = other[stage] or {}
        # Not every note has this state: no call may have followed the last step.
        if stage == "before" and not (digests and other_digests):
            return
        for name in sorted({*digests, *other_digests}):
            quantity = stage
            if stage not in QUANTITIES:
                quantity = "weights" if name in self.weights else "buffers"
            if stage != "before":
                self.count(quantity)
            if digests.get(name) != other_digests.get(name):
                self.add(stage, distances.get(name), quantity=quantity, tensor=name)


def _call_name(call: Note) -> str:
    if call["evaluation"]:
        return f"{call['module']} in evaluation"
    return f"{call['module']} in training"


def _settings_detail(one: list[Any], other: list[Any]) -> str:
    """Return learning rates, or the differing settings of the first group that differs."""
    for settings, others in zip(one, other, strict=False):
        if isinstance(settings, Mapping) and isinstance(others, Mapping) and settings != others:
            keys = [key for key in {**settings, **others} if settings.get(key) != others.get(key)]
            return ", ".join(f"{key} {settings.get(key)} and {others.get(key)}" for key in keys)
    return f"{one} and {other}"


def _order_detail(one: Note, other: Note) -> str:
    if one["size"] != other["size"] or not (one["order"] and other["order"]):
        return f"{one['size']} samples and {other['size']} samples"
    pairs = enumerate(zip(one["order"], other["order"], strict=True))
    position, (sample, actual) = next(pair for pair in pairs if pair[1][0] != pair[1][1])
    return f"position {position} of the batch is sample {sample} and sample {actual}"
