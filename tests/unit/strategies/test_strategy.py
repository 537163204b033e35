"""Time of a rank's own computation in a step."""

import time

import torch

from samestep.strategies.strategy import ComputeClock

PAUSE = 0.02


def test_waits_after_the_last_gradient_do_not_count() -> None:
    clock = ComputeClock(torch.device("cpu"))
    clock.is_enabled = True
    for _ in range(2):
        clock.begin()
        time.sleep(PAUSE)
        clock.begin()  # of a second microbatch
        clock.lap()
        time.sleep(PAUSE)
        clock.lap()
        computed = time.perf_counter()
        time.sleep(5 * PAUSE)
        clock.finish()
        assert clock.seconds is not None
        assert 2 * PAUSE <= clock.seconds < time.perf_counter() - computed + 2 * PAUSE


def test_steps_are_not_timed_by_default_and_without_gradients() -> None:
    clock = ComputeClock(torch.device("cpu"))
    clock.begin()
    clock.lap()
    assert clock.seconds is None
    clock.is_enabled = True
    clock.begin()
    assert clock.seconds is None
