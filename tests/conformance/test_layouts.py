"""Every layout computes what one process does, and goes on from what any other has saved."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import ranks_layouts
from ranks_layouts import LAYOUTS, OF_EIGHT, OF_MODEL
from samestep import launch
from ten_steps import HALF, by_ranks, distance, require_same

Outcomes = Callable[[str], dict[str, dict[str, Any]]]


EACH = [
    pytest.param(model, name, marks=[] if model == "chain" else pytest.mark.slow)
    for model, names in OF_MODEL.items()
    for name in names
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("layouts")


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> Outcomes:
    """What ten steps of a model lead to under every layout, computed when it is first asked for."""

    @cache
    def of(model: str) -> dict[str, dict[str, Any]]:
        found = {"single": launch(ranks_layouts.trained, "single", model, folder / model, processes=1)}
        for ranks, names in by_ranks(OF_MODEL[model], LAYOUTS).items():
            found |= launch(ranks_layouts.all_trained, names, model, folder / model, processes=ranks)
        return found

    return of


@pytest.mark.parametrize(("model", "name"), EACH)
def test_it_computes_what_one_process_does(outcomes: Outcomes, name: str, model: str) -> None:
    require_same(outcomes(model)[name], outcomes(model)["single"])


@pytest.mark.parametrize(("model", "name"), [each for each in EACH if LAYOUTS[str(each.values[1])][1].is_exact])
def test_it_has_the_bits_of_one_process(outcomes: Outcomes, name: str, model: str) -> None:
    single, found = outcomes(model)["single"], outcomes(model)[name]
    assert found["steps"] == single["steps"]
    for kind in ("weights", "average", "buffers"):
        assert all(torch.equal(found[kind][each], tensor) for each, tensor in single[kind].items())


@pytest.mark.parametrize("name", LAYOUTS)
def test_it_is_called_what_it_is(outcomes: Outcomes, name: str) -> None:
    assert outcomes("chain")[name]["layout"] == name.partition(" (")[0]


@pytest.mark.slow
def test_so_it_does_on_eight_ranks(outcomes: Outcomes, folder: Path) -> None:
    single = outcomes("chain")["single"]
    found = launch(ranks_layouts.all_trained, list(OF_EIGHT), "chain", folder / "eight", processes=8)
    for name, mine in found.items():
        require_same(mine, single)
        assert mine["layout"] == name.removesuffix(" (8)")


@pytest.mark.parametrize("name", ["fsdp", "fsdp (offload)", "fsdp (meta)", "hsdp", "fsdp (3)"])
def test_a_rank_holds_its_part_alone(outcomes: Outcomes, name: str) -> None:
    ranks, part = LAYOUTS[name]
    divided = part.mesh.shard or ranks
    whole = outcomes("chain")["single"]["held"]
    assert outcomes("chain")[name]["held"] == pytest.approx(whole / divided, rel=0.2)


# How far weights may lie apart after ten steps, of the largest of a tensor, and how far where products are divided: the
# parts of those are rounded before they are added. What was seen is a tenth of it.
NEAR = {"fp32": (5e-6, 5e-6), "bf16": (1e-6, 5e-2), "fp16": (1e-6, 3e-3)}


@pytest.mark.slow
@pytest.mark.parametrize("precision", NEAR)
def test_in_a_narrower_precision_it_is_as_near_as_that_allows(precision: str) -> None:
    single = launch(ranks_layouts.in_precision, ["single"], precision, processes=1)["single"]
    near, near_divided = NEAR[precision]
    for ranks, names in by_ranks(LAYOUTS, LAYOUTS).items():
        for name, found in launch(ranks_layouts.in_precision, names, precision, processes=ranks).items():
            apart = distance(found["weights"], single["weights"])
            assert apart < (near_divided if "tp" in name.split() else near), name
            if LAYOUTS[name][1].is_exact:
                assert apart == 0, name


# One layout of every kind; variants of a kind have their turn in the long tests.
KINDS = [name for name in LAYOUTS if "(" not in name and name != "ddp x placed"]


def require_matrix(outcomes: Outcomes, folder: Path, model: str, names: list[str]) -> None:
    """Every layout goes on from what each of them has saved."""
    expected, saved = outcomes(model)["single"], ["single", *names]
    found = launch(ranks_layouts.all_gone_on, ["single"], model, folder / model, saved, processes=1)
    for ranks, same in by_ranks(names, LAYOUTS).items():
        found |= launch(ranks_layouts.all_gone_on, same, model, folder / model, saved, processes=ranks)
    assert len(found) == len(saved) ** 2
    for outcome in found.values():
        require_same(outcome, expected, HALF)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_any_kind_of_layout_has_saved_any_other_goes_on_from(outcomes: Outcomes, folder: Path) -> None:
    require_matrix(outcomes, folder, "chain", KINDS)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("model", OF_MODEL)
def test_what_any_layout_has_saved_any_other_goes_on_from(outcomes: Outcomes, folder: Path, model: str) -> None:
    require_matrix(outcomes, folder, model, OF_MODEL[model])
