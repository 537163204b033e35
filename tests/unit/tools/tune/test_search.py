"""The search, on machines that are made up: how good what it finds is, and what it costs."""

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.tools.timed import Timed
from samestep.tools.tune.search import ALIKE, SMALL, Found, search
from samestep.tools.tune.setting import PREFETCH, WORKERS, Setting, grid

GRID = grid(WORKERS, PREFETCH)
ROUNDS, STEPS, WARMUP, SECONDS = 5, 20, 2, 0.5
NONE = Setting(0)


@dataclass
class Machine:
    """Steps of `compute` seconds, batches of `data` seconds that workers share; `steal` is what each costs the ranks.

    `jitter` is how much longer a wait gets where little is made ahead; `noise` and `drift` are of each turn.
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
        """Seconds of a step, and those of them that it waits."""
        if not setting.workers:
            return self.compute + self.data, self.data
        made = self.data / setting.workers * (1 + self.jitter / setting.workers / setting.prefetch)
        computed = self.compute * (1 + self.steal * setting.workers)
        return max(made, computed), max(0.0, made - computed)

    def turn(self, setting: Setting, steps: int | None = None) -> Timed:
        """A turn as ranks take it: for about half a second, or for so many steps."""
        seconds, wait = self.step(setting)
        self.load *= self.random.lognormvariate(self.drift, self.noise / 2)
        seen = seconds * self.load * self.random.lognormvariate(0, self.noise)
        count = steps or max(2, min(STEPS, round(SECONDS / seen)))
        self.clock += (count + WARMUP) * seen + 0.2 + 0.1 * setting.workers
        return Timed(seen, wait / seconds, 64 / seen)

    def lost(self, setting: Setting | None) -> float:
        """How much slower than the best a setting is in truth."""
        assert setting is not None
        return 1 - min(self.step(each)[0] for each in GRID) / self.step(setting)[0]

    def grid_seconds(self) -> float:
        """What looking at everything costs here."""
        before = self.clock
        for setting in GRID * ROUNDS:
            self.turn(setting, STEPS)
        return self.clock - before


def found_on(machine: Machine, default: Setting = NONE) -> Found:
    return search(machine.turn, GRID, default)


def some(noise: float, count: int) -> list[Machine]:
    """Machines of all kinds: data from a thousandth to twenty times of what computing takes."""
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
def test_it_comes_within_five_percent_of_the_best_in_a_tenth_of_the_time_of_a_grid(noise: float, enough: float) -> None:
    machines = some(noise, 200)
    is_near, is_short = [], []
    for machine in machines:
        found = found_on(machine)
        is_near.append(machine.lost(found.chosen) <= 0.05)
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
def test_on_a_quiet_machine_it_is_near_the_best_whatever_that_is_and_however_it_drifts(
    machine: Machine, default: Setting
) -> None:
    found = found_on(machine, default)
    # What is left unlooked at and what is taken for as fast may add up.
    assert machine.lost(found.chosen) <= 0.05 + SMALL + ALIKE
    assert found.turns <= len(GRID) * ROUNDS / 5
    assert set(found.settings) <= {*GRID, default}


def test_where_no_step_waits_nothing_is_looked_for() -> None:
    found = found_on(Machine(data=0.001))
    assert (found.chosen, found.settings, found.turns) == (NONE, [NONE], 2)
    assert "before they are needed" in found.reason


def test_workers_that_cost_the_ranks_more_than_they_gain_are_found_out() -> None:
    found = found_on(Machine(compute=0.1, data=0.002, steal=0.05), default=Setting(3))
    assert found.chosen == NONE


def test_of_settings_that_are_as_fast_the_fewest_workers_are_chosen() -> None:
    found = found_on(Machine(compute=0.1, data=0.29))
    assert found.chosen == Setting(3)


def test_the_default_stays_where_nothing_is_faster() -> None:
    found = found_on(Machine(compute=0.1, data=0.29), default=Setting(4))
    assert found.chosen == Setting(4)
    assert found.verdict(Setting(4)) == "chosen"


def test_prefetch_is_chosen_where_it_pays() -> None:
    found = found_on(Machine(compute=0.1, data=2.0, jitter=4.0))
    assert found.chosen is not None
    assert found.chosen.prefetch > 2


def test_a_default_that_is_not_in_the_grid_is_measured_too() -> None:
    found = search(Machine(compute=0.1, data=0.5).turn, grid([0, 1], [2]), Setting(5))
    assert found.chosen == Setting(5)


def test_turns_are_compared_within_a_round_only() -> None:
    halved = iter(range(100))

    def measure(setting: Setting) -> Timed:
        speed = (100 if setting.workers else 50) * 0.5 ** (next(halved) // 2)
        return Timed(1 / speed, 0.5, speed)

    found = search(measure, grid([0, 1], [2]), NONE)
    assert found.chosen == Setting(1)
    assert found.against(Setting(1), NONE).median == pytest.approx(2.0)
    assert found.speed(Setting(1)).median == pytest.approx(2 * found.speed(NONE).median)


def test_a_search_that_fails_fails() -> None:
    def measure(setting: Setting) -> Timed:
        raise ArithmeticError(str(setting))

    fails: Callable[[Setting], Timed] = measure
    with pytest.raises(ArithmeticError, match="no workers"):
        search(fails, GRID, NONE)


def test_a_grid_has_one_setting_without_workers() -> None:
    assert grid([2, 0, 2], [4, 2]) == [Setting(0), Setting(2, 2), Setting(2, 4)]
    assert grid([1], [2]) == [Setting(1, 2)]
    assert str(Setting(1, 4)) == "1 worker, prefetch 4"
