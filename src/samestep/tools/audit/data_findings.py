"""Findings of an audit about data: samples, orders, random draws, evaluations, and files."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import islice
from typing import Any

from samestep.number_text import plural
from samestep.tools.audit.step_findings import Finding, reduces_gradients
from samestep.tools.audit.worlds import Event, Pass, World, matching_passes, passes

_MIN_ORDER = 16  # samples; a shorter order repeats by chance
_MIN_DRAWS = 3
_UNIQUE = 8  # samples with different contents, each on several ranks
_PATHS = 3  # of files in one finding

Group = dict[int, Pass]  # passes of all ranks
Draws = dict[Any, list[int]]  # samples of one rank, by the state with which they were drawn


def data_findings(world: World) -> Iterator[Finding]:
    """Yield the findings of a world about its data."""
    # Also of a single rank, which needs `set_epoch` as well.
    yield from _repeated_order(world)
    if world.size == 1:
        return
    # Ranks that train different models can use the same samples.
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


# --- samples ------------------------------------------------------------------------------------


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
    draws: list[Draws] = [{} for _ in range(world.size)]
    for rank, states in enumerate(draws):
        for event in (*world.ranks[rank], *world.children[rank]):
            if event["kind"] == "fetch_draws":
                for name, pair in event["states"].items():
                    states[name, *pair] = event["samples"]
    for rank, equal in _equal_draws(draws):
        names = ", ".join(sorted({name for name, *_ in equal}))
        text = f"ranks 0 and {rank} load {len(equal)} batches of different samples with the"
        text = f"{text} same state of {names}"
        trained = [one.info["line"] for one in passes(world.ranks[0])]
        yield Finding("equal-random-draws", text, next(iter(trained), ""))


def _equal_dropout(world: World) -> Iterator[Finding]:
    draws: list[Draws] = [{} for _ in range(world.size)]
    lines: dict[Any, str] = {}
    for rank, states in enumerate(draws):
        samples: list[int] = []
        for event in world.ranks[rank]:
            if event["kind"] == "batch":
                samples = event["samples"]
            elif event["kind"] == "dropout":
                key = (event["step"], event["call"], *event["shape"], event["state"])
                states[key] = samples
                lines.setdefault(key, event["line"])  # of the first rank
    for rank, equal in _equal_draws(draws):
        text = f"ranks 0 and {rank} make {len(equal)} calls of dropout with equal masks for"
        yield Finding("equal-random-draws", f"{text} different samples", lines[equal[0]])


def _equal_draws(draws: list[Draws]) -> Iterator[tuple[int, list[Any]]]:
    """Yield the first rank with states of rank 0 for other samples, and these states."""
    for rank in range(1, len(draws)):
        equal = [
            state
            for state, samples in draws[0].items()
            if _are_disjoint(samples, draws[rank].get(state, []))
        ]
        if len(equal) >= _MIN_DRAWS:
            yield rank, equal
            return


def _are_disjoint(first: list[int], second: list[int]) -> bool:
    return bool(first) and bool(second) and not set(first) & set(second)


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
