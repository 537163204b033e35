"""Tests of the variants of a recipe and of their comparison."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from samestep.config import MeshConfig, Recipe, RunOptions, StrategyConfig
from samestep.recipes.recipe_files import load_recipe
from samestep.tools.bench import (
    SINGLE,
    Absent,
    Contender,
    Plan,
    Row,
    Spread,
    Timing,
    Trained,
    comparison_data,
    contenders,
    first_metric,
    table,
)
from samestep.tools.bench_worker import train_contender


@pytest.fixture
def recipe() -> Recipe:
    return load_recipe("digits", [])


def names(variants: list[Contender], devices: int) -> list[str]:
    return [variant.name for variant in variants if variant.devices == devices]


def test_one_device_is_first_and_every_number_has_the_same_variants(recipe: Recipe) -> None:
    variants, absent = contenders(recipe, [2, 4], [], None)
    assert (variants[0].name, variants[0].devices, variants[0].recipe.accumulate) == (SINGLE, 1, 1)
    assert {variant.devices for variant in variants} == {1, 2, 4}
    assert names(variants, 2)[0] == "ddp"
    assert names(variants, 2) == names(variants, 4)
    assert {(variant.name, variant.devices) for variant in absent} == {("nn.DataParallel", 2), ("nn.DataParallel", 4)}
    assert {variant.reason for variant in absent} == {"torch's nn.DataParallel needs GPUs"}


def test_data_parallel_of_torch_is_one_process_on_several_gpus(recipe: Recipe) -> None:
    variants, absent = contenders(recipe, [2], [], available=2, ways=["ddp", "dp"])
    by_name = {variant.name: variant for variant in variants if variant.devices == 2}
    assert (by_name["ddp"].processes, by_name["nn.DataParallel"].processes) == (2, 1)
    assert by_name["nn.DataParallel"].recipe == by_name["ddp"].recipe
    assert not absent


def test_variant_changes_nothing_else(recipe: Recipe) -> None:
    variants, _ = contenders(recipe, [4], [StrategyConfig(name="hsdp", mesh=MeshConfig(shard=2))], None)
    by_name = {variant.name: variant for variant in variants if variant.devices == 4}
    plain = replace(recipe, strategy=StrategyConfig())
    assert by_name["ddp"].recipe == plain
    assert by_name["ddp, 4 parts"].recipe == replace(plain, accumulate=4)
    assert by_name["ddp, exact"].recipe == replace(plain, step=replace(plain.step, reduction="exact"))
    assert by_name["ddp, bf16"].recipe == replace(plain, step=replace(plain.step, precision="bf16"))
    assert by_name["ddp, local BN"].recipe.step.batch_norm == "local"
    assert by_name["ddp, bf16 compression"].recipe.strategy.hook == "bf16"
    assert by_name["hsdp (shard 2)"].recipe.strategy.mesh == MeshConfig(shard=2)


def test_impossible_variants_have_a_reason(recipe: Recipe) -> None:
    _, absent = contenders(recipe, [3], [StrategyConfig(name="hsdp", mesh=MeshConfig(shard=2))], 3)
    assert [variant.name for variant in absent] == ["hsdp (shard 2)"]
    assert "on 3 ranks" in absent[0].reason
    _, absent = contenders(replace(recipe, batch_size=8), [3], [], 3, accumulate=[9])
    assert [variant.name for variant in absent] == ["9 parts", "ddp, 9 parts"]
    variants, absent = contenders(recipe, [2, 8], [], available=2)
    assert {variant.devices for variant in absent} == {8}
    assert {variant.devices for variant in variants} == {1, 2}


def test_ways_and_accumulate_select_variants(recipe: Recipe) -> None:
    layout = StrategyConfig(name="fsdp")
    variants, _ = contenders(recipe, [2], [layout], None, ways=["bf16"])
    assert (names(variants, 1), names(variants, 2)) == ([SINGLE, "bf16"], ["ddp, bf16", "fsdp"])
    variants, absent = contenders(recipe, [2], [], None, ways=["accumulate"], accumulate=[1, 2, 5, 65])
    assert names(variants, 2) == ["ddp", "ddp, 2 parts", "ddp, 5 parts"]
    assert [variant.recipe.accumulate for variant in variants if variant.devices == 2] == [1, 2, 5]
    assert {variant.recipe.batch_size for variant in variants} == {recipe.batch_size}
    assert {(variant.name, variant.devices) for variant in absent} == {("65 parts", 1), ("ddp, 65 parts", 2)}


def row(name: str, devices: int, speeds: list[float], accuracy: float) -> Row:
    contender = Contender(name, devices, devices, load_recipe("digits", []))
    trained = Trained({"loss": 0.1, "samples": 360.0, "accuracy": accuracy}, None, 1437)
    return Row(contender, trained, [Timing(60 / speed, 0.01, speed) for speed in speeds])


def comparison() -> dict[str, Any]:
    rows = [row(SINGLE, 1, [100.0, 50.0, 200.0], 0.99), row("ddp", 2, [180.0, 100.0, 340.0], 0.98)]
    plan = Plan(rounds=3, steps=5, epochs=2, options=RunOptions(), preload=())
    return comparison_data(plan, rows, [Absent("tp", 2, "no reason")])


def test_speed_up_is_computed_within_each_round() -> None:
    one, two = comparison()["ways"]
    assert Spread(**one["speed_up"]) == Spread(1.0, 1.0, 1.0)
    assert two["speed_up"]["median"] == pytest.approx(1.8)  # of 1.8, 2.0 and 1.7
    assert two["efficiency"] == pytest.approx(0.9)
    assert two["epoch_seconds"] == pytest.approx(1437 / 180)


def test_comparison_is_printed_and_plain_data() -> None:
    data = comparison()
    assert data["not_run"] == [{"name": "tp", "devices": 2, "reason": "no reason"}]
    assert first_metric(data["ways"]) == "accuracy"
    headers = [str(column.header) for column in table(data["ways"]).columns]
    assert headers[:3] == ["devices", "variant", "samples/s"]
    assert headers[-1] == "accuracy"


def test_data_parallel_trains_the_parameters_of_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    class WithoutGpus(nn.DataParallel):
        def __init__(self, model: nn.Module, devices: list[int]) -> None:
            seen.append(devices)
            super().__init__(model)  # which calls the model itself

    monkeypatch.setattr(nn, "DataParallel", WithoutGpus)
    small = load_recipe("digits", ["batch_size=128", "model.options.width=8", "metrics=[]"])
    options = RunOptions(device="cpu", workers=0, quiet=True)
    threads = torch.get_num_threads()
    one, replicated = (train_contender(Contender("variant", 1, devices, small), 1, options) for devices in (1, 2))
    torch.set_num_threads(threads)
    assert seen == [[0, 1]]
    assert one is not None
    assert replicated is not None
    assert replicated.evaluation == one.evaluation
