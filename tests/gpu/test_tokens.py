"""Padded lines on a GPU: embedding, attention and losses by tokens have deterministic kernels there too."""

import hashlib

import pytest
import torch

from samestep.config import RunOptions
from samestep.launcher.launch import launch
from samestep.recipes.bad_samples import complete_epoch
from samestep.recipes.builder import build, start_world
from samestep.recipes.recipe_files import load_recipe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]

SMALL = ("data.options.lines=100", "model.options.width=32")
WEIGHTS = f"loss.options.weight={[1 + number / 10 for number in range(29)]}"


def train(*overrides: str) -> tuple[str, dict[str, float]]:
    recipe = load_recipe("tokens", ["step.reduction=exact", *SMALL, *overrides])
    options = RunOptions(device="cuda", workers=0)
    with start_world(recipe, options) as world:
        built = build(recipe, options, world)
        for batch in built.train:
            built.driver.step(batch)
        tensors = [tensor.cpu().numpy().tobytes() for tensor in built.driver.model.state_dict().values()]
        values = built.driver.evaluate(complete_epoch(built.evaluation), built.metrics)
        assert values is not None
        return hashlib.sha256(b"".join(tensors)).hexdigest(), values


@pytest.mark.parametrize("overrides", [(), (WEIGHTS, "loss.options.label_smoothing=0.1"), ("step.precision=bf16",)])
def test_exact_repeats_bit_for_bit(overrides: tuple[str, ...]) -> None:
    assert launch(train, *overrides, processes=1) == launch(train, *overrides, processes=1)
