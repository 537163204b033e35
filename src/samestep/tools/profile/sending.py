"""Time that is lost because of what ranks send to each other."""

from __future__ import annotations

from collections import Counter
from statistics import mean, median

from samestep.tools.profile.advice import Advice, Cause, milliseconds
from samestep.tools.profile.measured import Measured
from samestep.tools.profile.straggler import straggler

# More messages than torch's own buckets would be, by this factor, are many.
_MANY = 4


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


def _for_a_slow_rank(found: Measured, *, within: bool) -> float:
    """What ranks wait for one that is always late, a step; in the user's collectives, or elsewhere."""
    late = straggler(found)
    if late is None:
        return 0.0
    in_users = found.waiting.within[late.rank]
    part = in_users if within else found.waiting.seconds[late.rank] - in_users
    return part * (found.size - 1) / found.size
