"""Tests of the advice for steps that lose time in one way, and of the estimated savings."""

from dataclasses import replace

import pytest

from helpers.profile_steps import BUSY, CONDITIONS, all_reduce, make_step, measured
from samestep.tools.profile.causes import (
    Cause,
    advise,
    checkpoint_stall,
    host_bound,
    slow_loader,
    straggler_of,
    tiny_buckets,
)
from samestep.tools.profile.measurements import Collective, Lateness, Measurements, Step


def sound(forward: float = 0.05, **parts: float) -> Step:
    """Return a step of 100 ms, with changed durations of some phases in seconds."""
    return make_step(
        ("data", parts.get("data", 0.001)),
        ("forward", forward),
        ("backward", 0.04),
        ("communication", parts.get("communication", 0.004)),
        ("optimizer", 0.005),
        ("checkpoint", parts.get("checkpoint", 0.0)),
    )


def test_sound_step_gets_no_advice() -> None:
    assert advise(measured([sound()] * 4, [sound()] * 4)) == []
    assert advise(measured([sound()] * 4)) == []


def test_wait_of_half_a_step_for_data_is_saved_by_enough_workers() -> None:
    [advice] = advise(measured([sound(data=0.11)] * 4, [sound(communication=0.113)] * 4, batch=0.11))
    assert advice.cause == Cause.LOADER
    assert advice.seconds == pytest.approx(0.1, abs=0.01)
    assert "rank 0 waits" in advice.evidence
    assert "--workers 2 (now 0)" in advice.do


@pytest.mark.parametrize(
    ("workers", "batch", "remedy", "improved"),
    [
        (0, 4.0, "--workers 8 (now 0)", 0.5),  # more than the maximum would be necessary
        (2, 0.3, "--workers 4 (now 2)", 0.099),
        (4, 0.3, "make samples cheaper", 0.099),
        (1, 0.01, "--workers 0 (now 1)", 0.109),  # the process costs more than the batch
    ],
)
def test_number_of_workers_follows_from_the_cost_of_a_batch(
    workers: int, batch: float, remedy: str, improved: float
) -> None:
    wait = batch if workers == 0 else 0.2
    advice = slow_loader(measured([sound(data=wait)] * 4, batch=batch, workers=workers))
    assert advice is not None
    assert advice.do.startswith(remedy)
    assert advice.seconds == pytest.approx(0.099 + wait - improved, abs=0.002)


def test_rank_with_the_slowest_microbatches_in_every_step_is_named() -> None:
    advice = advise(measured([sound()] * 4, [sound(forward=0.15)] * 4, [sound()] * 4))[0]
    assert advice.cause == Cause.RANK
    assert advice.seconds == pytest.approx(0.1)
    assert "rank 1" in advice.do


def test_last_batch_without_microbatches_on_a_rank_does_not_hide_a_slow_rank() -> None:
    rest = replace(sound(), microbatches=0)
    assert advise(measured([*[sound()] * 4, rest], [sound(forward=0.15)] * 5))[0].cause == Cause.RANK


def test_rank_that_is_slow_once_is_not_named() -> None:
    assert advise(measured([sound()] * 4, [sound(forward=0.5), *[sound()] * 3])) == []


def test_rank_with_more_microbatches_is_not_slow() -> None:
    more = [replace(sound(forward=0.095), microbatches=3)] * 4
    fewer = [replace(sound(forward=0.05), microbatches=2)] * 4
    [advice] = advise(measured(more, fewer, microbatches=5))
    assert advice.cause == Cause.UNEVEN
    assert "3, 2 microbatches" in advice.evidence


def test_collectives_of_user_code_are_reported_with_their_line() -> None:
    name = "all_reduce (sum) of 1 float32"
    logged = tuple(Collective(name, "losses.py:7", False, 0.01 * n, 0.01 * n + 0.009) for n in (1, 2, 3))
    steps = [make_step(("forward", 0.05), ("backward", 0.04), collectives=logged)] * 4
    [advice] = advise(measured(steps, steps))
    assert advice.cause == Cause.SYNCHRONISATION
    assert advice.seconds == pytest.approx(0.027)
    assert advice.evidence.startswith(f"losses.py:7 calls {name}: 3 collectives per step")


def test_many_messages_are_compared_with_one() -> None:
    many = tuple(all_reduce(0.1 + 0.001 * n, 0.101 + 0.001 * n) for n in range(50))
    phases = ("forward", 0.05), ("backward", 0.05), ("communication", 0.05)
    steps = [make_step(*phases, collectives=many)] * 4
    advice = tiny_buckets(measured(steps, steps, bucket_mb=0.01))
    assert advice is not None
    assert advice.seconds == pytest.approx(0.05 - 0.001)
    assert "49 messages" in advice.evidence
    assert "strategy.bucket_mb is 0.01" in advice.evidence
    few = [make_step(*phases, collectives=many[:3])] * 4
    assert tiny_buckets(measured(few, few)) is None


def test_checkpoint_interval_makes_checkpoints_cheap() -> None:
    stalls = measured([sound(checkpoint=0.3)] * 4, [sound()] * 4, checkpoint_every=1, save_seconds=0.5)
    advice = checkpoint_stall(stalls)
    assert advice is not None
    assert advice.seconds == pytest.approx(0.3, rel=0.05)
    assert "--checkpoint-every 200" in advice.do
    assert advise(stalls)[0].cause == Cause.CHECKPOINT


def test_stall_after_the_last_collective_is_no_longer_than_the_steps() -> None:
    """Other ranks wait for a stall in their next step, so the last stall is in the steps of one rank only."""
    stalled = make_step(("forward", 0.001), ("checkpoint", 1.0))
    waits = [make_step(("forward", 0.001)), *[make_step(("communication", 1.0), ("forward", 0.001))] * 3]
    result = measured([stalled] * 4, waits, checkpoint_every=1, save_seconds=1.0)
    [advice] = advise(result)
    assert advice.cause == Cause.CHECKPOINT
    assert advice.seconds > result.step_seconds
    assert 0.9 < advice.share(result) < 1


def test_processor_time_outside_of_large_operators_is_host_bound() -> None:
    result = measured([sound()] * 4, [sound()] * 4)
    assert host_bound(result) is None
    tiny = replace(BUSY, small=900, count=910, working_seconds=0.0095)
    advice = host_bound(replace(result, traced={0: tiny}))
    assert advice is not None
    assert advice.seconds == pytest.approx(0.9 * 0.09 / 2, rel=0.01)  # one microbatch per rank instead of two
    assert "microbatches=2" in advice.do


def test_at_most_three_causes_the_largest_saving_first() -> None:
    logged = (Collective("barrier", "losses.py:7", False, 0.2, 0.3),)
    one = replace(sound(data=0.1, checkpoint=0.4), collectives=logged)
    late = replace(sound(data=0.1, forward=0.25, checkpoint=0.4), collectives=logged)
    result = advise(measured([one] * 4, [late] * 4, checkpoint_every=1))
    assert len(result) == 3
    assert result[0].cause == Cause.CHECKPOINT
    assert [advice.seconds for advice in result] == sorted((advice.seconds for advice in result), reverse=True)


def test_idle_gpu_is_caused_by_the_host_or_by_synchronization() -> None:
    """Synthetic numbers."""
    steps = [sound()] * 4
    idle = replace(BUSY, busy_seconds=0.02, synchronisations=2)  # one of the engine
    conditions = replace(CONDITIONS, device="cuda", microbatches=2)
    costs = measured(steps).costs
    [advice] = advise(Measurements([steps], {0: idle}, costs, conditions))
    assert advice.cause == Cause.HOST
    assert "step.cuda_graphs=auto" in advice.do
    assert advice.seconds == pytest.approx((0.095 - 0.02) * 0.09 / 0.095 / 2, rel=0.01)
    [advice] = advise(Measurements([steps], {0: replace(idle, synchronisations=3)}, costs, conditions))
    assert advice.cause == Cause.SYNCHRONISATION
    assert advice.seconds == pytest.approx(0.095 - 0.02, rel=0.01)
    busy = replace(idle, busy_seconds=0.094, synchronisations=40)
    assert advise(Measurements([steps], {0: busy}, costs, conditions)) == []


def reducing_step(begin: float, forward: float, end: float) -> Step:
    """Return a step of a forward and an all-reduce that ends when the last rank has arrived."""
    arrival = begin + forward
    phases = ("forward", forward), ("communication", end - arrival)
    return make_step(*phases, begin=begin, collectives=(all_reduce(arrival, end),))


def test_others_wait_for_the_last_rank() -> None:
    ranks = [[reducing_step(begin, 2 if rank == 1 else 1, begin + 2.25) for begin in (0, 10, 20)] for rank in range(3)]
    lateness = Lateness.of(ranks)
    assert (lateness.steps, lateness.apart, lateness.last) == (3, 3, [0, 3, 0])
    assert lateness.caused == pytest.approx([0, 1, 0])
    assert lateness.waited == pytest.approx([1, 0, 1])
    late = straggler_of(measured(*ranks))
    assert late is not None
    assert (late.rank, late.phase, late.last, late.apart) == (1, "forward", 3, 3)
    assert (late.seconds, late.more) == (pytest.approx(1), pytest.approx(1))


def test_ranks_that_are_late_in_turn_are_not_stragglers() -> None:
    ranks = [
        [reducing_step(begin, 2 if begin / 10 % 2 == rank else 1, begin + 2.25) for begin in (0, 10)] for rank in (0, 1)
    ]
    assert Lateness.of(ranks).last == [1, 1]
    assert straggler_of(measured(*ranks)) is None


def test_wait_during_backward_costs_nothing() -> None:
    first = make_step(("backward", 3), ("communication", 0.1), collectives=(all_reduce(1, 3.1),))
    second = make_step(("backward", 3), ("communication", 0.1), collectives=(all_reduce(3, 3.1),))
    lateness = Lateness.of([[first], [second]])
    assert lateness.last == [0, 1]
    assert lateness.caused == [0, 0]


def test_ranks_with_different_collectives_are_not_compared() -> None:
    other = make_step(("forward", 1), collectives=(Collective("a broadcast", None, True, 0, 1),))
    ranks = [reducing_step(0, 1, 2)], [other]
    assert Lateness.of(ranks).steps == 0
    assert straggler_of(measured(*ranks)) is None
