"""Tests of the layouts of a number of devices."""

import math

import pytest

from samestep.config import Recipe, resolve_mesh
from samestep.recipes.recipe_files import load_recipe
from samestep.tools.plan.layouts import candidates, find_layouts


@pytest.fixture
def recipe() -> Recipe:
    return load_recipe("digits", [])  # 8 microbatches


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 6, 8, 64])
def test_each_candidate_has_a_mesh_of_all_devices(devices: int) -> None:
    shapes = [resolve_mesh(strategy, devices) for strategy in candidates(devices)]
    assert all(shape.size == devices for shape in shapes)
    assert len({shape.sizes for shape in shapes}) == len(shapes)
    assert not any(shape.pipeline > 1 and shape.shard > 1 for shape in shapes)


def test_layouts_of_four_devices(recipe: Recipe) -> None:
    layouts, infeasible = find_layouts(recipe, 4)
    names = {layout.shape.name for layout in layouts}
    expected = {"ddp", "fsdp", "hsdp", "tp", "pp", "ddp x tp", "fsdp x tp", "ddp x pp", "pp x tp"}
    assert names == expected
    assert not infeasible
    assert len({layout.name for layout in layouts}) == len(layouts)
    microbatches = {layout.shape.name: layout.microbatches for layout in layouts}
    assert (microbatches["ddp"], microbatches["ddp x pp"], microbatches["pp"]) == (2, 4, 8)


def test_ranks_without_microbatches_are_infeasible_with_a_reason(recipe: Recipe) -> None:
    layouts, infeasible = find_layouts(recipe, 16)
    assert {layout.name for layout in infeasible} >= {"ddp", "fsdp"}
    assert all("16 ranks share the data" in layout.reason for layout in infeasible)
    assert all(layout.shape.data_size <= 8 for layout in layouts)


def test_one_device_has_one_layout_without_options(recipe: Recipe) -> None:
    (layout,), infeasible = find_layouts(recipe, 1)
    assert (layout.name, layout.options, layout.microbatches, infeasible) == ("single", "", 8, [])


def test_options_give_the_same_mesh(recipe: Recipe) -> None:
    layouts, _ = find_layouts(recipe, 8)
    for layout in layouts:
        mesh = layout.options.rpartition(" ")[2]
        assert math.prod(int(size.partition("=")[2]) for size in mesh.split(",")) == 8
