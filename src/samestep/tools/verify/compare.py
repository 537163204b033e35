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

from samestep.tools.verify.printed import Printed, differing_lines
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
_OF_CALLS = ("calls", "arguments", "outputs")
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
        result = compare(reference, perturbed, None)
        distances: dict[str, dict[int, float]] = {}
        for difference in result.differences:
            if (
                difference.distance is not None
                and math.isfinite(difference.distance)
                and difference.ranks is None
            ):
                by_step = distances.setdefault(difference.quantity, {})
                by_step[difference.step] = max(
                    by_step.get(difference.step, 0.0), difference.distance
                )
        return cls(distances, float(reference.end.get("eps", 0.0)))

    def at(self, quantity: str, step: int) -> float:
        """Return the tolerance of a quantity in a step."""
        quantities = self.distances if quantity in TEXTS else (quantity,)
        by_step = [pair for name in quantities for pair in self.distances.get(name, {}).items()]
        earlier = (size for number, size in by_step if number <= step)
        return max(4 * self.eps, min(math.sqrt(self.eps), _FACTOR * max(earlier, default=0.0)))

    def data(self) -> dict[str, str]:
        """Return the largest tolerance of each quantity as text."""
        return {
            QUANTITIES[quantity]: f"{self.at(quantity, 2**62):.1e}" for quantity in self.distances
        }


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
    distance: float | None = (
        None  # largest difference relative to the largest element; None if only bits were compared
    )
    detail: str = ""  # both values, if they are short
    fails: bool = True  # whether the distance is beyond the tolerance, or not measured

    @property
    def order_key(self) -> tuple[int, int, int, int]:
        """Sort key in the order of cause and effect."""
        stage = list(STAGES).index(self.stage)
        is_of_call = self.stage in _OF_CALLS
        phase = list(STAGES).index("calls") if is_of_call else stage
        return (self.step, phase, self.number or 0 if is_of_call else 0, stage)

    @property
    def location(self) -> str:
        """Location as text: `step 2, call 1 of Net, outputs`."""
        words = (
            []
            if self.stage in TEXTS
            else [f"step {self.step}" if self.step else "samestep.parallel"]
        )
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
        text = ", ".join(words)
        if self.detail:
            return f"{text}: {self.detail}"
        return text


@dataclass
class Comparison:
    """Result of a comparison."""

    label: str  # description of the second trial
    differences: list[Difference] = field(default_factory=list)  # differences of any size
    compared: Counter[str] = field(
        default_factory=Counter
    )  # number of compared values, by quantity

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
        if largest:
            return f"{largest:.1e}"
        return "bits"

    def distance(self, quantity: str) -> float | None:
        """Return the largest measured distance, within the tolerance or not."""
        sizes = [
            difference.distance
            for difference in self.differences
            if difference.quantity == quantity
        ]
        return max((size for size in sizes if size is not None), default=None)


def accepted(comparison: Comparison, exact: Comparison) -> Comparison:
    """Return a comparison with rounding as measured differences, since those in float64 (`exact`) are within it."""
    if exact.failing or any(difference.distance is None for difference in comparison.failing):
        return comparison
    return replace(
        comparison, differences=[replace(one, fails=False) for one in comparison.differences]
    )


def first_of(differences: list[Difference]) -> Difference | None:
    """Return the first difference in the order of cause and effect."""
    return min(differences, key=lambda difference: difference.order_key, default=None)


def compare(
    reference: Record,
    other: Record,
    tolerance: Tolerance | None,
    texts: Mapping[str, Printed] | None = None,
) -> Comparison:
    """Compare `other` with `reference`, bit for bit or within a tolerance; also the ranks of `other`, bit for bit.

    Order, inputs, targets and rates have to be equal under any tolerance.

    Args:
        reference: the first trial.
        other: the second trial.
        tolerance: of rounding; None for equal bits.
        texts: lines of repeated runs of the reference, by quantity; None compares none.
    """
    result = Comparison(other.label or described(other.processes))
    weights = _weights(reference)
    for number in sorted({*reference.steps, *other.steps}):
        comparer = _Comparer(result, weights, tolerance, number)
        if number in reference.steps and number in other.steps:
            one = reference.steps[number][0]
            actual = other.steps[number][0]
            if number == other.resumed_at:  # it may have evaluated before the kill
                one = _without_evaluation(one)
                actual = _without_evaluation(actual)
            comparer.compare_steps(one, actual)
        elif other.failure is None or number not in reference.steps:
            comparer.add(
                "steps",
                detail="missing" if number in reference.steps else "absent from the reference",
            )
        if number in other.steps:
            comparer.compare_ranks(other.steps[number])
    _compare_modules(result, reference, other)
    _compare_ends(result, reference, other, tolerance, weights)
    for stage, printed in (
        (texts or {}).items() if not other.label and other.failure is None else ()
    ):
        comparer = _Comparer(result, weights, tolerance, max(reference.steps, default=0) + 2)
        result.compared[stage] += printed.count if stage == "printed" else len(printed.lines)
        for detail, size in differing_lines(
            printed, other.texts[stage], is_exact=tolerance is None
        ):
            comparer.add(stage, size, detail=detail)
    return result


def _without_evaluation(note: Note) -> Note:
    return {
        **note,
        **{
            key: [one for one in note[key] if not one["evaluation"]] for key in ("batches", "calls")
        },
    }


def _weights(record: Record) -> Collection[str]:
    return {name for notes in record.steps.values() for name in notes[0]["weights"]}


def _compare_modules(result: Comparison, reference: Record, other: Record) -> None:
    """Compare the weights of the modules with divided calls."""
    comparer = _Comparer(result, (), None, 0)
    ranks = [other.notes("module", rank) for rank in range(len(other.events))]
    for number, note in enumerate(reference.modules):
        present = (
            [notes[number] for notes in ranks if number < len(notes)] if not other.label else []
        )
        for rank, one in enumerate(present):
            expected = note if rank == 0 else present[0]
            pair = (0, rank) if rank else None
            comparer.compare_tensors("before", expected, one, {}, ranks=pair)


def _compare_ends(
    result: Comparison,
    reference: Record,
    other: Record,
    tolerance: Tolerance | None,
    weights: Collection[str],
) -> None:
    """Compare the events after the last step, or before a failure."""
    ends = [
        next(iter([*other.notes("end", rank), *other.notes("unfinished", rank)]), None)
        for rank in range(len(other.events))
    ]
    first = ends[0] if ends else None
    if first is None:
        return
    step = first["step"]
    comparer = _Comparer(result, weights, tolerance, step)
    expected = reference.steps[step][0] if step in reference.steps else reference.end
    if expected.get("step") == step and (other.failure is not None or expected is reference.end):
        comparer.compare_steps(expected, first, is_partial=other.failure is not None)
    for rank, end in enumerate(ends[1:], start=1):
        if end is not None and end["step"] == step:
            comparer.compare_pair(first, end, (0, rank), is_partial=True)


class _Comparer:
    """Adds the differences of one step to a comparison."""

    def __init__(
        self, result: Comparison, weights: Collection[str], tolerance: Tolerance | None, step: int
    ) -> None:
        self._result = result
        self._compared = result.compared
        self._weights = weights
        self._tolerance = tolerance
        self._step = step

    def add(self, stage: str, distance: float | None = None, **fields: Any) -> None:
        """Add a difference, which fails unless its distance is measured and within the tolerance."""
        fields.setdefault("quantity", _QUANTITY_OF_STAGE.get(stage, stage))
        allowed = (
            -1.0 if self._tolerance is None else self._tolerance.at(fields["quantity"], self._step)
        )
        fails = distance is None or not distance <= allowed
        difference = Difference(
            stage=stage, step=self._step, distance=distance, fails=fails, **fields
        )
        self._result.differences.append(difference)

    def compare_steps(self, one: Note, other: Note, *, is_partial: bool = False) -> None:
        """Compare a step of two trials; `is_partial` if the second trial failed in it."""
        if (
            self._tolerance is None or self._step == 1
        ):  # otherwise weights differ within the tolerance
            self.compare_tensors("before", one, other, {})
        for batch in other["batches"]:
            self._compared["order"] += batch["size"]
        self._compared["rates"] += "rates" in other
        self._compare(one, other, None, is_partial)

    def compare_ranks(self, notes: Sequence[Note]) -> None:
        """Compare ranks with rank 0: everything has to be equal, bit for bit."""
        for rank, note in enumerate(notes[1:], start=1):
            self.compare_pair(notes[0], note, (0, rank))

    def compare_pair(
        self, one: Note, other: Note, ranks: tuple[int, int], *, is_partial: bool = False
    ) -> None:
        """Compare a step of two ranks."""
        self.compare_tensors("before", one, other, {}, ranks=ranks)
        self._compare(one, other, ranks, is_partial)

    def _compare(
        self, one: Note, other: Note, ranks: tuple[int, int] | None, is_partial: bool
    ) -> None:
        """Compare the entries of both notes, in the order of cause and effect."""
        self._batches(one["batches"], other["batches"], ranks, is_partial)
        for stage in ("settings", "rates"):
            if stage in one and stage in other and one[stage] != other[stage]:
                self.add(stage, detail=_settings_detail(one[stage], other[stage]), ranks=ranks)
        distances = other["distances"] if ranks is None else {}
        self._calls(one["calls"], other["calls"], distances, ranks, is_partial)
        self._losses(one["losses"], other["losses"], ranks)
        for stage, kind in (
            ("gradients", "gradients"),
            ("after", "state"),
            ("optimizer", "optimizer"),
        ):
            if stage in one and stage in other:
                self.compare_tensors(stage, one, other, distances.get(kind, {}), ranks)

    def _batches(
        self, one: list[Note], other: list[Note], ranks: tuple[int, int] | None, is_partial: bool
    ) -> None:
        for number, (batch, actual) in enumerate(zip_longest(one, other)):
            if batch is None or actual is None:
                if not is_partial:
                    detail = f"{len(one)} batches and {len(other)}"
                    self.add("order", number=number, detail=detail, ranks=ranks)
                return
            if batch["evaluation"] != actual["evaluation"]:
                return  # for other calls, which are compared below
            for stage in ("inputs", "targets"):
                self._compared[stage] += ranks is None
            fields: dict[str, Any] = {"number": number, "ranks": ranks}
            if batch["evaluation"]:
                fields["quantity"] = "evaluation"
            if batch["size"] != actual["size"] or batch["order"] != actual["order"]:
                self.add("order", detail=_order_detail(batch, actual), **fields)
            for stage in ("inputs", "targets"):
                if batch[stage] != actual[stage]:
                    self.add(stage, **fields)

    def _calls(
        self,
        one: list[Note],
        other: list[Note],
        distances: Mapping[str, Mapping[str, float]],
        ranks: tuple[int, int] | None,
        is_partial: bool,
    ) -> None:
        for number, (call, actual) in enumerate(zip_longest(one, other)):
            if call is None or actual is None:
                if not is_partial:
                    self.add(
                        "calls",
                        number=number,
                        detail=f"{len(one)} calls and {len(other)}",
                        ranks=ranks,
                    )
                return
            names = [
                f"{note['module']} in {'evaluation' if note['evaluation'] else 'training'}"
                for note in (call, actual)
            ]
            if names[0] != names[1]:
                self.add("calls", number=number, detail=f"{names[0]} and {names[1]}", ranks=ranks)
                return
            for stage in ("arguments", "outputs"):
                if stage not in call or stage not in actual:
                    return
                quantity = "evaluation" if call["evaluation"] else stage
                self._compared[quantity] += ranks is None
                if call[stage] != actual[stage]:
                    sizes = [
                        size
                        for name, size in distances.get(stage, {}).items()
                        if name.partition("/")[0] == call["key"]
                    ]
                    size = max(sizes, default=None)
                    self.add(
                        stage,
                        size,
                        quantity=quantity,
                        number=number,
                        module=call["module"],
                        ranks=ranks,
                    )

    def _losses(self, one: list[float], other: list[float], ranks: tuple[int, int] | None) -> None:
        for value, other_value in zip(one, other, strict=False):
            self._compared["loss"] += ranks is None
            if value != other_value and not (math.isnan(value) and math.isnan(other_value)):
                detail = f"{value!r} and {other_value!r}"
                distance = None if ranks is not None else _relative(value, other_value)
                self.add("loss", distance, detail=detail, ranks=ranks)

    def compare_tensors(
        self,
        stage: str,
        one: Note,
        other: Note,
        distances: Mapping[str, float],
        ranks: tuple[int, int] | None = None,
    ) -> None:
        """Compare tensors by hashes; `distances` has the distances of those that differ, if they were measured."""
        digests = one[stage] or {}
        other_digests = other[stage] or {}
        if stage == "before" and not (digests and other_digests):
            return
        for name in sorted({*digests, *other_digests}):
            quantity = (
                stage
                if stage in QUANTITIES
                else ("weights" if name in self._weights else "buffers")
            )
            if stage != "before":
                self._compared[quantity] += ranks is None
            if digests.get(name) != other_digests.get(name):
                self.add(stage, distances.get(name), quantity=quantity, tensor=name, ranks=ranks)


def _relative(value: float, other: float) -> float | None:
    scale = max(abs(value), abs(other))
    if scale and math.isfinite(scale):
        return abs(value - other) / scale
    return None


def _settings_detail(one: list[Any], other: list[Any]) -> str:
    """Return learning rates, or the differing settings of the first parameter group that differs."""
    for settings, others in zip(one, other, strict=False):
        if isinstance(settings, Mapping) and isinstance(others, Mapping) and settings != others:
            keys = [key for key in {**settings, **others} if settings.get(key) != others.get(key)]
            return ", ".join(f"{key} {settings.get(key)} and {others.get(key)}" for key in keys)
    return f"{one} and {other}"


def _order_detail(one: Note, other: Note) -> str:
    if one["size"] != other["size"] or not (one["order"] and other["order"]):
        return f"{one['size']} samples and {other['size']} samples"
    pairs = enumerate(zip(one["order"], other["order"], strict=True))
    position, (sample, other_sample) = next(pair for pair in pairs if pair[1][0] != pair[1][1])
    return f"position {position} of the batch is sample {sample} and sample {other_sample}"
