"""Findings of an audit: names, and rules for replicas, losses, samples, draws, and files."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from statistics import median
from typing import Any

from samestep.tools.audit.worlds import Event, Pass, World, matching_passes, passes
from samestep.units import plural

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
    "different-learning-rates": "compute learning rates from values that all ranks share",
    "unreduced-gradients": "call the DistributedDataParallel module, not its inner module",
    "loss-normalisation": "divide the sum of each loss by the targets of all ranks",
    "files-written-by-several-ranks": "write on rank 0 only: if dist.get_rank() == 0",
    "independent-copies": "call torch.distributed.init_process_group, and wrap the model in "
    "DistributedDataParallel; or start one process",
}
_TOLERANCE = 1e-4  # relative; ranks on different devices can round differently
_COUNT_RATIO = 1.05  # of the numbers of targets of two losses
_MIN_UPDATES = 3
_MIN_ORDER = 16  # samples; a shorter order repeats by chance
_MIN_DRAWS = 3
_UNIQUE = 8  # samples with different contents, each on several ranks
_PATHS = 3  # of files in one finding

Summary = list[float] | None
Update = dict[int, Event]  # one optimizer step of all ranks
Group = dict[int, Pass]  # passes of all ranks


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
    if updates and not any(event["hooked"] for event in updates[0].values()):
        yield from _losses(world, updates)
    if world.size == 1:
        return
    findings = list(_learning_rates(updates))[:1]
    if not findings and updates and not any(event["hooked"] for event in updates[0].values()):
        findings = list(_replicas(world, updates))
    yield from findings


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


def divides_samples(world: World) -> bool:
    """Whether each rank has a pass whose sampler divides samples among all ranks."""
    return all(
        any(one.info["replicas"] == world.size for one in passes(events))
        for events in world.ranks.values()
    )


# --- losses -------------------------------------------------------------------------------------


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


# --- data ---------------------------------------------------------------------------------------


def data_findings(world: World) -> Iterator[Finding]:
    """Yield the findings of a world about its data."""
    yield from _repeated_order(world)
    if world.size == 1:
        return
    if reduces_gradients(world):
        for group in matching_passes(world):
            if all(one.trains for one in group.values()):
                yield from _repeated_samples(group)
                yield from _missing_samples(group)
    yield from (one for one in _evaluations(world) if isinstance(one, Finding))
    yield from _equal_augmentation(world)
    yield from _equal_dropout(world)


def unchecked_evaluations(world: World) -> Iterator[str]:
    """Yield the lines of evaluations that no rule could judge, with the reason."""
    yield from dict.fromkeys(one for one in _evaluations(world) if isinstance(one, str))


def _repeated_samples(group: Group) -> Iterator[Finding]:
    # Ranks that draw independently with replacement share samples by chance, but not their order.
    orders = {tuple(one.samples) for one in group.values()}
    if len(orders) > 1 and any(one.info["replacement"] for one in group.values()):
        return
    counts = Counter(sample for one in group.values() for sample in set(one.samples))
    repeated = sum(count > 1 for count in counts.values())
    info = group[0].info
    # Samplers pad the end of an epoch: by one sample per rank, or by one batch per rank.
    padding = len(group)
    if not info["sampler"].startswith("DistributedSampler"):
        padding *= info["batch"] or 1
    if repeated >= padding and _is_same_data(group):
        samples = f"{repeated:,} of {plural(len(counts), 'sample')} of {info['dataset']}"
        text = f"{samples} are trained on several ranks"
        text = f"{text} in the epoch that begins at step {info['step']}"
        yield Finding("repeated-samples", text, info["line"])


def _missing_samples(group: Group) -> Iterator[Finding]:
    info = group[0].info
    if not _covers_dataset(group):
        return
    missing = info["samples"] - len({sample for one in group.values() for sample in one.samples})
    if missing >= len(group) * (info["batch"] or 1):  # fewer are the incomplete last batches
        samples = f"{missing:,} of {plural(info['samples'], 'sample')} of {info['dataset']}"
        text = f"{samples} are not used by any rank"
        text = f"{text} in the epoch that begins at step {info['step']}"
        yield Finding("missing-samples", text, info["line"])


def _covers_dataset(group: Group) -> bool:
    """Whether complete passes of all ranks together should contain each sample of one dataset."""
    names = ("samples", "subset", "fingerprint")
    keys = {tuple(one.info[name] for name in names) for one in group.values()}
    return len(keys) == 1 and all(one.info["complete"] and one.has_ended for one in group.values())


def _is_same_data(group: Group) -> bool:
    """Whether equal indices are the same sample on all ranks, by the datasets or contents."""
    fingerprints = {one.info["fingerprint"] for one in group.values()}
    if len(fingerprints) == 1 and None not in fingerprints:
        return True
    # Hashes by rank, of each sample, for each tensor of a batch.
    contents: dict[int, dict[int, set[tuple[int, int]]]] = defaultdict(lambda: defaultdict(set))
    for rank, one in group.items():
        for batch in one.batches:
            for leaf, hashes in enumerate(batch["hashes"]):
                for sample, value in zip(batch["samples"], hashes, strict=True):
                    contents[leaf][sample].add((rank, value))
    for samples in contents.values():
        # Whether the tensor differs between samples, and is the same for one on several ranks.
        values = [{value for _, value in pairs} for pairs in samples.values()]
        shared = sum(len({rank for rank, _ in pairs}) > 1 for pairs in samples.values())
        is_unique = len(set().union(*values)) == len(values)
        if is_unique and shared >= _UNIQUE and all(len(hashes) == 1 for hashes in values):
            return True
    return False


def _evaluations(world: World) -> Iterator[Finding | str]:
    """Yield a finding, or the line and why it cannot be judged, of evaluations on all ranks."""
    for group in matching_passes(world):
        if world.size > 1 and not any(one.trains for one in group.values()):
            result = _evaluation(world, group)
            if isinstance(result, str):
                yield f"the evaluation at {group[0].info['line']}: {result}"
            elif result is not None:
                yield result


def _evaluation(world: World, group: Group) -> Finding | str | None:
    """Return a finding, or why an evaluation cannot be judged, or None if it is right."""
    info = group[0].info
    samples = {sample for one in group.values() for sample in one.samples}
    # If each rank evaluates all samples, all ratios are right.
    if all(samples == set(one.samples) for one in group.values()):
        return None
    expected = len(samples)
    if _covers_dataset(group):
        expected = info["samples"]
    elif not all(one.has_ended for one in group.values()) or not _is_same_data(group):
        return "samples of its ranks cannot be compared"
    numbers = {rank: one.info["number"] for rank, one in group.items()}
    by_kind: dict[str, list[Event]] = {"count": [], "added": []}  # the first of each rank
    for kind, events in by_kind.items():
        for rank, number in numbers.items():
            of_pass = (one for one in world.events(kind)[rank] if one["number"] == number)
            events += list(islice(of_pass, 1))
    counts = by_kind["count"]
    if len(counts) == world.size and len({event["at"] for event in counts}) == 1:
        total = sum(event["samples"] for event in counts)
        if total == expected:
            return None
        text = f"an evaluation counts {total:,} samples; {info['dataset']} has {expected:,}"
        return Finding("evaluation-counted-twice", text, counts[0]["line"])
    reason = "no all_reduce or reduce adds its values"
    if by_kind["added"]:
        reason = "ranks add values without the number of samples, such as means"
    repeated = sum(len(one.samples) for one in group.values()) - len(samples)
    if repeated:
        reason = f"{reason}; padding repeats {plural(repeated, 'sample')}"
    return reason


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
        first = orders[*data, one.optimizer].setdefault(samples, one).info
        # Loaders of one epoch can have equal orders.
        if first["step"] < info["step"] and first["epoch"] == info["epoch"]:
            steps = f"the epochs that begin at steps {first['step']} and {info['step']}"
            text = f"{steps} have the same order of {plural(len(samples), 'sample')}"
            text = f"{text}; the sampler's epoch is {info['epoch']} in both"
            yield Finding("repeated-order", text, info["line"])
            return


# --- random draws -------------------------------------------------------------------------------


def _equal_augmentation(world: World) -> Iterator[Finding]:
    """Find ranks whose generators have equal states before and after batches.

    The state after a batch is compared too: a sample that seeds a generator ends in another.
    """
    draws: list[dict[Any, list[int]]] = []
    for rank in range(world.size):
        states: dict[Any, list[int]] = {}
        for event in (*world.ranks[rank], *world.children[rank]):
            if event["kind"] == "fetch_draws":
                for name, pair in event["states"].items():
                    states[name, *pair] = event["samples"]
        draws.append(states)
    for rank, equal in _equal_draws(draws):
        names = ", ".join(sorted({name for name, *_ in equal}))
        text = f"ranks 0 and {rank} load {len(equal)} batches of different samples with the"
        trained = [one.info["line"] for one in passes(world.ranks[0])]
        line = next(iter(trained), "")
        yield Finding("equal-random-draws", f"{text} same state of {names}", line)


def _equal_dropout(world: World) -> Iterator[Finding]:
    draws: list[dict[Any, list[int]]] = []
    lines: dict[Any, str] = {}
    for rank in range(world.size):
        samples: list[int] = []
        draws.append({})
        for event in world.ranks[rank]:
            if event["kind"] == "batch":
                samples = event["samples"]
            elif event["kind"] == "dropout":
                key = (event["step"], event["call"], *event["shape"], event["state"])
                draws[rank][key] = samples
                lines.setdefault(key, event["line"])
    for rank, equal in _equal_draws(draws):
        text = f"ranks 0 and {rank} make {len(equal)} calls of dropout with equal masks for"
        yield Finding("equal-random-draws", f"{text} different samples", lines[equal[0]])


def _equal_draws(draws: list[dict[Any, list[int]]]) -> list[tuple[int, list[Any]]]:
    """Return the first rank that draws as rank 0 for other samples, and these draws.

    `draws` has, of each rank, the samples by the state of a generator.
    """
    for rank in range(1, len(draws)):
        # Equal draws for the same samples are right: both ranks read the same batch.
        equal = []
        for key, samples in draws[0].items():
            others = draws[rank].get(key)
            if samples and others and not set(samples) & set(others):
                equal.append(key)
        if len(equal) >= _MIN_DRAWS:
            return [(rank, equal)]
    return []


# --- files --------------------------------------------------------------------------------------


def file_findings(world: World) -> Iterator[Finding]:
    """Yield the findings of a world about files that several ranks open for writing."""
    writers: dict[str, dict[int, str]] = defaultdict(dict)
    for rank, events in world.events("file").items():
        for event in events:
            writers[event["path"]].setdefault(rank, event["line"])
    by_line: dict[str, list[str]] = defaultdict(list)  # of the first rank
    for path, lines in writers.items():
        if len(lines) > 1:
            by_line[next(iter(lines.values()))].append(path)
    for line, paths in by_line.items():
        ranks = sorted({rank for path in paths for rank in writers[path]})
        names = ", ".join(paths[:_PATHS])
        if len(paths) > _PATHS:
            names = f"{names} and {len(paths) - _PATHS} more"
        text = f"ranks {', '.join(map(str, ranks))} open {names} for writing"
        yield Finding("files-written-by-several-ranks", text, line)
