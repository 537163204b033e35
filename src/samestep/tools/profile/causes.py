"""Causes of lost time in a step, each with an upper bound of the possible saving."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from math import ceil
from statistics import mean, median

from samestep.tools.profile.measurements import Measurements, Phase, PhaseSeconds, computing_seconds
from samestep.units import format_bytes, plural
from samestep.units import format_milliseconds as ms

_LEAST_SAVING = 0.1  # of a step; smaller savings are not reported
_MAX_ADVICE = 3
_SLOW_RANK_SHARE = 0.7  # share of steps in which a slow rank has the slowest microbatches
_MAX_WORKERS = 8
_CHECKPOINT_SHARE = 0.02  # acceptable share of checkpoints in the time of a step
_MANY_MESSAGES = 4  # times as many messages as torch's buckets
_HOST_SHARE = 0.4  # least share of a step for the advice about the host
# A straggler causes at least this share of a step, and of all waits, ...
_SHARE_OF_STEP, _SHARE_OF_WAITS = 0.05, 0.6
# ... and its longest phase explains at least this share of the waits for it.
_EXPLAINED_SHARE = 0.3


class Cause(StrEnum):
    """Cause of lost time."""

    LOADER = "slow loader"
    RANK = "slow rank"
    SYNCHRONISATION = "synchronisation every step"
    BUCKETS = "tiny buckets"
    CHECKPOINT = "checkpoint stall"
    HOST = "host-bound"
    UNEVEN = "uneven microbatches"
    COMMUNICATION = "communication"


@dataclass(frozen=True)
class Advice:
    """One cause with the measured evidence, a recommended change, and an upper bound of the saving per step."""

    cause: Cause
    seconds: float
    evidence: str
    do: str
    estimate: str

    def share(self, measured: Measurements) -> float:
        """Return the saving as a part of the slowest rank's step."""
        return self.seconds / measured.slowest_seconds


def advise(measured: Measurements) -> list[Advice]:
    """Return at most three remedies, the largest saving first; empty if no cause stands out."""
    candidates = [advice for check in _CHECKS if (advice := check(measured)) is not None]
    worthwhile = [advice for advice in candidates if advice.share(measured) >= _LEAST_SAVING]
    return sorted(worthwhile, key=lambda advice: -advice.seconds)[:_MAX_ADVICE]


# --- loading, ranks, checkpoints ---


def slow_loader(measured: Measurements) -> Advice | None:
    """Check for ranks that wait for data."""
    wait = measured.saving(lambda _, phases: phases["data"])
    if not wait:
        return None
    waits, step = [phases["data"] for phases in measured.phases], measured.step_seconds
    loading, rest = measured.costs.batch, max(step - wait, 1e-6)
    workers, remedy = _loader_workers(measured, wait, rest)
    improved = rest + loading if workers == 0 else max(rest, loading / workers)
    estimate = f"without this wait a step would take {ms(rest)}"
    if improved < step:
        wait = step - improved
        estimate += f"; with --workers {workers}: {ms(improved)}"
    return Advice(
        Cause.LOADER,
        wait,
        f"rank {waits.index(max(waits))} waits {ms(max(waits))} of {ms(step)} per step for its batch; loading one "
        f"takes {ms(loading)}",
        remedy,
        estimate,
    )


def _loader_workers(measured: Measurements, wait: float, rest: float) -> tuple[int, str]:
    """Return the recommended number of loader processes and the advice; `wait` and `rest` are parts of a step."""
    current, cores, loading = measured.conditions.workers, measured.conditions.cores, measured.costs.batch
    machine = f"this machine has {plural(cores, 'core')} for {plural(measured.size, 'rank')}"
    if current and loading < wait / 2:
        return 0, f"--workers 0 (now {current}): loading a batch is faster than receiving it from another process"
    enough = min(_MAX_WORKERS, ceil(loading / rest))
    if enough <= current:
        return current, (
            "make samples cheaper (smaller files, decoded or resized in advance), or use a faster disk; more than "
            f"{plural(current, 'loader')} will not help: {machine}"
        )
    remedy = f"--workers {enough} (now {current}), to load in parallel to the step"
    if enough > max(1, cores // measured.size - 1):
        remedy += f"; {machine}, so this helps only if loading waits for disks or networks"
    return enough, remedy


def slow_rank(measured: Measurements) -> Advice | None:
    """Check for a rank that needs more time per microbatch than the others."""
    # Steps in which every rank has microbatches: the last batch of an epoch may be too small.
    steps = [same for same in zip(*measured.ranks, strict=True) if all(step.microbatches for step in same)]
    if measured.size == 1 or not steps:
        return None
    costs = [[computing_seconds(step.phases) / step.microbatches for step in same] for same in steps]
    typical = [median(column) for column in zip(*costs, strict=True)]
    rank = typical.index(max(typical))
    if sum(row.index(max(row)) == rank for row in costs) < _SLOW_RANK_SHARE * len(costs):
        return None
    others = median(typical[:rank] + typical[rank + 1 :])
    excess = (typical[rank] - others) * mean(step.microbatches for step in measured.ranks[rank])
    late = straggler_of(measured)
    phase = f", mostly in {late.phase}" if late is not None and late.rank == rank else ""
    return Advice(
        Cause.RANK,
        measured.saving(lambda other, phases: min(excess, computing_seconds(phases)) if other == rank else 0.0),
        f"a microbatch takes {ms(typical[rank])} on rank {rank} and {ms(others)} on the others{phase}",
        f"check the device of rank {rank} and other programs on it (samestep doctor), and code that does more on rank "
        f"{rank}",
        f"at the speed of the others, rank {rank} would finish {ms(excess)} earlier per step",
    )


def uneven_microbatches(measured: Measurements) -> Advice | None:
    """Check for ranks with more microbatches than others."""
    counts = [mean(step.microbatches for step in steps) for steps in measured.ranks]
    most, average = max(counts), mean(counts)
    if most - min(counts) < 0.5:
        return None
    share = 1 - average / most

    def reduction(rank: int, phases: PhaseSeconds) -> float:
        loading = phases["data"] if measured.conditions.workers == 0 else 0.0
        return share * (computing_seconds(phases) + loading) if counts[rank] == most else 0.0

    return Advice(
        Cause.UNEVEN,
        measured.saving(reduction),
        f"ranks compute {', '.join(f'{count:g}' for count in counts)} microbatches of a step",
        f"a number of processes that divides the {measured.conditions.microbatches} microbatches",
        f"other ranks would take over {share:.0%} of the work of the rank with the most microbatches",
    )


def checkpoint_stall(measured: Measurements) -> Advice | None:
    """Check for training that waits for the copy of a checkpoint, or for the previous checkpoint."""
    every = measured.conditions.checkpoint_every
    seconds = measured.saving(lambda _, phases: phases["checkpoint"])
    if every is None or not seconds:
        return None
    stall = max(phases["checkpoint"] for phases in measured.phases) * every
    rest = max(measured.step_seconds - seconds, 1e-6)
    written = measured.conditions.save_seconds or stall
    interval = max(every + 1, ceil(stall / (_CHECKPOINT_SHARE * rest)), ceil(written / rest))
    power = 10 ** (len(str(interval)) - 1)
    rounded = next(digit * power for digit in (1, 2, 5, 10) if digit * power >= interval)
    return Advice(
        Cause.CHECKPOINT,
        seconds * (1 - every / interval),
        f"training stops for {ms(stall)} every {plural(every, 'step')}; a checkpoint is on disk after {ms(written)}",
        f"--checkpoint-every {rounded}, or --max-lost-work 5m: training waits only for the copy of the state if the "
        "previous checkpoint is written by then",
        f"without checkpoints a step would take {ms(rest)}",
    )


# --- communication ---


def synchronisation(measured: Measurements) -> Advice | None:
    """Check for collectives of user code in every step."""
    sites = Counter((c.name, c.site) for step in measured.steps for c in step.collectives if c.site is not None)
    steps = len(measured.steps)
    if sum(any(c.site is not None for c in step.collectives) for step in measured.steps) < steps / 2:
        return None
    [((name, site), _)] = sites.most_common(1)
    more = f" and {plural(len(sites) - 1, 'other line')}" if len(sites) > 1 else ""
    inside = measured.in_user_collectives
    return Advice(
        Cause.SYNCHRONISATION,
        inside - _wait_for_straggler(measured, in_user_code=True),
        f"{site} calls {name}{more}: {sites.total() / steps:g} collectives per step, {ms(inside)} of "
        f"{ms(measured.step_seconds)}",
        "accumulate on each rank, and communicate once in many steps or once per epoch; engine.step returns the loss "
        "summed over ranks",
        "time in these collectives, without waits for a slow rank; other waits may move to later collectives",
    )


def tiny_buckets(measured: Measurements) -> Advice | None:
    """Check for gradients in many more messages than necessary."""
    costs, bucket_mb = measured.costs, measured.conditions.bucket_mb
    if measured.conditions.strategy != "ddp" or measured.size == 1:
        return None
    in_background = [sum(c.is_background and c.site is None for c in step.collectives) for step in measured.steps]
    messages = median(in_background) - 1  # without the message of the step's statistics
    if messages < _MANY_MESSAGES * costs.messages or not costs.gradient_bytes:
        return None
    exposed = measured.exposed - _wait_for_straggler(measured, in_user_code=False)
    setting = "" if bucket_mb is None else f", strategy.bucket_mb is {bucket_mb:g}"
    return Advice(
        Cause.BUCKETS,
        exposed - costs.gradients,
        f"gradients are sent in {messages:,.0f} messages of {format_bytes(costs.gradient_bytes / messages)} on "
        f"average{setting}; ranks wait {ms(exposed)} per step for them",
        f"leave strategy.bucket_mb out: torch's default needs {plural(costs.messages, 'message')}",
        f"all gradients in {plural(costs.messages, 'message')} took {ms(costs.gradients)} on these ranks",
    )


def communication(measured: Measurements) -> Advice | None:
    """Check for slow communication in messages of a good size."""
    conditions, costs = measured.conditions, measured.costs
    if measured.size == 1 or not measured.lateness.steps or tiny_buckets(measured) is not None:
        return None
    exposed = seconds = measured.exposed - mean(measured.lateness.waited)  # waits for later ranks have other causes
    estimate = "without these messages, at best"
    if conditions.joins_norms:
        content = "the exchange of the statistics of each batch norm layer"
        remedy = "step.batch_norm=microbatch (a key of the recipe: results change), or fewer processes"
    elif not conditions.is_known_inside:
        content = "gathered parameters and reduced gradients of the divided model"
        remedy = (
            "fewer, larger microbatches (parameters are gathered for each; results change with microbatches), "
            "--strategy ddp if the model fits on a device, or fewer processes"
        )
    elif conditions.strategy == "ddp" and conditions.hook == "none":
        seconds = min(exposed, costs.gradients) / 2
        content = f"{format_bytes(costs.gradient_bytes)} of gradients"
        remedy = (
            "strategy.hook=bf16, which sends half of the bytes (rounded), step.reduction=fast, or a larger batch_size"
        )
        estimate = "half of the bytes take half of the time, at best"
    else:
        return None
    return Advice(Cause.COMMUNICATION, seconds, f"ranks wait {ms(exposed)} per step for {content}", remedy, estimate)


def _wait_for_straggler(measured: Measurements, *, in_user_code: bool) -> float:
    """Return the mean wait of a rank for the straggler, in collectives of user code or of the engine."""
    late, lateness = straggler_of(measured), measured.lateness
    if late is None:
        return 0.0
    inside = lateness.caused_in_user_code[late.rank]
    return (inside if in_user_code else late.seconds - inside) * (measured.size - 1) / measured.size


# --- host and GPU ---


def host_bound(measured: Measurements) -> Advice | None:
    """Check for many small operators, whose calls take more time than their computation.

    On a GPU, also for code that waits for the GPU in each microbatch, after which the GPU
    waits for the host.
    """
    conditions, summaries, step = measured.conditions, measured.traced.values(), measured.step_seconds
    idle = _idle_seconds(measured)
    if idle is not None and (count := _user_synchronisations(measured)):
        return Advice(
            Cause.SYNCHRONISATION,
            idle,
            f"the host waits for the GPU {count + conditions.engine_waits:.0f} times per step, {count:.0f} of them "
            f"not in the engine; the GPU is idle for {ms(idle)} of {ms(step)}",
            "remove .item(), .cpu(), print and if of tensors from model and loss; "
            "torch.cuda.set_sync_debug_mode('warn') lists their lines",
            "the GPU would never be idle, at best",
        )
    if not summaries or not conditions.is_apart:
        return None
    computing = mean(computing_seconds(phases) for phases in measured.phases)
    called = computing + mean(phases["optimizer"] for phases in measured.phases)
    if idle is not None:
        host, evidence = idle, f"the GPU is idle for {ms(idle)} of {ms(step)} per step"
    else:
        # A share of processor time, not of wall time: other programs on the machine must not count.
        phases = ("forward", "backward", "optimizer")
        cpu = min(sum(part.cpu for part in own.segments if part.phase in phases) for own in measured.steps)
        working = min(summary.working_seconds for summary in summaries)
        host = max(0.0, 1 - working / max(cpu, 1e-9)) * called
        small, count = mean(summary.small for summary in summaries), mean(summary.count for summary in summaries)
        evidence = (
            f"{small:,.0f} of {count:,.0f} operators per step take less than 20 µs; the others take {ms(working)} of "
            f"{ms(cpu)} processor time of forward, backward and optimizer"
        )
    if host < _HOST_SHARE * step:
        return None
    microbatches = conditions.microbatches / measured.size
    if microbatches > 1:
        host *= computing / max(called, 1e-9) * (1 - 1 / microbatches)
        remedy = (
            f"fewer, larger microbatches: microbatches={measured.size} for {plural(measured.size, 'rank')} (a key of "
            "the recipe: batch norm groups, dropout and therefore results change)"
        )
        estimate = f"one microbatch per rank and step instead of {microbatches:g} needs as many times fewer calls"
    else:
        remedy = "a larger batch_size per microbatch (a key of the recipe: results change)"
        estimate = "the cost of calls does not depend on the number of samples"
    if conditions.device != "cpu" and not conditions.has_graphs:
        remedy += ", or step.cuda_graphs=auto, which changes no result"
    remedy += "" if conditions.is_compiled else ", or step.compile=true, which needs fewer operators"
    if conditions.threads > 1 and conditions.device == "cpu":
        remedy += f", or fewer threads than {conditions.threads}"
    return Advice(Cause.HOST, host, evidence, remedy, estimate)


def _idle_seconds(measured: Measurements) -> float | None:
    """Return the idle time of a GPU in forward, backward and optimizer; None on a CPU."""
    busy = [summary.busy_seconds for summary in measured.traced.values() if summary.busy_seconds is not None]
    if measured.conditions.device == "cpu" or not busy:
        return None
    return max(0.0, mean(computing_seconds(phases) + phases["optimizer"] for phases in measured.phases) - mean(busy))


def _user_synchronisations(measured: Measurements) -> float:
    """Return the waits for the GPU per step outside of the engine; 0 if fewer than one per microbatch."""
    count = mean(summary.synchronisations for summary in measured.traced.values()) - measured.conditions.engine_waits
    return count if count >= max(1.0, mean(step.microbatches for step in measured.steps)) else 0.0


_CHECKS: tuple[Callable[[Measurements], Advice | None], ...] = (
    slow_loader,
    slow_rank,
    uneven_microbatches,
    synchronisation,
    tiny_buckets,
    checkpoint_stall,
    host_bound,
    communication,
)


@dataclass(frozen=True)
class Straggler:
    """Rank that arrives late again and again."""

    rank: int
    seconds: float  # wait of each other rank for this rank, per step
    last: int  # number of collectives at which this rank arrived last, of the `apart` collectives with uneven arrivals
    apart: int
    phase: Phase  # phase with the largest difference to the other ranks
    more: float  # that difference, in seconds per step


def straggler_of(measured: Measurements) -> Straggler | None:
    """Return the rank that the other ranks wait for; None if no rank stands out."""
    lateness = measured.lateness
    if measured.size == 1 or not lateness.steps:
        return None
    seconds = max(lateness.caused)
    rank = lateness.caused.index(seconds)
    others = [phases for other, phases in enumerate(measured.phases) if other != rank]
    excess = {
        phase: own - mean(phases[phase] for phases in others)
        for phase, own in measured.phases[rank].items()
        if phase != "communication"
    }
    phase = max(excess, key=lambda phase: excess[phase])
    least = max(_SHARE_OF_STEP * measured.step_seconds, _SHARE_OF_WAITS * sum(lateness.caused))
    if seconds < least or excess[phase] < _EXPLAINED_SHARE * seconds:
        return None
    return Straggler(rank, seconds, lateness.last[rank], lateness.apart, phase, excess[phase])
