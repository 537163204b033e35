"""Short trainings of which tests compare the outcome under several layouts: what ranks run, and how it is compared."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import samestep
from samestep.engine.step import Engine

STEPS, HALF = 10, 5
MOST = 1e-10  # relative, in float64


def steps_of(engine: Engine, batches: Any, until: int) -> list[tuple[float, float]]:
    """Loss and norm of the gradient of each step until that many are done."""
    found = []
    while engine.steps < until:
        for batch in batches:
            result = engine.step(batch)
            found.append((result.loss, result.grad_norm))
            if engine.steps == until:
                break
    return found


def outcome(engine: Engine, evaluation: Any) -> dict[str, Any]:
    """What training has led to, whole."""
    pieces, average = engine.pieces, engine.averaged
    assert average is not None
    return {
        "layout": engine.strategy,
        "evaluation": engine.evaluate(evaluation),
        "weights": {name: pieces.whole(name, p.detach()).clone() for name, p in pieces.held.items()},
        "average": {name: pieces.whole(name, value).clone() for name, value in average.tensors.items()},
        "buffers": {name: buffer.clone() for name, buffer in engine.model.named_buffers()},
    }


def train(engine: Engine, batches: Any, evaluation: Any, folder: Path) -> dict[str, Any]:
    """Ten steps, with a checkpoint in `folder` after five."""
    found = steps_of(engine, batches, HALF)
    samestep.Checkpoints(folder, engine, batches).save()
    found += steps_of(engine, batches, STEPS)
    return {"steps": found, **outcome(engine, evaluation)}


def go_on(engine: Engine, batches: Any, evaluation: Any, folder: Path) -> dict[str, Any]:
    """The second five steps, from a checkpoint that some layout saved."""
    assert samestep.Checkpoints(folder, engine, batches).resume()
    return {"steps": steps_of(engine, batches, STEPS), **outcome(engine, evaluation)}


def by_ranks(names: Iterable[str], layouts: Mapping[str, tuple[int, Any]]) -> dict[int, list[str]]:
    """Names of layouts by the number of ranks that they have."""
    found = defaultdict(list)
    for name in names:
        found[layouts[name][0]].append(name)
    return dict(found)


def distance(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    """The largest distance of a tensor from the reference, relative to the largest element of that."""
    assert list(found) == list(expected)
    return max(
        float((found[name].double() - tensor.double()).abs().max() / tensor.double().abs().max().clamp(min=1e-3))
        for name, tensor in expected.items()
    )


def require_same(found: dict[str, Any], expected: dict[str, Any], first_step: int = 0) -> None:
    """An outcome, and the steps from `first_step` on that led to it, are those of the reference but for rounding."""
    for mine, theirs in zip(found["steps"], expected["steps"][first_step:], strict=True):
        assert mine == pytest.approx(theirs, rel=MOST)
    assert found["evaluation"] == pytest.approx(expected["evaluation"], rel=MOST)
    for kind in ("weights", "average", "buffers"):
        if expected[kind]:
            assert distance(found[kind], expected[kind]) < MOST, kind
