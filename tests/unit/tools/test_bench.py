"""What is compared, and what comes of trials."""

from dataclasses import replace
from pathlib import Path

import pytest

from samestep.config import Mesh, Recipe, RunOptions, StrategyPart
from samestep.recipes.parse import load_recipe
from samestep.tools.bench.comparison import Comparison, Plan, Row
from samestep.tools.bench.contenders import SINGLE, Absent, Contender, contenders
from samestep.tools.bench.page import draw, table
from samestep.tools.bench.trials import Reached
from samestep.tools.timed import Spread, Timed


@pytest.fixture
def recipe() -> Recipe:
    return load_recipe("digits", [])


def names(found: list[Contender], devices: int) -> list[str]:
    return [each.name for each in found if each.devices == devices]


def test_one_device_comes_first_and_every_number_has_its_ways(recipe: Recipe) -> None:
    found, absent = contenders(recipe, [2, 4], [], None)
    assert (found[0].name, found[0].devices, found[0].recipe.shards) == (SINGLE, 1, 1)
    assert {each.devices for each in found} == {1, 2, 4}
    assert names(found, 2)[0] == "ddp"
    assert names(found, 2) == names(found, 4)
    assert not absent


def test_what_a_way_changes_is_all_that_it_changes(recipe: Recipe) -> None:
    found, _ = contenders(recipe, [4], [StrategyPart(name="hsdp", mesh=Mesh(shard=2))], None)
    ways = {each.name: each for each in found if each.devices == 4}
    plain = replace(recipe, shards=4, strategy=StrategyPart())
    assert ways["ddp"].recipe == plain
    assert ways["ddp, 4 shards a rank"].recipe == replace(plain, shards=16)
    assert ways[f"ddp, {recipe.shards} shards as in the recipe"].recipe == recipe
    assert ways["ddp, bf16"].recipe == replace(plain, step=replace(plain.step, precision="bf16"))
    assert ways["ddp, sync BN"].recipe.step.batch_norm == "sync"
    assert ways["ddp, fp16 compression"].recipe.strategy.hook == "fp16"
    assert (ways["dp"].processes, ways["dp"].recipe.strategy.devices) == (1, 4)
    assert ways["hsdp (shard 2)"].recipe.strategy.mesh == Mesh(shard=2)


def test_what_cannot_be_is_told_with_the_reason(recipe: Recipe) -> None:
    found, absent = contenders(recipe, [3], [StrategyPart(name="hsdp", mesh=Mesh(shard=2))], None)
    assert [each.name for each in absent] == ["hsdp (shard 2)"]
    assert "there are 3" in absent[0].reason
    found, absent = contenders(replace(recipe, batch_size=8), [3], [], None)
    assert [each.name for each in absent] == ["ddp, 4 shards a rank"]
    found, absent = contenders(recipe, [2, 8], [], available=2)
    assert {each.devices for each in absent} == {8}
    assert {each.devices for each in found} == {1, 2}


def test_a_recipe_with_fewer_shards_than_ranks_is_told_as_it_is(recipe: Recipe) -> None:
    _, absent = contenders(replace(recipe, shards=2), [4], [], None)
    assert [each.name for each in absent] == ["ddp, 2 shards as in the recipe"]


def row(name: str, devices: int, speeds: list[float], ones: list[float], accuracy: float) -> Row:
    contender = Contender(name, devices, devices, load_recipe("digits", []))
    reached = Reached({"loss": 0.1, "samples": 360.0, "accuracy": accuracy}, "cpu", 2**21, None, 23)
    return Row(contender, reached, [Timed(64 / speed, 0.01, speed) for speed in speeds], ones)


def comparison() -> Comparison:
    ones = [100.0, 50.0, 200.0]
    rows = [row(SINGLE, 1, ones, ones, 0.99), row("ddp", 2, [180.0, 100.0, 340.0], ones, 0.98)]
    plan = Plan(rounds=3, steps=5, epochs=2, options=RunOptions(), preload=())
    return Comparison("digits", {}, {"device": "a processor"}, plan, rows, [Absent("dp", 2, "no reason")])


def test_a_speed_up_is_of_each_round_by_itself() -> None:
    one, two = comparison().rows
    assert one.speed_up == Spread(1.0, 1.0, 1.0)
    assert two.speed_up.median == pytest.approx(1.8)  # 1.8, 2.0, 1.7: a machine that gets slower does so for all
    assert two.efficiency == pytest.approx(0.9)
    assert two.epoch_seconds == pytest.approx(23 * 64 / 180)


def test_one_round_has_no_spread() -> None:
    assert Spread.of([3.0]) == Spread(3.0, 3.0, 3.0)


def test_everything_is_told(tmp_path: Path) -> None:
    found = comparison()
    assert found.metric == "accuracy"
    data = found.as_data()
    assert [way["speed_up"]["median"] for way in data["ways"]] == [1.0, pytest.approx(1.8)]
    assert data["not_run"] == [{"name": "dp", "devices": 2, "reason": "no reason"}]
    lines = table(found)
    assert [str(column.header) for column in lines.columns][-1] == "accuracy"
    assert "waits for data" not in [column.header for column in lines.columns]
    draw(found, tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
