"""What costs a step time that it would not have to, each with what it would save at most.

Every estimate comes from what was measured of these steps, or tried on these ranks; none is looked up. What saves less
than a tenth of a step is not told.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from statistics import mean, median

from samestep.tools.profile.advice import Advice, Cause, milliseconds
from samestep.tools.profile.calling import device_waits, host_bound
from samestep.tools.profile.critical import Phases, computing_seconds, saved
from samestep.tools.profile.measured import Measured
from samestep.tools.profile.sending import communication, synchronisation, tiny_buckets
from samestep.tools.profile.straggler import straggler

# Of a step: what an advice has to save at most, at least.
_WORTH_TELLING = 0.1
_MOST = 3
# A rank is slow if a shard takes it longest in so many steps.
_AGAIN_AND_AGAIN = 0.7
_MOST_WORKERS = 8
# What checkpoints may cost of a step once they are seldom enough.
_CHECKPOINT_SHARE = 0.02


def advise(found: Measured) -> list[Advice]:
    """At most three, what saves most first; empty where nothing stands out."""
    told = [each for cause in _CAUSES if (each := cause(found)) is not None]
    worth = [each for each in told if each.seconds >= _WORTH_TELLING * found.step_seconds]
    return sorted(worth, key=lambda each: -each.seconds)[:_MOST]


def slow_loader(found: Measured) -> Advice | None:
    """A rank waits for its batch."""
    most = saved(found, lambda _, phases: phases["data"])
    if not most:
        return None
    waits, step = [phases["data"] for phases in found.phases], found.step_seconds
    slowest = max(range(found.size), key=lambda rank: waits[rank])
    making, rest = found.costs.batch, max(step - most, 1e-6)
    workers, do = _loaders(found, most, rest)
    then = rest + making if workers == 0 else max(rest, making / workers)
    told = f"; with --workers {workers} it would take {milliseconds(then)}" if then < step else ""
    return Advice(
        Cause.LOADER,
        step - then if then < step else most,
        f"rank {slowest} waits {milliseconds(waits[slowest])} of {milliseconds(step)} a step for its batch; to make "
        f"one takes {milliseconds(making)}",
        do,
        f"without that wait a step would take {milliseconds(rest)}{told}",
    )


def _loaders(found: Measured, waited: float, rest: float) -> tuple[int, str]:
    """How many loader processes a rank should have, and what to do.

    Args:
        waited: seconds of a step that the wait for data costs.
        rest: seconds of a step without.
    """
    now, cores, making = found.around.workers, found.around.cores, found.costs.batch
    ranks = f"{cores} cores for {found.size} rank{'s' if found.size > 1 else ''}"
    if now and making < waited / 2:
        return 0, f"--workers 0 (now {now}): making a batch takes less than having it from another process"
    enough = min(_MOST_WORKERS, ceil(making / rest))
    if enough <= now:
        cheaper = "make samples cheaper (smaller files, decoded or resized once beforehand), or use a faster disk"
        return now, f"{cheaper}; more loaders than {now} do not help: this machine has {ranks}"
    do = f"--workers {enough} (now {now}): loading then goes on beside the step"
    if enough > max(1, cores // found.size - 1):
        do += f"; this machine has {ranks}, so it only helps as far as loading waits for disks or networks"
    return enough, do


def slow_rank(found: Measured) -> Advice | None:
    """One rank needs longer for a shard than the others."""
    if found.size == 1:
        return None
    costs = _seconds_a_shard(found)
    if costs is None:
        return None
    typical = [median(each) for each in costs]
    rank = max(range(found.size), key=lambda each: typical[each])
    slowest = [max(range(found.size), key=lambda each: same[each]) for same in zip(*costs, strict=True)]
    if slowest.count(rank) < _AGAIN_AND_AGAIN * len(slowest):
        return None
    others = median(value for each, value in enumerate(typical) if each != rank)
    shards = mean(step.shards for step in found.ranks[rank])
    more = (typical[rank] - others) * shards
    seconds = saved(found, lambda each, phases: min(more, computing_seconds(phases)) if each == rank else 0.0)
    late = straggler(found)
    where = f", most of it in {late.phase}" if late is not None and late.rank == rank else ""
    return Advice(
        Cause.RANK,
        seconds,
        f"a shard takes rank {rank} {milliseconds(typical[rank])} and the others {milliseconds(others)}{where}",
        f"look at the device of rank {rank} and what else runs there (samestep doctor), and for code that does more "
        f"on rank {rank}",
        f"as fast as the others, rank {rank} would be done {milliseconds(more)} a step sooner",
    )


def uneven_shards(found: Measured) -> Advice | None:
    """Some ranks have more shards than others."""
    counts = [mean(step.shards for step in steps) for steps in found.ranks]
    most, average = max(counts), mean(counts)
    if not average or most - min(counts) < 0.5:
        return None
    part = 1 - average / most

    def less(rank: int, phases: Phases) -> float:
        made_here = phases["data"] if found.around.workers == 0 else 0.0
        return part * (computing_seconds(phases) + made_here) if counts[rank] == most else 0.0

    seconds = saved(found, less)
    return Advice(
        Cause.UNEVEN,
        seconds,
        f"ranks compute {', '.join(f'{count:g}' for count in counts)} shards of a step",
        f"a number of processes that divides the {found.around.shards} shards",
        f"of what the rank with most shards does for them, {part:.0%} would be done by others",
    )


def checkpoint_stall(found: Measured) -> Advice | None:
    """Training stands still while a checkpoint is copied, or waits for the one before."""
    every = found.around.checkpoint_every
    seconds = saved(found, lambda _, phases: phases["checkpoint"])
    if every is None or not seconds:
        return None
    stall = max(phases["checkpoint"] for phases in found.phases) * every
    rest = max(found.step_seconds - seconds, 1e-6)
    written = found.around.save_seconds or stall
    seldom = max(every + 1, ceil(stall / (_CHECKPOINT_SHARE * rest)), ceil(written / rest))
    return Advice(
        Cause.CHECKPOINT,
        seconds * (1 - every / seldom),
        f"every {every} step{'s' if every > 1 else ''} training stands still for {milliseconds(stall)}; a checkpoint "
        f"is on the disk after {milliseconds(written)}",
        f"--checkpoint-every {_rounded(seldom)}, or --lose-at-most 5m: only the copy of the state is waited for, if "
        "the one before is written by then",
        f"a step without it would take {milliseconds(rest)}",
    )


def _seconds_a_shard(found: Measured) -> list[list[float]] | None:
    """What a shard took each rank in each step in which all of them had some; None where there is no such step."""
    whole = [place for place, same in enumerate(zip(*found.ranks, strict=True)) if all(step.shards for step in same)]
    if not whole:
        return None
    return [
        [computing_seconds(of_rank[place]) / steps[place].shards for place in whole]
        for of_rank, steps in zip(found.by_step, found.ranks, strict=True)
    ]


def _rounded(number: int) -> int:
    """Up to one that people would choose: 1, 2 or 5 and zeros."""
    power = 1
    while 5 * power < number:
        power *= 10
    return next(digit * power for digit in (1, 2, 5) if digit * power >= number)


_CAUSES: tuple[Callable[[Measured], Advice | None], ...] = (
    slow_loader,
    slow_rank,
    uneven_shards,
    synchronisation,
    tiny_buckets,
    checkpoint_stall,
    host_bound,
    device_waits,
    communication,
)
