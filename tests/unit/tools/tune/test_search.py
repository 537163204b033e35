"""Tests of the search on simulated machines: quality and cost of the result."""

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.tools.timing import Timing
from samestep.tools.tune.search import ALIKE, SMALL, SearchResult, search
from samestep.tools.tune.settings import PREFETCH, WORKERS, Setting, grid

GRID = grid(WORKERS, PREFETCH)
ROUNDS, STEPS, WARMUP, SECONDS = 5, 20, 2, 0.5
NONE = Setting(0)


@dataclass
class Machine:
    """Simulated machine.

    Attributes:
        compute: seconds of a step without loading.
        data: seconds to load a batch, divided among the workers.
        jitter: relative increase of the loading time with a short prefetch.
        steal: relative increase of `compute` per worker.
        noise: standard deviation of the logarithm of a trial's duration.
        drift: mean change of the logarithm per trial.
    """

    compute: float = 0.1
    data: float = 0.5
    jitter: float = 0.0
    steal: float = 0.0
    noise: float = 0.0
    drift: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        self.random, self.load, self.clock = random.Random(self.seed), 1.0, 0.0

    def step(self, setting: Setting) -> tuple[float, float]:
        """Return the seconds of a step, and of the wait for data in it."""
        if not setting.workers:
            return self.compute + self.data, self.data
        loaded = self.data / setting.workers * (1 + self.jitter / setting.workers / setting.prefetch)
        computed = self.compute * (1 + self.steal * setting.workers)
        return max(loaded, computed), max(0.0, loaded - computed)

    def trial(self, setting: Setting, steps: int | None = None) -> Timing:
        """Return a trial of about half a second, or of `steps` steps."""
        seconds, wait = self.step(setting)
        self.load *= self.random.lognormvariate(self.drift, self.noise / 2)
        measured = seconds * self.load * self.random.lognormvariate(0, self.noise)
        count = steps or max(2, min(STEPS, round(SECONDS / measured)))
        self.clock += (count + WARMUP) * measured + 0.2 + 0.1 * setting.workers
        return Timing(measured, wait / seconds, 64 / measured)

    def loss(self, setting: Setting | None) -> float:
        """Return how much slower a setting is than the best, without noise."""
        assert setting is not None
        return 1 - min(self.step(other)[0] for other in GRID) / self.step(setting)[0]

    def grid_seconds(self) -> float:
        """Return the time of a search over the full grid."""
        before = self.clock
        for setting in GRID * ROUNDS:
            self.trial(setting, STEPS)
        return self.clock - before


def search_on(machine: Machine, default: Setting = NONE) -> SearchResult:
    return search(machine.trial, GRID, default)


def make_machines(noise: float, count: int) -> list[Machine]:
    """Return machines with loading times from a thousandth to twenty times the computing time."""
    draw = random.Random(1)
    return [
        Machine(
            compute=(compute := draw.uniform(0.01, 0.3)),
            data=compute * 10 ** draw.uniform(-3, 1.3),
            jitter=draw.uniform(0, 0.5),
            steal=draw.choice([0.0, 0.01, 0.05]),
            noise=noise,
            seed=number,
        )
        for number in range(count)
    ]


@pytest.mark.parametrize(("noise", "enough"), [(0.0, 0.99), (0.03, 0.97), (0.1, 0.93)])
def test_result_is_within_5_percent_of_the_best_in_a_tenth_of_the_time_of_a_grid(noise: float, enough: float) -> None:
    machines = make_machines(noise, 200)
    is_near, is_short = [], []
    for machine in machines:
        result = search_on(machine)
        is_near.append(machine.loss(result.chosen) <= 0.05)
        spent = machine.clock
        is_short.append(spent <= machine.grid_seconds() / 10)
    assert sum(is_near) >= enough * len(machines)
    assert sum(is_short) >= 0.95 * len(machines)


@given(
    st.builds(
        Machine,
        compute=st.floats(0.01, 1),
        data=st.floats(0.001, 10),
        jitter=st.floats(0, 0.5),
        steal=st.floats(0, 0.05),
        drift=st.floats(-0.05, 0.05),
    ),
    st.sampled_from(GRID),
)
def test_result_is_near_the_best_on_machines_without_noise(machine: Machine, default: Setting) -> None:
    result = search_on(machine, default)
    # Both tolerances of the search may add up.
    assert machine.loss(result.chosen) <= 0.05 + SMALL + ALIKE
    assert result.trial_count <= len(GRID) * ROUNDS / 5
    assert set(result.settings) <= {*GRID, default}


def test_no_search_if_no_step_waits() -> None:
    result = search_on(Machine(data=0.001))
    assert (result.chosen, result.settings, result.trial_count) == (NONE, [NONE], 2)
    assert "before they are needed" in result.reason


def test_workers_that_slow_the_ranks_down_are_not_chosen() -> None:
    result = search_on(Machine(compute=0.1, data=0.002, steal=0.05), default=Setting(3))
    assert result.chosen == NONE


def test_fewest_workers_of_equally_fast_settings_are_chosen() -> None:
    result = search_on(Machine(compute=0.1, data=0.29))
    assert result.chosen == Setting(3)


def test_default_is_chosen_if_no_setting_is_faster() -> None:
    result = search_on(Machine(compute=0.1, data=0.29), default=Setting(4))
    assert result.chosen == Setting(4)
    assert result.verdict(Setting(4)) == "chosen"


def test_longer_prefetch_is_chosen_if_it_pays() -> None:
    result = search_on(Machine(compute=0.1, data=2.0, jitter=4.0))
    assert result.chosen is not None
    assert result.chosen.prefetch > 2


def test_default_outside_of_the_grid_is_measured() -> None:
    result = search(Machine(compute=0.1, data=0.5).trial, grid([0, 1], [2]), Setting(5))
    assert result.chosen == Setting(5)


def test_trials_are_compared_within_a_round() -> None:
    halved = iter(range(100))

    def measure(setting: Setting) -> Timing:
        speed = (100 if setting.workers else 50) * 0.5 ** (next(halved) // 2)
        return Timing(1 / speed, 0.5, speed)

    result = search(measure, grid([0, 1], [2]), NONE)
    assert result.chosen == Setting(1)
    assert result.ratio(Setting(1), NONE).median == pytest.approx(2.0)
    assert result.speed(Setting(1)).median == pytest.approx(2 * result.speed(NONE).median)


def test_exception_of_a_trial_is_raised() -> None:
    def measure(setting: Setting) -> Timing:
        raise ArithmeticError(str(setting))

    fails: Callable[[Setting], Timing] = measure
    with pytest.raises(ArithmeticError, match="no workers"):
        search(fails, GRID, NONE)
