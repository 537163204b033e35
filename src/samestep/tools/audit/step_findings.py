"""Names of all findings of an audit, and rules for replicas, modules, schedules and losses."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from statistics import median
from typing import Any

from samestep.number_text import plural
from samestep.tools.audit.worlds import Event, World, passes

# Stable names, and the fix of each; the tables of docs/guides/audit.md have the same.
FIXES = {
    "repeated-samples": "give the loader DistributedSampler(dataset), or parts of the data",
    "missing-samples": "divide all samples: DistributedSampler with the ranks of the group",
    "evaluation-counted-twice": "cut the padding off after a gather, or evaluate "
    "Subset(dataset, range(rank, len(dataset), ranks)) and add sums and counts",
    "repeated-order": "call sampler.set_epoch(epoch) before each epoch",
    "equal-random-draws": "seed the generators with seed + rank after the model is built",
    "different-parameters": "build, load and average models by the same code on every rank, before "
    "DistributedDataParallel",
    "different-buffers": "evaluate the DistributedDataParallel module, or broadcast buffers before",
    "different-learning-rates": "compute learning rates from values that all ranks share",
    "unreduced-gradients": "call the DistributedDataParallel module, not its inner module",
    "schedule-stepped-too-often": "step it once per optimizer step, and count its period in these",
    "loss-normalisation": "divide the sum of each loss by the targets of all ranks",
    "files-written-by-several-ranks": "write on rank 0 only: if dist.get_rank() == 0",
    "independent-copies": "call torch.distributed.init_process_group, and wrap the model in "
    "DistributedDataParallel; or start one process",
}
_TOLERANCE = 1e-4  # relative; ranks on different devices can round differently
_COUNT_RATIO = 1.05  # of the numbers of targets of two losses
_MIN_UPDATES = 3
_ENDED = 1.5  # length of a schedule, relative to its period
_ZERO = 0.25  # share of the optimizer steps

Summary = list[float] | None
Update = dict[int, Event]  # one optimizer step, or evaluation, of all ranks


@dataclass(frozen=True)
class Finding:
    """One mistake with its evidence."""

    name: str
    evidence: str
    line: str  # of the user's script, empty if unknown
    fix: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "fix", FIXES[self.name])


def differs(first: Summary, second: Summary) -> bool:
    """Whether two finite summaries of tensors differ by more than rounding."""
    if first is None or second is None or not all(map(math.isfinite, (*first, *second))):
        return False
    # Terms of a sum cancel, so the error of a sum can exceed that of the norm.
    scale = _TOLERANCE * max(first[0], second[0])
    return abs(first[0] - second[0]) > scale or abs(first[1] - second[1]) > 10 * scale


def copy_findings(world: World) -> Iterator[Finding]:
    """Yield the finding of ranks that a launcher started, and that train without a group."""
    if not world.has_group:
        line = world.events("update")[0][0]["line"]
        text = f"the launcher started {plural(world.size, 'rank')}; each trains a model of its own"
        yield Finding("independent-copies", f"{text}, without a process group", line)


def step_findings(world: World) -> Iterator[Finding]:
    """Yield the findings of a world about its optimizer steps."""
    updates = _updates(world)
    yield from _schedules(world)
    # A communication hook can reduce the gradients in a way of its own.
    if updates and not any(event["hooked"] for event in updates[0].values()):
        yield from _losses(world, updates)
    if world.size == 1:
        return
    of_ranks = list(islice(_learning_rates(updates), 1))
    # Different learning rates are a cause of different replicas, and reported alone.
    if not of_ranks and updates and not any(event["hooked"] for event in updates[0].values()):
        of_ranks = list(_replicas(world, updates))
    yield from of_ranks
    evaluated = list(_modules(world))
    # Replicas that differ in training differ in evaluations, too.
    yield from [one for one in evaluated if one.name == "different-buffers" or not of_ranks]


# --- replicas -----------------------------------------------------------------------------------


def _updates(world: World, kind: str = "update") -> list[Update]:
    """Return the observed optimizer steps of all ranks with equal optimizers."""
    steps: dict[tuple[int, int], Update] = defaultdict(dict)
    for rank, events in world.events(kind).items():
        for event in events:
            steps[event["step"], event["optimizer"]][rank] = event
    complete = [update for _, update in sorted(steps.items()) if len(update) == world.size]
    return [one for one in complete if all(e["shapes"] == one[0]["shapes"] for e in one.values())]


def _different(update: Update, kind: str) -> dict[str, int]:
    """Return the names of tensors that differ between ranks, with a rank that differs from 0."""
    return {
        name: rank
        for rank, event in update.items()
        for name, summary in event[kind].items()
        if differs(update[0][kind][name], summary)
    }


def _is_replicated(update: Update) -> bool:
    return all(event["replicated"] for event in update.values())


def _has_equal_gradients(update: Update) -> bool:
    """Whether all observed gradients are equal on all ranks, and not zero."""
    summaries = [summary for event in update.values() for summary in event["gradients"].values()]
    if not summaries or None in summaries or _different(update, "gradients"):
        return False
    return any(summary[0] > 0 for summary in summaries)


def reduces_gradients(world: World) -> bool:
    """Whether the ranks train replicas of one model."""
    updates = _updates(world)
    return bool(updates) and all(
        _is_replicated(one) or _has_equal_gradients(one) for one in updates
    )


def _learning_rates(updates: list[Update]) -> Iterator[Finding]:
    if not updates or not (_is_replicated(updates[0]) or not _different(updates[0], "values")):
        return
    for update in updates:
        for rank, event in update.items():
            if event["rates"] != update[0]["rates"]:
                text = f"rank 0 uses {update[0]['rates']} and rank {rank} {event['rates']}"
                text = f"at step {event['step']}, {text}"
                yield Finding("different-learning-rates", text, event["line"])


def _replicas(world: World, updates: list[Update]) -> Iterator[Finding]:
    """Find replicas that become different, and the first cause: gradients or parameters."""
    gradients = [update for update in updates if _different(update, "gradients")]
    values = [update for update in updates if _different(update, "values")]
    is_replicated = _is_replicated(updates[0])
    has_cause = bool(gradients)
    if not is_replicated:
        # Without DistributedDataParallel, all gradients have to differ, and the parameters from a
        # common start on, while a sampler divides the samples among all ranks.
        becomes_different = bool(values) and not _different(updates[0], "values")
        is_always = len(gradients) == len(updates) >= _MIN_UPDATES
        has_cause = is_always and divides_samples(world) and becomes_different
    if has_cause and (not values or gradients[0][0]["step"] <= values[0][0]["step"]):
        if not _become_equal([*values, *updates, *_updates(world, "end")], values):
            share = f"in {len(gradients)} of {plural(len(updates), 'observed step')}"
            yield _difference("unreduced-gradients", gradients[0], "gradients", share)
    elif values and (is_replicated or all(map(_has_equal_gradients, updates))):
        share = f"in {len(values)} of {plural(len(updates), 'observed step')}"
        yield _difference("different-parameters", values[0], "values", share)


def _become_equal(updates: list[Update], values: list[Update]) -> bool:
    """Whether a parameter that differed is equal later, as if ranks average parameters."""
    different = {
        name: update[0]["step"]
        for update in reversed(values)
        for name in _different(update, "values")
    }
    return any(
        update[0]["step"] > different.get(name, math.inf)
        and name not in _different(update, "values")
        for update in updates
        for name in update[0]["values"]
    )


def _difference(name: str, update: Update, kind: str, share: str) -> Finding:
    tensor, rank = next(iter(_different(update, kind).items()))
    norms = [update[number][kind][tensor][0] for number in (0, rank)]
    subject = f"the gradient of {tensor}" if kind == "gradients" else tensor
    text = f"{subject} has norm {norms[0]:.6g} on rank 0 and {norms[1]:.6g} on rank {rank}"
    text = f"at step {update[0]['step']}, {text}; ranks differ {share}"
    return Finding(name, text, update[0]["line"])


def _modules(world: World) -> Iterator[Finding]:
    """Find modules that differ between ranks which evaluate with them, or parts of the data."""
    trains = any(world.events("update").values())
    if trains and not reduces_gradients(world):
        return
    if not trains and not divides_samples(world):
        return
    evaluations: dict[Any, Update] = defaultdict(dict)
    for rank, events in world.events("evaluation").items():
        counts: Counter[Any] = Counter()
        for event in events:
            place = (event["step"], event["line"], event["module"])
            counts[place] += 1
            evaluations[*place, counts[place]][rank] = event
    kinds = {"values": "different-parameters", "buffers": "different-buffers"}
    for kind, finding in kinds.items():
        for update in evaluations.values():
            names = {tuple(event[kind]) for event in update.values()}
            if len(update) < world.size or len(names) > 1:
                continue
            different = _different(update, kind)
            if different:
                name, rank = next(iter(different.items()))
                steps = plural(update[0]["step"], "step")
                text = f"an evaluation after {steps} uses different values of {name}"
                text = f"{text} of {update[0]['module']} on ranks 0 and {rank}"
                yield Finding(finding, text, update[0]["line"])
                break


def divides_samples(world: World) -> bool:
    """Whether each rank has a pass whose sampler divides samples among all ranks."""
    return all(
        any(one.info["replicas"] == world.size for one in passes(events))
        for events in world.ranks.values()
    )


# --- schedules and losses -----------------------------------------------------------------------


def _schedules(world: World) -> Iterator[Finding]:
    for event in world.events("schedule")[0]:
        gaps = Counter({int(count): number for count, number in event["per_update"].items()})
        if event["optimizers"] > 1 or gaps.total() < _MIN_UPDATES:
            continue
        # A schedule that steps once per epoch can repeat its period on purpose.
        is_by_step = 2 * sum(number for count, number in gaps.items() if count) >= gaps.total()
        passed_period = event["period"] is not None and event["steps"] >= _ENDED * event["period"]
        zero = event["zero_updates"]
        has_ended = zero > 1 and zero >= _ZERO * event["updates"]
        if not (is_by_step and passed_period) and not has_ended:
            continue
        evidence = f"the learning rate is zero in {zero} of {event['updates']} optimizer steps"
        if passed_period:
            evidence = f"its period has {event['period']} steps"
        steps = f"{event['steps']} steps in {event['updates']} optimizer steps"
        text = f"{event['name']} makes {steps}: {evidence}"
        yield Finding("schedule-stepped-too-often", text, event["line"])


def _losses(world: World, updates: list[Update]) -> Iterator[Finding]:
    """Find losses with equal weights in the gradient although they are means over other numbers."""
    if world.size > 1 and not _is_replicated(updates[0]):
        return
    calls: dict[int, list[list[Event]]] = defaultdict(list)  # by step; one list per rank
    for events in world.events("loss").values():
        by_step: dict[int, list[Event]] = defaultdict(list)
        for event in events:
            by_step[event["step"]].append(event)
        for step, of_step in by_step.items():
            calls[step].append(of_step)
    expected = _batches_per_update(world)
    steps = [
        [event for events in ranks for event in events]
        for ranks in calls.values()
        if len(ranks) == world.size and all(len(events) == expected for events in ranks)
    ]
    if 2 * len(steps) < len(calls):  # several losses per batch; fewer at the end of an epoch
        return
    unequal = []  # with equal weights in the gradient
    for events in steps:
        sizes = [event["count"] for event in events]
        scales = [event["scale"] for event in events]
        is_equal = min(scales) > 0 and max(scales) - min(scales) <= _TOLERANCE * max(scales)
        if is_equal and min(sizes) > 0 and max(sizes) >= _COUNT_RATIO * min(sizes):
            unequal.append(events)
    if len(unequal) >= _MIN_UPDATES and 2 * len(unequal) >= len(steps):
        counts = [event["count"] for event in unequal[0]]
        first = unequal[0][0]
        means = f"means over {min(counts):,} and over {max(counts):,} targets"
        text = f"at step {first['step']}, {means} have equal weights"
        text = f"{text}; so in {len(unequal)} of {plural(len(steps), 'observed step')}"
        yield Finding("loss-normalisation", text, first["line"])


def _batches_per_update(world: World) -> float:
    """Return the usual number of batches of training between two optimizer steps."""
    trained = [one for one in passes(world.ranks[0]) if one.trains]
    steps = Counter(batch["step"] for one in trained for batch in one.batches)
    return median(steps.values() or [0])
