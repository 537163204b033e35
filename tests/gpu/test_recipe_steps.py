"""Steps of a recipe on a GPU: the device leaves out updates, and the host reads nothing before them."""

import warnings

import pytest
import torch

from samestep.config import RunOptions
from samestep.launcher.launch import launch
from samestep.recipes.builder import build, start_world
from samestep.recipes.recipe_files import load_recipe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]


def steps(*overrides: str) -> tuple[bool, list[bool], bool, int]:
    """Return whether the optimizer is fused, skipped steps, whether weights stayed, and reads by the host."""
    recipe = load_recipe("digits", ["step.non_finite=skip", *overrides])
    options = RunOptions(device="cuda", workers=0)
    with start_world(recipe, options) as world:
        driver = (built := build(recipe, options, world)).driver
        batches = iter(built.train)
        batch = next(batches)
        batch.data[0][3] = float("nan")
        before = [parameter.clone() for parameter in driver.model.parameters()]
        skipped = [driver.step(batch).skipped]
        stays = all(map(torch.equal, before, driver.model.parameters()))
        skipped += [driver.step(next(batches)).skipped for _ in range(2)]
        torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            skipped.append(driver.step(next(batches)).skipped)
        torch.cuda.set_sync_debug_mode("default")
        reads = sum("synchronizing CUDA operation" in str(one.message) for one in caught)
        return driver.optimizer.param_groups[0]["fused"], skipped, stays, reads


@pytest.mark.parametrize("optimizer", [(), ("optimizer.name=adamw", "optimizer.options={lr: 0.01}")])
def test_a_step_reads_once(optimizer: tuple[str, ...]) -> None:
    """The numbers of the step; batches are copied from memory that is not page-locked, which waits for the copy."""
    is_fused, skipped, stays, reads = launch(steps, *optimizer, processes=1)
    assert is_fused
    assert skipped == [True, False, False, False]
    assert stays
    assert reads <= 3
