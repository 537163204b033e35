"""Switches change how fast a step is or what it needs, and neither its bits between ranks nor any name."""

from typing import Any

import pytest
import torch

import samestep
from ranks_switches import Conv, engine_of, trained
from samestep.config import StepRules
from samestep.engine.switches import laid_out
from samestep.errors import InputError
from samestep.runtime.launch import launch

NAMES = list(Conv().state_dict())
SWITCHES: dict[str, dict[str, Any]] = {
    "none": {},
    "channels last": {"channels_last": True},
    "recompute": {"recompute": ("blocks.*",)},
    "bf16": {"precision": "bf16"},
    "all": {"channels_last": True, "recompute": ("blocks.0",), "precision": "bf16", "tf32": True},
}


@pytest.fixture(scope="module")
def plain() -> tuple[str, float, list[str]]:
    found: tuple[str, float, list[str]] = launch(trained, {}, processes=1)
    return found


@pytest.mark.parametrize("name", SWITCHES)
def test_bits_do_not_depend_on_the_number_of_ranks(name: str) -> None:
    alone = launch(trained, SWITCHES[name], processes=1)
    assert alone[2] == NAMES
    assert launch(trained, SWITCHES[name], processes=3) == alone


def test_what_is_computed_again_is_the_same(plain: tuple[str, float, list[str]]) -> None:
    """Dropout and running statistics too."""
    assert launch(trained, SWITCHES["recompute"], processes=1) == plain


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_compiled_model_gives_the_same_bits_on_any_number_of_ranks(plain: tuple[str, float, list[str]]) -> None:
    alone = launch(trained, {"compile": True}, processes=1)
    assert alone[1] == pytest.approx(plain[1], rel=1e-4), "another order of sums, the same draws of dropout"
    assert alone[2] == NAMES
    assert launch(trained, {"compile": True}, processes=3) == alone


def test_channels_last_is_a_layout() -> None:
    rules = StepRules(channels_last=True)
    images, rows = torch.randn(2, 3, 4, 4), torch.randn(2, 3)
    data = laid_out({"pixels": images, "rows": [rows]}, rules)
    assert data["pixels"].is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(data["pixels"], images)
    assert data["rows"][0] is rows


def test_only_what_is_named_is_computed_again(alone: samestep.World) -> None:
    engine = engine_of(alone, recompute=("blocks.1",))
    calls = {name: 0 for name in ("blocks.0", "blocks.1")}

    def count(name: str) -> Any:
        def hook(*arguments: Any) -> None:
            calls[name] += 1

        return hook

    for name in calls:
        engine.model.get_submodule(f"{name}.0").register_forward_hook(count(name))
    engine.model(torch.randn(2, 3, 8, 8)).sum().backward()
    assert calls == {"blocks.0": 1, "blocks.1": 2}
    with torch.no_grad():
        engine.model(torch.randn(2, 3, 8, 8))
    assert calls == {"blocks.0": 2, "blocks.1": 3}


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ({"recompute": ("block.*",)}, "step.recompute: 'block.*' matches no module"),
        ({"recompute": ("blocks.*",), "batch_norm": "sync"}, "step.recompute with step.batch_norm: sync"),
        ({"compile": True, "batch_norm": "sync"}, "step.compile with step.batch_norm: sync"),
    ],
)
def test_what_cannot_be_is_refused(alone: samestep.World, rules: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as caught:
        engine_of(alone, **rules)
    assert said in str(caught.value)
    assert "do:" in str(caught.value)
