"""What costs a step time that it would not have to, each with what it would save at most.

Every estimate comes from what was measured of these steps, or tried on these ranks; none is looked up. What saves less
than a tenth of a step is not told.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from math import ceil
from statistics import mean, median

from samestep.tools.profile.advice import Advice, Cause, milliseconds
from samestep.tools.profile.critical import computing_seconds, saved
from samestep.tools.profile.measured import Measured
from samestep.tools.profile.straggler import straggler

# Of a step: what an advice has to save at most, at least.
_WORTH_TELLING = 0.1
_MOST = 3
# A rank is slow if a shard takes it longest in so many steps.
_AGAIN_AND_AGAIN = 0.7
_MOST_WORKERS = 8
# More messages than torch's own buckets would be, by this factor, are many.
_MANY = 4
# Of a step: the cost of operators that have nothing to compute, above which the host is what takes time.
_HOST_SHARE = 0.4
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
    around, waits = found.around, [phases["data"] for phases in found.phases]
    step, slowest = found.step_seconds, max(range(found.size), key=lambda rank: waits[rank])
    loading = waits[slowest] if around.workers == 0 else step * around.workers
    rest = max(step - most, 1e-6)
    workers = min(_MOST_WORKERS, max(around.workers + 1, ceil(loading / rest)))
    then = max(rest, loading / workers)
    spare = around.cores // found.size - 1
    do = f"--workers {workers} (now {around.workers}): loading then goes on beside the step"
    if workers > max(1, spare):
        do += (
            f"; this machine has {around.cores} cores for {found.size} rank{'s' if found.size > 1 else ''}, so it only "
            "helps as far as loading waits for disks or networks"
        )
    if around.workers >= _MOST_WORKERS:
        do = "make samples cheaper: smaller files, decoded or resized once beforehand, a faster disk"
    return Advice(
        Cause.LOADER,
        min(most, step - then) if then < step else most,
        f"rank {slowest} waits {milliseconds(waits[slowest])} of {milliseconds(step)} a step for its batch",
        do,
        f"without that wait a step would take {milliseconds(rest)}; {workers} loaders need "
        f"{milliseconds(loading / workers)} for a batch",
    )


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
    seconds = saved(found, lambda rank, phases: part * computing_seconds(phases) if counts[rank] == most else 0.0)
    return Advice(
        Cause.UNEVEN,
        seconds,
        f"ranks compute {', '.join(f'{count:g}' for count in counts)} shards of a step",
        f"a number of processes that divides the {found.around.shards} shards",
        f"the rank with most shards computes {part:.0%} more than its part",
    )


def synchronisation(found: Measured) -> Advice | None:
    """Code of the user's own communicates in every step."""
    sites: Counter[tuple[str, str]] = Counter()
    steps = [step for steps in found.ranks for step in steps]
    with_some = 0
    for step in steps:
        own = [each for each in step.meetings if each.site is not None]
        with_some += bool(own)
        sites.update((each.what, each.site or "") for each in own)
    if with_some < len(steps) / 2:
        return None
    what, site = max(sites, key=lambda each: sites[each])
    seconds = found.in_users_collectives - _for_a_slow_rank(found, within=True)
    more = f" and {len(sites) - 1} more places" if len(sites) > 1 else ""
    a_step = sum(sites.values()) / len(steps)
    return Advice(
        Cause.SYNCHRONISATION,
        seconds,
        f"{site} asks for {what}{more}: {a_step:g} collectives a step, in which a rank is "
        f"{milliseconds(found.in_users_collectives)} of {milliseconds(found.step_seconds)}",
        "add up on each rank, and communicate once in many steps, or once an epoch; the loss of a step is in "
        "engine.step's result already, summed over ranks",
        "the time in these collectives, without what is waited for a slow rank; what ranks wait for each other there "
        "they may wait for later instead",
    )


def tiny_buckets(found: Measured) -> Advice | None:
    """Gradients travel in many more messages than they would have to."""
    if found.around.strategy != "ddp" or found.size == 1:
        return None
    beside = [
        sum(1 for each in step.meetings if each.is_beside and each.site is None)
        for steps in found.ranks
        for step in steps
    ]
    messages, usual = median(beside) - 1, found.costs.messages  # one is the step's small message
    if messages < _MANY * usual or not found.costs.gradient_bytes:
        return None
    exposed = found.exposed - _for_a_slow_rank(found, within=False)
    size = found.costs.gradient_bytes / messages / 1024
    asked = "" if found.around.bucket_mb is None else f", strategy.bucket_mb is {found.around.bucket_mb:g}"
    return Advice(
        Cause.BUCKETS,
        exposed - found.costs.gradients,
        f"gradients travel in {messages:,.0f} messages of {size:,.1f} KiB on average{asked}; ranks cannot go on for "
        f"{milliseconds(exposed)} a step until all are there",
        f"leave strategy.bucket_mb out: torch's own buckets make {usual} message{'s' if usual > 1 else ''} of them",
        f"all gradients in {usual} took {milliseconds(found.costs.gradients)} on these ranks",
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


def host_bound(found: Measured) -> Advice | None:
    """Many operators with little to compute: what calls them takes the time."""
    if not found.traced or not found.around.is_apart:
        return None
    around, step = found.around, found.step_seconds
    traced = list(found.traced.values())
    computing = mean(computing_seconds(phases) for phases in found.phases)
    optimizing = mean(phases["optimizer"] for phases in found.phases)
    busy = [each.busy_seconds for each in traced if each.busy_seconds is not None]
    if around.device == "cuda" and busy:
        host = max(0.0, computing + optimizing - mean(busy))
        evidence = f"in a step the GPU computes {milliseconds(mean(busy))} of {milliseconds(step)}"
    else:
        # Of a core's time, not of the clock's: what else runs on the machine makes no model host-bound.
        working = min(each.working_seconds for each in traced)
        part = max(0.0, 1 - working / max(found.cpu_seconds, 1e-9))
        host = part * (computing + optimizing)
        evidence = (
            f"{mean(each.small for each in traced):,.0f} of {mean(each.count for each in traced):,.0f} operators of a "
            f"step take less than 20 µs; of {milliseconds(found.cpu_seconds)} that a core spends on forward, backward "
            f"and optimizer, longer ones take {milliseconds(working)}"
        )
    if host < _HOST_SHARE * step:
        return None
    shards = around.shards / max(1, found.size)
    within = host * computing / max(computing + optimizing, 1e-9)
    if shards > 1:
        seconds = within * (1 - 1 / shards)
        do = (
            f"fewer, larger shards: shards={found.size} for {found.size} rank{'s' if found.size > 1 else ''} "
            "(a key of the recipe: batch-norm groups and dropout change with it, and so do results)"
        )
        estimate = f"a rank computes {shards:g} shards a step, one after another; with one it calls so many times fewer"
    else:
        seconds, do = host, "a larger batch_size a shard (a key of the recipe: results change)"
        estimate = "the cost of calling operators stays the same for more samples, which is then spread over more work"
    do += "" if around.is_compiled else ", or step.compile=true, which calls fewer operators"
    do += f", or fewer threads than {around.threads}" if around.threads > 1 and around.device == "cpu" else ""
    return Advice(Cause.HOST, seconds, evidence, do, estimate)


def communication(found: Measured) -> Advice | None:
    """What ranks send takes long, in messages that are as they should be."""
    around = found.around
    if found.size == 1 or not found.waiting.steps or tiny_buckets(found) is not None:
        return None
    exposed = found.exposed - mean(found.waiting.own)  # what is waited for a later rank is not the way's fault
    stopped = f"ranks cannot go on for {milliseconds(exposed)} a step while"
    if around.joins_norms:
        return Advice(
            Cause.COMMUNICATION,
            exposed,
            f"{stopped} batch norm asks all of them for the statistics of each layer",
            "step.batch_norm=shard (a key of the recipe: results change), or fewer processes",
            "without these messages, at best",
        )
    if not around.is_known_inside:
        return Advice(
            Cause.COMMUNICATION,
            exposed,
            f"{stopped} the parts of the model are gathered and summed",
            "fewer, larger shards (parameters are gathered for each; results change with shards), --strategy ddp where "
            "a device holds the whole model, or fewer processes",
            "without these messages, at best",
        )
    if around.strategy != "ddp" or around.hook != "none":
        return None
    exposed = min(exposed, found.costs.gradients)
    return Advice(
        Cause.COMMUNICATION,
        exposed / 2,
        f"{stopped} {found.costs.gradient_bytes / 2**20:,.1f} MiB of gradients travel",
        "strategy.hook=bf16, which sends half the bytes (rounded), step.reduction=fast, or a larger batch_size",
        "half the bytes take half the time, at best",
    )


def _seconds_a_shard(found: Measured) -> list[list[float]] | None:
    """What a shard took each rank in each step; None where some rank has computed none."""
    if any(not step.shards for steps in found.ranks for step in steps):
        return None
    return [
        [computing_seconds(phases) / step.shards for phases, step in zip(of_rank, steps, strict=True)]
        for of_rank, steps in zip(found.by_step, found.ranks, strict=True)
    ]


def _for_a_slow_rank(found: Measured, *, within: bool) -> float:
    """What ranks wait for one that is always late, a step; in the user's collectives, or elsewhere."""
    late = straggler(found)
    if late is None:
        return 0.0
    in_users = found.waiting.within[late.rank]
    part = in_users if within else found.waiting.seconds[late.rank] - in_users
    return part * (found.size - 1) / found.size


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
    communication,
)
