"""Time that is lost because the host calls operators more slowly than a device computes them."""

from __future__ import annotations

from statistics import mean

from samestep.tools.profile.advice import Advice, Cause, milliseconds
from samestep.tools.profile.critical import computing_seconds
from samestep.tools.profile.measured import Measured

# Of a step: what the host takes without computing anything, above which it is what is waited for.
_HOST_SHARE = 0.4
# How often a step of the engine itself waits for its device: for its loss, its norm, and its data.
_OWN_WAITS = 6


def host_bound(found: Measured) -> Advice | None:
    """Many operators with little to compute: what calls them takes the time."""
    if not found.traced or not found.around.is_apart:
        return None
    around, step = found.around, found.step_seconds
    traced = list(found.traced.values())
    computing = mean(computing_seconds(phases) for phases in found.phases)
    optimizing = mean(phases["optimizer"] for phases in found.phases)
    idle = _idle_seconds(found)
    if idle is not None:
        if _extra_waits(found) > 0:
            return None  # the host is made to wait, and that is another advice
        host = idle
        evidence = f"in a step the GPU has nothing to do for {milliseconds(idle)} of {milliseconds(step)}"
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


def device_waits(found: Measured) -> Advice | None:
    """The host waits for its GPU within each shard, so that the GPU waits for the host afterwards.

    Not run on hardware yet.
    """
    idle = _idle_seconds(found)
    if idle is None or (extra := _extra_waits(found)) == 0:
        return None
    return Advice(
        Cause.SYNCHRONISATION,
        idle,
        f"the host waits for its GPU {extra + _OWN_WAITS:.0f} times a step, {extra:.0f} of them not for the engine; "
        f"the GPU has nothing to do for {milliseconds(idle)} of {milliseconds(found.step_seconds)}",
        "look for .item(), .cpu(), print and if of tensors in model and loss; "
        "torch.cuda.set_sync_debug_mode('warn') tells their lines",
        "the GPU would have something to do all the time, at best",
    )


def _idle_seconds(found: Measured) -> float | None:
    """How long a GPU has nothing to do in forward, backward and optimizer, a step; None where the host computes."""
    busy = [each.busy_seconds for each in found.traced.values() if each.busy_seconds is not None]
    if found.around.device != "cuda" or not busy:
        return None
    phases = found.phases
    return max(0.0, mean(computing_seconds(each) + each["optimizer"] for each in phases) - mean(busy))


def _extra_waits(found: Measured) -> float:
    """How often a step waits for its GPU besides what the engine does, if that is once a shard and more; else 0."""
    extra = mean(each.synchronisations for each in found.traced.values()) - _OWN_WAITS
    shards = mean(step.shards for steps in found.ranks for step in steps)
    return extra if extra >= max(1.0, shards) else 0.0
