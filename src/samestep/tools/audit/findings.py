"""Findings of an audit: names, and rules for replicas, schedules, losses, samples, orders, draws and evaluations."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

from samestep.tools.audit.worlds import Event, Pass, World, matching_passes, passes
from samestep.units import plural

# Stable names; the table of docs/guides/audit.md has the same.
NAMES = {
    "repeated-samples": "Ranks train on the same samples within an epoch.",
    "missing-samples": "An epoch leaves samples out.",
    "evaluation-counted-twice": "An evaluation counts samples twice, or leaves samples out.",
    "repeated-order": "A shuffling sampler yields the same order in several epochs.",
    "equal-random-draws": "Ranks draw equal random numbers for different samples.",
    "different-parameters": "Replicas of the model have different parameters.",
    "different-buffers": "Ranks evaluate with different buffers, such as running statistics.",
    "different-learning-rates": "Ranks use different learning rates.",
    "unreduced-gradients": "Ranks update their replicas with different gradients.",
    "schedule-stepped-too-often": "A scheduler makes several steps per optimizer step and ends too early.",
    "loss-normalisation": "Means over different numbers of targets are averaged with equal weights.",
    "non-finite-values": "Training continues with parameters that are not finite.",
    "lost-position": "A run that resumes within an epoch begins with the first batch of an epoch.",
    "files-written-by-several-ranks": "Several ranks write the same file.",
}
_TOLERANCE = 1e-4  # relative; ranks on different devices can round differently
_COUNT_RATIO = 1.05  # of the numbers of targets of two losses
_MIN_UPDATES = 3
_ENDED = 1.5  # length of a schedule, relative to its period
_ZERO = 0.25  # share of the optimizer steps

Summary = list[float] | None
Update = dict[int, Event]  # one optimizer step of all ranks
_MIN_ORDER = 16  # samples; a shorter order repeats by chance
_MIN_DRAWS = 3
_UNIQUE = 8  # samples with different contents, each on several ranks


@dataclass(frozen=True)
class Finding:
    """One mistake with its evidence."""

    name: str
    evidence: str
    line: str  # of the user's script, empty if unknown


def step_findings(world: World) -> Iterator[Finding]:
    """Yield the findings of a world about its optimizer steps."""
    yield from _non_finite(world)
    yield from _schedules(world)
    yield from _losses(world)
    if world.size > 1:
        rates = list(_learning_rates(world))
        yield from rates
        if not rates:
            yield from _replicas(world)
        yield from _buffers(world)


def _updates(world: World, kind: str = "update") -> list[Update]:
    """Return the observed optimizer steps of all ranks with equal optimizers."""
    steps: dict[tuple[int, int], Update] = defaultdict(dict)
    for rank, events in world.events(kind).items():
        for event in events:
            steps[event["step"], event["optimizer"]][rank] = event
    complete = [update for _, update in sorted(steps.items()) if len(update) == world.size]
    return [
        update
        for update in complete
        if all(e["shapes"] == update[0]["shapes"] for e in update.values())
    ]


def differs(first: Summary, second: Summary, tolerance: float = _TOLERANCE) -> bool:
    """Whether two finite summaries of tensors differ by more than rounding."""
    if first is None or second is None or not all(map(math.isfinite, (*first, *second))):
        return False
    scale = tolerance * max(first[0], second[0])
    return abs(first[0] - second[0]) > scale or abs(first[1] - second[1]) > 10 * scale


def _different(update: Update, kind: str) -> dict[str, tuple[int, int]]:
    """Return the names of tensors that differ between ranks, with two ranks."""
    return {
        name: (0, rank)
        for rank, event in update.items()
        for name, summary in event[kind].items()
        if differs(update[0][kind][name], summary)
    }


def _is_replicated(update: Update) -> bool:
    return all(event["replicated"] for event in update.values())


def _has_equal_gradients(update: Update) -> bool:
    """Whether all observed gradients are equal on all ranks, and not zero."""
    summaries = [summary for event in update.values() for summary in event["gradients"].values()]
    present = [summary for summary in summaries if summary is not None]
    return (
        len(present) == len(summaries) > 0
        and any(s[0] > 0 for s in present)
        and not _different(update, "gradients")
    )


def reduces_gradients(world: World) -> bool:
    """Whether the ranks train replicas of one model."""
    updates = _updates(world)
    return bool(updates) and all(
        _is_replicated(update) or _has_equal_gradients(update) for update in updates
    )


def _learning_rates(world: World) -> Iterator[Finding]:
    updates = _updates(world)
    if not updates or not (_is_replicated(updates[0]) or not _different(updates[0], "values")):
        return
    for update in updates:
        for rank, event in update.items():
            if event["rates"] != update[0]["rates"]:
                text = f"at step {event['step']}, rank 0 uses {update[0]['rates']} and rank {rank} {event['rates']}"
                yield Finding("different-learning-rates", text, event["line"])
                return


def _replicas(world: World) -> Iterator[Finding]:
    """Find replicas that become different, and the first cause: their gradients or their parameters."""
    updates = _updates(world)
    if not updates or any(event["hooked"] for event in updates[0].values()):
        return
    gradients = [update for update in updates if _different(update, "gradients")]
    values = [update for update in updates if _different(update, "values")]
    ends = _updates(world, "end")
    if _is_replicated(updates[0]):
        has_cause = bool(gradients)
    else:
        has_cause = (
            len(gradients) == len(updates) >= _MIN_UPDATES
            and not _different(updates[0], "values")
            and all(
                any(one.info["replicas"] == world.size for one in passes(events))
                for events in world.ranks.values()
            )
            and bool(values)
        )
    if has_cause and (not values or gradients[0][0]["step"] <= values[0][0]["step"]):
        if not _become_equal([*values, *updates, *ends], values):
            share = f"in {len(gradients)} of {plural(len(updates), 'observed step')}"
            yield _difference("unreduced-gradients", gradients[0], "gradients", share)
    elif values and (_is_replicated(updates[0]) or all(map(_has_equal_gradients, updates))):
        share = f"in {len(values)} of {plural(len(updates), 'observed step')}"
        yield _difference("different-parameters", values[0], "values", share)


def _become_equal(updates: list[Update], values: list[Update]) -> bool:
    """Whether a parameter that differed is equal later: ranks that average parameters differ in between."""
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
    tensor, (first, second) = next(iter(_different(update, kind).items()))
    norms = [update[rank][kind][tensor][0] for rank in (first, second)]
    subject = f"the gradient of {tensor}" if kind == "gradients" else tensor
    text = f"at step {update[0]['step']}, {subject} has norm {norms[0]:.6g} on rank {first} and {norms[1]:.6g} on rank"
    return Finding(name, f"{text} {second}; ranks differ {share}", update[0]["line"])


def _buffers(world: World) -> Iterator[Finding]:
    evaluations: dict[tuple[int, int], Update] = defaultdict(dict)
    for rank, events in world.events("evaluation").items():
        for event in events:
            evaluations[event["number"], event["step"]][rank] = event
    for update in evaluations.values():
        if (
            len(update) == world.size
            and len({tuple(event["buffers"]) for event in update.values()}) == 1
        ):
            different = _different(update, "buffers")
            if different:
                name = next(iter(different))
                text = f"an evaluation after {plural(update[0]['step'], 'step')} uses different values of {name}"
                text = f"{text} on ranks 0 and {different[name][1]}"
                yield Finding("different-buffers", text, update[0]["line"])
                return


def _non_finite(world: World) -> Iterator[Finding]:
    for rank, events in world.events("update").items():
        finite: set[str] = set()
        for event in events:
            for name, summary in event["values"].items():
                if summary is None:
                    continue
                if all(map(math.isfinite, summary)):
                    finite.add(name)
                elif name in finite and event["step"] < events[-1]["step"]:
                    text = f"{name} is not finite at step {event['step']} on rank {rank}, and the steps continue"
                    yield Finding("non-finite-values", text, event["line"])
                    return


def _schedules(world: World) -> Iterator[Finding]:
    for event in world.events("schedule")[0]:
        gaps = Counter({int(count): number for count, number in event["per_update"].items()})
        if event["optimizers"] > 1 or gaps.total() < _MIN_UPDATES:
            continue
        is_usual = 2 * sum(number for count, number in gaps.items() if count > 1) >= gaps.total()
        passed_period = event["period"] is not None and event["steps"] >= _ENDED * event["period"]
        is_zero = event["zero_updates"] > 1 and event["zero_updates"] >= _ZERO * event["updates"]
        if is_usual and (passed_period or is_zero):
            evidence = f"the learning rate is zero in {event['zero_updates']} of {event['updates']} optimizer steps"
            if passed_period:
                evidence = f"its period has {event['period']} steps"
            text = f"{event['name']} makes {event['steps']} steps in {event['updates']} optimizer steps: {evidence}"
            yield Finding("schedule-stepped-too-often", text, event["line"])


def _losses(world: World) -> Iterator[Finding]:
    """Find losses with equal weights in the gradient although they are means over different numbers."""
    updates = _updates(world)
    if not updates or (world.size > 1 and not _is_replicated(updates[0])):
        return
    if any(event["hooked"] for event in updates[0].values()):
        return
    calls: dict[int, dict[int, list[Event]]] = defaultdict(
        lambda: defaultdict(list)
    )  # by step and rank
    for rank, events in world.events("loss").items():
        for event in events:
            calls[event["step"]][rank].append(event)
    expected = batches_per_update(world)
    steps = [
        [event for events in ranks.values() for event in events]
        for ranks in calls.values()
        if len(ranks) == world.size and all(len(events) == expected for events in ranks.values())
    ]
    if 2 * len(steps) < len(calls):  # several losses per batch; fewer at the end of an epoch
        return
    unequal = [events for events in steps if _are_means_of_means(events)]
    if len(unequal) >= _MIN_UPDATES and 2 * len(unequal) >= len(steps):
        counts = [event["count"] for event in unequal[0]]
        text = f"at step {unequal[0][0]['step']}, means over {min(counts):,} and over {max(counts):,} targets have equal"
        text = f"{text} weights; so in {len(unequal)} of {plural(len(steps), 'observed step')}"
        yield Finding("loss-normalisation", text, unequal[0][0]["line"])


def _are_means_of_means(events: list[Event]) -> bool:
    counts = [event["count"] for event in events]
    scales = [event["scale"] for event in events]
    is_equal = min(scales) > 0 and max(scales) - min(scales) <= _TOLERANCE * max(scales)
    return bool(is_equal and min(counts) > 0 and max(counts) >= _COUNT_RATIO * min(counts))


def batches_per_update(world: World) -> float:
    """Return the usual number of batches of training between two optimizer steps."""
    trained = [one for one in passes(world.ranks[0]) if one.trains]
    steps = Counter(batch["step"] for one in trained for batch in one.batches)
    if steps:
        return median(steps.values())
    return 0


def data_findings(world: World) -> Iterator[Finding]:
    """Yield the findings of a world about its data."""
    yield from _repeated_order(world)
    if world.size == 1:
        return
    for group in matching_passes(world):
        if all(one.trains for one in group.values()):
            if reduces_gradients(world):
                yield from _repeated_samples(group)
                yield from _missing_samples(group)
        elif not any(one.trains for one in group.values()):
            yield from _evaluation(world, group)
    yield from _equal_augmentation(world)
    yield from _equal_dropout(world)


def _repeated_samples(group: dict[int, Pass]) -> Iterator[Finding]:
    # Ranks that draw independently with replacement share samples by chance, but not their order.
    if (
        any(one.info["replacement"] for one in group.values())
        and len({tuple(p.samples) for p in group.values()}) > 1
    ):
        return
    samples = {rank: set(one.samples) for rank, one in group.items()}
    counts = Counter(sample for owned in samples.values() for sample in owned)
    repeated = sum(count > 1 for count in counts.values())
    info = group[0].info
    # Samplers pad the end of an epoch: by one sample per rank, or by one batch per rank.
    padding = len(group) * (
        1 if info["sampler"].startswith("DistributedSampler") else info["batch"] or 1
    )
    if repeated >= padding and _is_same_data(group):
        text = f"{repeated:,} of {plural(len(counts), 'sample')} of {info['dataset']} are trained on several ranks"
        text = f"{text} in the epoch that begins at step {info['step']}"
        yield Finding("repeated-samples", text, info["line"])


def _missing_samples(group: dict[int, Pass]) -> Iterator[Finding]:
    info = group[0].info
    if not _covers_dataset(group):
        return
    missing = info["samples"] - len({sample for one in group.values() for sample in one.samples})
    if missing >= len(group) * (info["batch"] or 1):  # fewer are the incomplete last batches
        text = f"{missing:,} of {plural(info['samples'], 'sample')} of {info['dataset']} are not used by any rank"
        text = f"{text} in the epoch that begins at step {info['step']}"
        yield Finding("missing-samples", text, info["line"])


def _covers_dataset(group: dict[int, Pass]) -> bool:
    """Whether the complete passes of all ranks together should contain each sample of one dataset."""
    keys = {
        (one.info["samples"], one.info["subset"], one.info["fingerprint"]) for one in group.values()
    }
    return len(keys) == 1 and all(one.info["complete"] and one.has_ended for one in group.values())


def _is_same_data(group: dict[int, Pass]) -> bool:
    """Whether equal indices are the same sample on all ranks, by the datasets or by the contents of samples."""
    fingerprints = {one.info["fingerprint"] for one in group.values()}
    if len(fingerprints) == 1 and None not in fingerprints:
        return True
    contents: dict[int, dict[int, set[tuple[int, int]]]] = defaultdict(
        lambda: defaultdict(set)
    )  # by tensor and sample
    for rank, one in group.items():
        for batch in one.batches:
            for leaf, hashes in enumerate(batch["hashes"]):
                for sample, value in zip(batch["samples"], hashes, strict=True):
                    contents[leaf][sample].add((rank, value))
    return any(_identifies_samples(values) for values in contents.values())


def _identifies_samples(contents: dict[int, set[tuple[int, int]]]) -> bool:
    """Whether a tensor is different for each sample, and the same for one sample on several ranks."""
    values = {sample: {value for _, value in pairs} for sample, pairs in contents.items()}
    shared = sum(len({rank for rank, _ in pairs}) > 1 for pairs in contents.values())
    is_constant = all(len(hashes) == 1 for hashes in values.values())
    return is_constant and shared >= _UNIQUE and len(set().union(*values.values())) == len(values)


def _evaluation(world: World, group: dict[int, Pass]) -> Iterator[Finding]:
    if not _covers_dataset(group):
        return
    counts = []
    for rank, one in group.items():
        number = one.info["number"]
        counts += [e for e in world.ranks[rank] if e["kind"] == "count" and e["number"] == number][
            :1
        ]
    total = sum(event["samples"] for event in counts)
    info = group[0].info
    # If each rank evaluates all samples, all ratios are right.
    is_replicated = all(event["samples"] == info["samples"] for event in counts)
    is_reduced = len(counts) == world.size and len({event["at"] for event in counts}) == 1
    if is_reduced and not is_replicated and total != info["samples"]:
        text = f"an evaluation counts {total:,} samples; {info['dataset']} has {info['samples']:,}"
        yield Finding("evaluation-counted-twice", text, counts[0]["line"])


def _repeated_order(world: World) -> Iterator[Finding]:
    # A new loader continues the training of its optimizer; another optimizer belongs to another
    # training.
    orders: dict[tuple[Any, ...], dict[tuple[int, ...], Pass]] = defaultdict(dict)
    for one in passes(world.ranks[0]):
        info = one.info
        samples = tuple(one.samples)
        if not info["shuffled"] or not one.trains or not one.has_ended or len(samples) < _MIN_ORDER:
            continue
        data = (info["line"], info["dataset"], info["subset"], info["fingerprint"])
        first = orders[*data, one.optimizer].setdefault(samples, one)
        if first.info["step"] < info["step"]:  # loaders of one epoch can have equal orders
            steps = f"the epochs that begin at steps {first.info['step']} and {info['step']} have the same order"
            text = f"{steps} of {plural(len(samples), 'sample')}; the sampler's epoch is {info['epoch']} in both"
            if first.info["epoch"] == info["epoch"]:
                yield Finding("repeated-order", text, info["line"])
                return


def _equal_augmentation(world: World) -> Iterator[Finding]:
    """Compare the states of generators before and after each batch: a sample that seeds a generator ends in another."""
    draws: list[dict[Any, list[int]]] = []
    for rank in range(world.size):
        events = [
            e for e in (*world.ranks[rank], *world.children[rank]) if e["kind"] == "fetch_draws"
        ]
        draws.append(
            {(name, *states): e["samples"] for e in events for name, states in e["states"].items()}
        )
    for rank in range(1, world.size):
        equal = [
            key
            for key in draws[0].keys() & draws[rank].keys()
            if _are_disjoint(draws[0][key], draws[rank][key])
        ]
        if len(equal) >= _MIN_DRAWS:
            names = ", ".join(sorted({name for name, *_ in equal}))
            text = f"ranks 0 and {rank} load {len(equal)} batches of different samples with the same state of {names}"
            trained = [one.info["line"] for one in passes(world.ranks[0])]
            yield Finding("equal-random-draws", text, trained[0] if trained else "")
            return


def _equal_dropout(world: World) -> Iterator[Finding]:
    calls = [_dropouts(world.ranks[rank]) for rank in range(world.size)]
    for rank in range(1, world.size):
        equal = [
            line
            for key, (samples, line) in calls[0].items()
            if key in calls[rank] and _are_disjoint(samples, calls[rank][key][0])
        ]
        if len(equal) >= _MIN_DRAWS:
            text = f"ranks 0 and {rank} make {len(equal)} calls of dropout with equal masks for different samples"
            yield Finding("equal-random-draws", text, equal[0])
            return


def _dropouts(events: list[Event]) -> dict[tuple[Any, ...], tuple[list[int], str]]:
    """Return the samples and the line of each call of dropout, by step, call, shape and state."""
    samples: list[int] = []
    result = {}
    for event in events:
        if event["kind"] == "batch":
            samples = event["samples"]
        elif event["kind"] == "dropout":
            key = (event["step"], event["call"], *event["shape"], event["state"])
            result[key] = (samples, event["line"])
    return result


def _are_disjoint(first: list[int], second: list[int]) -> bool:
    return bool(first) and bool(second) and not set(first) & set(second)
