"""What is told of steps that lose time in one way, and how much it would save."""

from dataclasses import replace

import pytest

from profile_steps import AROUND, BUSY, measured, step, summed
from samestep.tools.profile.advice import Cause
from samestep.tools.profile.calling import host_bound
from samestep.tools.profile.causes import advise, checkpoint_stall, slow_loader
from samestep.tools.profile.measured import Measured
from samestep.tools.profile.sending import tiny_buckets
from samestep.tools.profile.steps import Meeting, Step


def sound(forward: float = 0.05, **parts: float) -> Step:
    """A step of 100 ms that computes, and what `parts` add to it in seconds."""
    return step(
        ("data", parts.get("data", 0.001)),
        ("forward", forward),
        ("backward", 0.04),
        ("communication", parts.get("communication", 0.004)),
        ("optimizer", 0.005),
        ("checkpoint", parts.get("checkpoint", 0.0)),
    )


def test_nothing_is_told_of_a_sound_step() -> None:
    assert advise(measured([sound()] * 4, [sound()] * 4)) == []
    assert advise(measured([sound()] * 4)) == []


def test_a_loader_of_which_half_a_step_waits_saves_half_with_enough_workers() -> None:
    found = measured([sound(data=0.11)] * 4, [sound(communication=0.113)] * 4, batch=0.11)
    [told] = advise(found)
    assert told.cause == Cause.LOADER
    assert told.seconds == pytest.approx(0.1, abs=0.01)
    assert "rank 0 waits" in told.evidence
    assert "--workers 2 (now 0)" in told.do


@pytest.mark.parametrize(
    ("now", "batch", "do", "then"),
    [
        (0, 4.0, "--workers 8 (now 0)", 0.5),  # more would be needed than anybody has
        (2, 0.3, "--workers 4 (now 2)", 0.099),
        (4, 0.3, "make samples cheaper", 0.099),
        (1, 0.01, "--workers 0 (now 1)", 0.109),  # the process costs more than the batch
    ],
)
def test_loaders_are_as_many_as_a_batch_takes(now: int, batch: float, do: str, then: float) -> None:
    told = slow_loader(measured([sound(data=batch if now == 0 else 0.2)] * 4, batch=batch, workers=now))
    assert told is not None
    assert told.do.startswith(do)
    step = 0.099 + (batch if now == 0 else 0.2)
    assert told.seconds == pytest.approx(step - then, abs=0.002)


def test_a_rank_whose_shards_take_longest_each_time_is_named() -> None:
    found = measured([sound()] * 4, [sound(forward=0.15)] * 4, [sound()] * 4)
    told = advise(found)[0]
    assert told.cause == Cause.RANK
    assert told.seconds == pytest.approx(0.1)
    assert "rank 1" in told.do


def test_a_last_batch_that_leaves_a_rank_without_shards_hides_no_slow_rank() -> None:
    rest = replace(sound(), shards=0)
    found = measured([*[sound()] * 4, rest], [sound(forward=0.15)] * 5)
    assert advise(found)[0].cause == Cause.RANK


def test_a_rank_that_takes_longest_once_is_not() -> None:
    found = measured([sound()] * 4, [sound(forward=0.5), *[sound()] * 3])
    assert advise(found) == []


def test_a_rank_with_more_shards_is_not_slow() -> None:
    more = [replace(sound(forward=0.095), shards=3)] * 4
    less = [replace(sound(forward=0.05), shards=2)] * 4
    [told] = advise(measured(more, less, shards=5))
    assert told.cause == Cause.UNEVEN
    assert "3, 2 shards" in told.evidence


def test_collectives_of_the_users_own_are_told_with_their_line() -> None:
    logged = tuple(
        Meeting("all_reduce (sum) of 1 float32", "losses.py:7", False, 0.01 * n, 0.01 * n + 0.009) for n in (1, 2, 3)
    )
    found = measured(*[[step(("forward", 0.05), ("backward", 0.04), meetings=logged)] * 4] * 2)
    [told] = advise(found)
    assert told.cause == Cause.SYNCHRONISATION
    assert told.seconds == pytest.approx(0.027)
    assert told.evidence.startswith("losses.py:7 asks for all_reduce (sum) of 1 float32: 3 collectives a step")


def test_many_messages_are_told_by_what_one_would_take() -> None:
    many = tuple(summed(0.1 + 0.001 * n, 0.101 + 0.001 * n) for n in range(50))
    one = step(("forward", 0.05), ("backward", 0.05), ("communication", 0.05), meetings=many)
    found = measured(*[[one] * 4] * 2, bucket_mb=0.01)
    told = tiny_buckets(found)
    assert told is not None
    assert told.seconds == pytest.approx(0.05 - 0.001)
    assert "49 messages" in told.evidence
    assert "strategy.bucket_mb is 0.01" in told.evidence
    few = step(("forward", 0.05), ("backward", 0.05), ("communication", 0.05), meetings=many[:3])
    assert tiny_buckets(measured(*[[few] * 4] * 2)) is None


def test_checkpoints_are_to_be_as_seldom_as_they_cost_next_to_nothing() -> None:
    found = measured([sound(checkpoint=0.3)] * 4, [sound()] * 4, checkpoint_every=1, save_seconds=0.5)
    told = checkpoint_stall(found)
    assert told is not None
    assert told.seconds == pytest.approx(0.3, rel=0.05)
    assert "--checkpoint-every 200" in told.do
    assert advise(found)[0].cause == Cause.CHECKPOINT


def test_a_core_that_computes_little_of_what_it_is_given_is_the_bottleneck() -> None:
    found = measured([sound()] * 4, [sound()] * 4)
    assert host_bound(found) is None
    tiny = replace(BUSY, small=900, count=910, working_seconds=0.0095)
    told = host_bound(Measured(found.ranks, {0: tiny}, found.costs, found.around))
    assert told is not None
    assert told.seconds == pytest.approx(0.9 * 0.09 / 2, rel=0.01)  # two shards a rank become one
    assert "shards=2" in told.do


def test_at_most_three_are_told_the_greatest_first() -> None:
    logged = (Meeting("barrier", "losses.py:7", False, 0.2, 0.3),)
    one = replace(sound(data=0.1, checkpoint=0.4), meetings=logged)
    late = replace(sound(data=0.1, forward=0.25, checkpoint=0.4), meetings=logged)
    told = advise(measured([one] * 4, [late] * 4, checkpoint_every=1))
    assert len(told) == 3
    assert told[0].cause == Cause.CHECKPOINT
    assert [each.seconds for each in told] == sorted((each.seconds for each in told), reverse=True)


def test_a_gpu_that_idles_is_the_hosts_fault_or_that_of_who_makes_the_host_wait() -> None:
    """Read from numbers; not run on hardware yet."""
    steps = [sound()] * 4
    idle = replace(BUSY, busy_seconds=0.02, synchronisations=4)
    around = replace(AROUND, device="cuda", shards=2)
    costs = measured(steps).costs
    [told] = advise(Measured([steps], {0: idle}, costs, around))
    assert told.cause == Cause.HOST
    assert told.seconds == pytest.approx((0.095 - 0.02) * 0.09 / 0.095 / 2, rel=0.01)
    [told] = advise(Measured([steps], {0: replace(idle, synchronisations=40)}, costs, around))
    assert told.cause == Cause.SYNCHRONISATION
    assert told.seconds == pytest.approx(0.095 - 0.02, rel=0.01)
    busy = replace(idle, busy_seconds=0.094, synchronisations=40)
    assert advise(Measured([steps], {0: busy}, costs, around)) == []
