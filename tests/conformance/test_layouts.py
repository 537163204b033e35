"""Every layout computes what one process does, and goes on from what any other has saved."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

import ranks_layouts
from ranks_layouts import HALF, LAYOUTS, MODELS
from samestep import launch

Outcomes = dict[str, dict[str, dict[str, Any]]]
MOST = 1e-10  # relative, in float64


def by_ranks() -> dict[int, list[str]]:
    found = defaultdict(list)
    for name, (ranks, _) in LAYOUTS.items():
        found[ranks].append(name)
    return dict(found)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("layouts")


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> Outcomes:
    found: Outcomes = {}
    for model in MODELS:
        found[model] = {"single": launch(ranks_layouts.trained, "single", model, folder / model, processes=1)}
        for ranks, names in by_ranks().items():
            found[model] |= launch(ranks_layouts.all_trained, names, model, folder / model, processes=ranks)
    return found


def distance(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest distance of a tensor from the reference, relative to the largest element of that."""
    assert found.keys() == expected.keys()
    return max(
        float((found[name].double() - tensor.double()).abs().max() / tensor.double().abs().max().clamp(min=1e-3))
        for name, tensor in expected.items()
    )


def require_same(found: dict[str, Any], expected: dict[str, Any], first_step: int = 0) -> None:
    for mine, theirs in zip(found["steps"], expected["steps"][first_step:], strict=True):
        assert mine == pytest.approx(theirs, rel=MOST)
    assert found["evaluation"] == pytest.approx(expected["evaluation"], rel=MOST)
    for kind in ("weights", "average", "buffers"):
        if expected[kind]:
            assert distance(found[kind], expected[kind]) < MOST, kind


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_it_computes_what_one_process_does(outcomes: Outcomes, name: str, model: str) -> None:
    require_same(outcomes[model][name], outcomes[model]["single"])


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", [name for name, (_, part) in LAYOUTS.items() if part.is_exact])
def test_it_has_the_bits_of_one_process(outcomes: Outcomes, name: str, model: str) -> None:
    single, found = outcomes[model]["single"], outcomes[model][name]
    assert found["steps"] == single["steps"]
    for kind in ("weights", "average", "buffers"):
        assert all(torch.equal(found[kind][each], tensor) for each, tensor in single[kind].items())


@pytest.mark.parametrize("name", LAYOUTS)
def test_it_is_called_what_it_is(outcomes: Outcomes, name: str) -> None:
    assert outcomes["chain"][name]["layout"] == name.partition(" (")[0]


@pytest.mark.parametrize("name", ["fsdp", "fsdp (offload)", "fsdp (meta)", "hsdp", "fsdp (3)"])
def test_a_rank_holds_its_part_alone(outcomes: Outcomes, name: str) -> None:
    ranks, part = LAYOUTS[name]
    divided = part.mesh.shard or ranks
    whole = outcomes["full"]["single"]["held"]
    assert outcomes["full"][name]["held"] == pytest.approx(whole / divided, rel=0.2)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("model", MODELS)
def test_what_any_layout_has_saved_any_other_goes_on_from(outcomes: Outcomes, folder: Path, model: str) -> None:
    saved = ["single", *LAYOUTS]
    found = launch(ranks_layouts.all_gone_on, ["single"], model, folder / model, saved, processes=1)
    for ranks, names in by_ranks().items():
        found |= launch(ranks_layouts.all_gone_on, names, model, folder / model, saved, processes=ranks)
    assert len(found) == len(saved) ** 2
    for outcome in found.values():
        require_same(outcome, outcomes[model]["single"], HALF)
