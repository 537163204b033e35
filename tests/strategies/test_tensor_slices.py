"""Slices of matrix products: the bits of one process under every layout."""

from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from helpers.tensor_models import MODELS
from samestep import launch
from workers.slices import LAYOUTS, digests, of_replaced_parameters


def train(folder: Path, layouts: list[str], model: str, slices: int, **options: Any) -> dict[str, str]:
    """Return digests by layout."""
    results: dict[str, str] = {}
    for ranks in sorted({LAYOUTS[layout][0] for layout in layouts}):
        names = [layout for layout in layouts if LAYOUTS[layout][0] == ranks]
        results |= launch(partial(digests, names, model, slices, str(folder), **options), processes=ranks)
    return results


def require_equal(results: dict[str, str]) -> None:
    assert set(results.values()) == {results["single"]}, results


def test_two_ranks_have_the_bits_of_one_process(tmp_path: Path) -> None:
    require_equal(train(tmp_path, ["single", "tp"], "layers", 4))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_four_ranks_have_the_bits_of_one_process(tmp_path: Path, precision: str) -> None:
    layouts = ["single", "tp (4)", "ddp x tp", "fsdp x tp"]
    require_equal(train(tmp_path, layouts, "layers", 4, precision=precision, epochs=1))


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("model", MODELS)
def test_every_model_has_the_bits_of_one_process_in_every_layout(tmp_path: Path, model: str, precision: str) -> None:
    layouts = [name for name in LAYOUTS if name not in ("tp (3)", "pp", "pp x tp")]
    require_equal(train(tmp_path, layouts, model, 4, precision=precision))


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("model", ["layers", "timm vit", "bert"])
def test_stages_have_the_bits_of_one_process(tmp_path: Path, model: str) -> None:
    require_equal(train(tmp_path, ["single", "pp", "pp x tp"], model, 4))


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("slices", [3, 6])
def test_numbers_of_slices_that_are_no_power_of_two(tmp_path: Path, slices: int) -> None:
    layouts = ["single", "ddp", "tp (3)", *(["tp"] if slices == 6 else [])]
    require_equal(train(tmp_path, layouts, "timm vit", slices))


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("options", [{"compile": True}, {"recompute": ("blocks.*",)}, {"reduction": "fast"}])
def test_transforms_have_the_bits_of_one_process(tmp_path: Path, options: dict[str, Any]) -> None:
    # With two ranks that share data, and with two microbatches each, the backend's order is that of the tree.
    layouts = ["single", "tp", "tp (4)" if "reduction" in options else "ddp x tp"]
    require_equal(train(tmp_path, layouts, "layers", 4, **options))


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("model", ["layers", "bert"])
def test_runs_that_change_the_layout_have_the_bits_of_one_layout(tmp_path: Path, model: str) -> None:
    train(tmp_path, ["single"], model, 4, epochs=1)
    layouts = ["single", "fsdp x tp", "ddp", "tp (4)", "fsdp", "ddp x tp"]
    for epochs, (before, after) in enumerate(pairwise(layouts), 2):
        (result,) = train(tmp_path, [after], model, 4, epochs=epochs, begin=before).values()
    undisturbed = train(tmp_path / "undisturbed", ["single"], model, 4, epochs=len(layouts))
    assert result == undisturbed["single"]


def test_changed_parameters_are_sliced_again() -> None:
    before, after, forwards = launch(of_replaced_parameters, processes=1)
    assert before != after
    assert forwards == {"up": "DividedProduct", "down": "DividedProduct"}
