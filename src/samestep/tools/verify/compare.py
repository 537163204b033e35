"""Two trials side by side: what is the same, how far the rest is apart, and where it first differs.

Differences come in the order of cause and effect: what a step begins with, its samples, inputs, rates, outputs, loss,
gradients, what it leaves. So the first one is never a mere consequence of another in the list.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from samestep.tools.verify.difference import QUANTITIES, Comparison, Difference
from samestep.tools.verify.plan import in_words
from samestep.tools.verify.record import Noted, Record, StepRecord


def compare(reference: Record, other: Record, tolerance: float | None) -> Comparison:
    """Compare `other` with `reference`, bit for bit or within a relative tolerance.

    Order, inputs, targets, counts and rates have to be equal under any tolerance.
    """
    found = Comparison(other.label or in_words(other.processes))
    for number in sorted({*reference.steps, *other.steps}):
        if number in reference.steps and number in other.steps:
            _compare_steps(reference.steps[number], other.steps[number], reference.parameters, tolerance, found)
            _compare_ranks(other.steps[number], reference.parameters, tolerance, found)
        else:
            missing = "missing" if number in reference.steps else "one more than in the reference"
            found.add(Difference(quantity="order", stage="steps", step=number, detail=missing), None)
    _compare_evaluations(reference, other, tolerance, found)
    return found


def _compare_steps(
    ours: StepRecord, theirs: StepRecord, parameters: frozenset[str], tolerance: float | None, found: Comparison
) -> None:
    step, distances = ours.number, theirs.main["distances"]
    _tensors(found, "before", step, ours.main["before"], theirs.main["before"], {}, parameters, tolerance)
    found.count("order", len(ours.main["order"]))
    if ours.main["order"] != theirs.main["order"]:
        found.add(Difference(quantity="order", stage="order", step=step, detail=_orders(ours.main, theirs.main)), None)
    if ours.main["shards_of_batch"] != theirs.main["shards_of_batch"]:
        detail = f"{ours.main['shards_of_batch']} shards and {theirs.main['shards_of_batch']}"
        found.add(Difference(quantity="order", stage="shards", step=step, detail=detail), None)
    found.count("rates")
    for key in ("rates", "settings"):
        if ours.main[key] != theirs.main[key]:
            detail = _differing(ours.main[key], theirs.main[key])
            found.add(Difference(quantity="rates", stage=key, step=step, detail=detail), None)
    spread = {name: size for rank in theirs.by_rank for name, size in rank["distances"].get("outputs", {}).items()}
    for shard in sorted({*ours.shards, *theirs.shards}):
        if shard in ours.shards and shard in theirs.shards:
            _compare_shards(step, shard, ours.shards[shard], theirs.shards[shard], spread, tolerance, found)
    _numbers(found, "loss", step, ours.main, theirs.main, ("loss", "count"), tolerance)
    gradients = distances.get("gradients", {})
    _tensors(
        found, "gradients", step, ours.main["gradients"], theirs.main["gradients"], gradients, parameters, tolerance
    )
    state, slots = distances.get("state", {}), distances.get("optimizer", {})
    _tensors(found, "after", step, ours.main["after"], theirs.main["after"], state, parameters, tolerance)
    _tensors(found, "optimizer", step, ours.main["optimizer"], theirs.main["optimizer"], slots, parameters, tolerance)


def _compare_shards(
    step: int,
    shard: int,
    ours: Noted,
    theirs: Noted,
    distances: Mapping[str, float],
    tolerance: float | None,
    found: Comparison,
) -> None:
    for stage in ("inputs", "targets"):
        found.count(stage)
        if ours[stage] != theirs[stage]:
            found.add(Difference(quantity=stage, stage=stage, step=step, shard=shard), None)
    found.count("outputs")
    if ours["outputs"] != theirs["outputs"]:
        sizes = [size for name, size in distances.items() if name.partition("/")[0] == str(shard)]
        distance = max(sizes, default=None) if distances else None
        module = next((name for name, bits in ours["modules"] if bits not in _bits(theirs, name)), None)
        place = Difference(
            quantity="outputs", stage="outputs", step=step, shard=shard, module=module, distance=distance
        )
        found.add(place, tolerance)
    _numbers(found, "loss", step, ours, theirs, ("sum", "count"), tolerance, shard)


def _bits(noted: Noted, module: str) -> list[str]:
    return [bits for name, bits in noted["modules"] if name == module]


def _compare_ranks(step: StepRecord, parameters: frozenset[str], tolerance: float | None, found: Comparison) -> None:
    """All ranks have to hold the same, whatever the reference holds."""
    for rank, noted in enumerate(step.by_rank[1:], start=1):
        pair, main = (0, rank), step.main
        if noted["order"] != main["order"]:
            detail = _orders(main, noted)
            place = Difference(quantity="order", stage="order", step=step.number, ranks=pair, detail=detail)
            found.add(place, None)
        for key in ("rates", "settings"):
            if noted[key] != main[key]:
                detail = _differing(main[key], noted[key])
                place = Difference(quantity="rates", stage=key, step=step.number, ranks=pair, detail=detail)
                found.add(place, None)
        for stage in ("before", "gradients", "after", "optimizer"):
            _tensors(found, stage, step.number, main[stage], noted[stage], {}, parameters, None, pair)


def _compare_evaluations(reference: Record, other: Record, tolerance: float | None, found: Comparison) -> None:
    one, two = reference.evaluations, other.evaluations
    if len(one) != len(two):
        detail = f"{len(one)} evaluations and {len(two)}"
        found.add(Difference(quantity="evaluation", stage="evaluation", step=None, detail=detail), None)
    for ours, theirs in zip(one, two, strict=False):
        mine, its = ours["values"], theirs["values"]
        for name in sorted({*mine, *its}, key=lambda name: (name != "samples", name)):
            found.count("evaluation")
            if mine.get(name) != its.get(name):
                place = Difference(
                    quantity="evaluation",
                    stage="evaluation",
                    step=None,
                    tensor=name,
                    distance=None if name == "samples" else _relative(mine.get(name), its.get(name)),
                    detail=f"{name} {mine.get(name)} and {its.get(name)}",
                )
                found.add(place, _allowed(name, mine, tolerance))


def _allowed(name: str, values: Noted, tolerance: float | None) -> float | None:
    if tolerance is None or name.startswith("loss"):
        return tolerance
    # A sample on the border between two classes may fall to either side.
    return max(tolerance, 1.5 / max(1.0, float(values.get("samples", 1))))


def _tensors(
    found: Comparison,
    stage: str,
    step: int,
    ours: Mapping[str, str],
    theirs: Mapping[str, str],
    distances: Mapping[str, float],
    parameters: frozenset[str],
    tolerance: float | None,
    ranks: tuple[int, int] | None = None,
) -> None:
    """Compare tensors by their bits, and by their distance where bits differ and it was measured."""
    # Weights that differ within a tolerance after a step do so before the next one.
    if stage == "before" and tolerance is not None and ranks is None and step > 1:
        return
    for name in sorted({*ours, *theirs}):
        quantity = stage if stage in QUANTITIES else ("weights" if name in parameters else "buffers")
        if stage != "before":
            found.count(quantity)
        if ours.get(name) != theirs.get(name):
            place = Difference(
                quantity=quantity,
                stage=stage,
                step=step,
                tensor=name,
                ranks=ranks,
                distance=distances.get(name),
            )
            found.add(place, tolerance)


def _numbers(
    found: Comparison,
    stage: str,
    step: int,
    ours: Noted,
    theirs: Noted,
    names: tuple[str, ...],
    tolerance: float | None,
    shard: int | None = None,
) -> None:
    for name in names:
        found.count(stage)
        mine, its = ours[name], theirs[name]
        if mine != its and not (math.isnan(mine) and math.isnan(its)):
            distance = None if name == "count" else _relative(mine, its)
            detail = f"{name} {mine!r} and {its!r}"
            place = Difference(quantity=stage, stage=stage, step=step, shard=shard, distance=distance, detail=detail)
            found.add(place, tolerance)


def _relative(value: Any, other: Any) -> float | None:
    if not isinstance(value, int | float) or not isinstance(other, int | float):
        return None
    scale = max(abs(value), abs(other))
    return abs(value - other) / scale if scale and math.isfinite(scale) else None


def _differing(ours: list[Any], theirs: list[Any]) -> str:
    """Rates, or the settings that differ of the first parameter group where any do."""
    for mine, its in zip(ours, theirs, strict=False):
        if isinstance(mine, Mapping) and mine != its:
            keys = [key for key in mine if mine[key] != its.get(key)]
            return ", ".join(f"{key} {mine[key]} and {its.get(key)}" for key in keys)
    return f"{ours} and {theirs}"


def _orders(ours: Noted, theirs: Noted) -> str:
    one, other = ours["order"], theirs["order"]
    if len(one) != len(other):
        return f"{len(one)} samples and {len(other)}"
    place = next((i for i, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]), 0)
    return f"place {place} of the batch is sample {one[place]} and sample {other[place]}"
