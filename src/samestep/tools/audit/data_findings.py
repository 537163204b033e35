"""Findings about samples, their order, random draws and evaluations."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

from samestep.tools.audit.findings import Finding, plural
from samestep.tools.audit.step_findings import reduces_gradients
from samestep.tools.audit.worlds import Event, Pass, World, matching_passes, passes

_MIN_ORDER = 16  # samples; a shorter order repeats by chance
_MIN_DRAWS = 3
_UNIQUE = 8  # samples with different contents, each on several ranks


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
    if any(one.info["replacement"] for one in group.values()) and len({tuple(p.samples) for p in group.values()}) > 1:
        return
    samples = {rank: set(one.samples) for rank, one in group.items()}
    counts = Counter(sample for owned in samples.values() for sample in owned)
    repeated = sum(count > 1 for count in counts.values())
    info = group[0].info
    # Samplers pad the end of an epoch: by one sample per rank, or by one batch per rank.
    padding = len(group) * (1 if info["sampler"].startswith("DistributedSampler") else info["batch"] or 1)
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
    keys = {(one.info["samples"], one.info["subset"], one.info["fingerprint"]) for one in group.values()}
    return len(keys) == 1 and all(one.info["complete"] and one.has_ended for one in group.values())


def _is_same_data(group: dict[int, Pass]) -> bool:
    """Whether equal indices are the same sample on all ranks, by the datasets or by the contents of samples."""
    fingerprints = {one.info["fingerprint"] for one in group.values()}
    if len(fingerprints) == 1 and None not in fingerprints:
        return True
    contents: dict[int, dict[int, set[tuple[int, int]]]] = defaultdict(lambda: defaultdict(set))  # by tensor and sample
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
        counts += [e for e in world.ranks[rank] if e["kind"] == "count" and e["number"] == number][:1]
    total, info = sum(event["samples"] for event in counts), group[0].info
    # If each rank evaluates all samples, all ratios are right.
    is_replicated = all(event["samples"] == info["samples"] for event in counts)
    is_reduced = len(counts) == world.size and len({event["at"] for event in counts}) == 1
    if is_reduced and not is_replicated and total != info["samples"]:
        text = f"an evaluation counts {total:,} samples; {info['dataset']} has {info['samples']:,}"
        yield Finding("evaluation-counted-twice", text, counts[0]["line"])


def _repeated_order(world: World) -> Iterator[Finding]:
    # A new loader continues the training of its optimizer; another optimizer belongs to another training.
    orders: dict[tuple[Any, ...], dict[tuple[int, ...], Pass]] = defaultdict(dict)
    for one in passes(world.ranks[0]):
        info, samples = one.info, tuple(one.samples)
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
        events = [e for e in (*world.ranks[rank], *world.children[rank]) if e["kind"] == "fetch_draws"]
        draws.append({(name, *states): e["samples"] for e in events for name, states in e["states"].items()})
    for rank in range(1, world.size):
        equal = [key for key in draws[0].keys() & draws[rank].keys() if _differ(draws[0][key], draws[rank][key])]
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
            if key in calls[rank] and _differ(samples, calls[rank][key][0])
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


def _differ(first: list[int], second: list[int]) -> bool:
    return bool(first) and bool(second) and not set(first) & set(second)
