"""Short trainings under several strategies, and comparisons of their outcomes."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import samestep
from samestep.engine.engine import Engine

STEPS, HALF = 10, 5
TOLERANCE = 1e-10  # relative, in float64


def steps_of(engine: Engine, batches: Any, until: int) -> list[tuple[float, float]]:
    """Train until `until` steps are done; return loss and gradient norm of each step."""
    steps = []
    while engine.steps < until:
        for batch in batches:
            result = engine.step(batch)
            steps.append((result.loss, result.grad_norm))
            if engine.steps == until:
                break
    return steps


def outcome(engine: Engine, evaluation: Any) -> dict[str, Any]:
    """Return evaluation, full weights, moving average and buffers."""
    local_parameters, average = engine.local_parameters, engine.averaged
    assert average is not None
    return {
        "layout": engine.strategy,
        "evaluation": engine.evaluate(evaluation),
        "weights": {
            name: local_parameters.full_tensor(name, p.detach()).clone() for name, p in local_parameters.local.items()
        },
        "average": {name: local_parameters.full_tensor(name, value).clone() for name, value in average.tensors.items()},
        "buffers": {name: buffer.clone() for name, buffer in engine.model.named_buffers()},
    }


def train(engine: Engine, batches: Any, evaluation: Any, folder: Path) -> dict[str, Any]:
    """Train ten steps, with a checkpoint in `folder` after five."""
    steps = steps_of(engine, batches, HALF)
    samestep.CheckpointManager(folder, engine, batches).save()
    steps += steps_of(engine, batches, STEPS)
    return {"steps": steps, **outcome(engine, evaluation)}


def resume_training(engine: Engine, batches: Any, evaluation: Any, folder: Path) -> dict[str, Any]:
    """Train the second five steps from a checkpoint, which another strategy may have written."""
    assert samestep.CheckpointManager(folder, engine, batches).resume()
    return {"steps": steps_of(engine, batches, STEPS), **outcome(engine, evaluation)}


def by_ranks(names: Iterable[str], layouts: Mapping[str, tuple[int, Any]]) -> dict[int, list[str]]:
    """Return names of layouts by number of ranks."""
    groups = defaultdict(list)
    for name in names:
        groups[layouts[name][0]].append(name)
    return dict(groups)


def distance(tensors: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    """Return the largest difference from the reference, relative to the largest element of each tensor."""
    assert list(tensors) == list(expected)
    return max(
        float((tensors[name].double() - tensor.double()).abs().max() / tensor.double().abs().max().clamp(min=1e-3))
        for name, tensor in expected.items()
    )


def require_equal(result: dict[str, Any], expected: dict[str, Any], first_step: int = 0) -> None:
    """Assert that outcome and steps have the bits of the reference from `first_step` on."""
    assert result["steps"] == expected["steps"][first_step:]
    assert result["evaluation"] == expected["evaluation"]
    for kind in ("weights", "average", "buffers"):
        assert result[kind].keys() == expected[kind].keys()
        different = [name for name, tensor in expected[kind].items() if not torch.equal(result[kind][name], tensor)]
        assert different == [], kind


def require_same(result: dict[str, Any], expected: dict[str, Any], first_step: int = 0) -> None:
    """Assert that outcome and steps equal those of the reference from `first_step` on, except for rounding."""
    for step, reference in zip(result["steps"], expected["steps"][first_step:], strict=True):
        assert step == pytest.approx(reference, rel=TOLERANCE)
    assert result["evaluation"] == pytest.approx(expected["evaluation"], rel=TOLERANCE)
    for kind in ("weights", "average", "buffers"):
        if expected[kind]:
            assert distance(result[kind], expected[kind]) < TOLERANCE, kind
