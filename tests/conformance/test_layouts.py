"""Conformance of layouts: results of one process, and checkpoints that every other layout resumes."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.ten_steps import HALF, by_ranks, distance, require_same
from samestep import launch
from workers import layouts as ranks_layouts
from workers.layouts import EIGHT_RANKS, LAYOUTS, LAYOUTS_OF_MODEL

pytestmark = pytest.mark.slow
Outcomes = Callable[[str], dict[str, dict[str, Any]]]


CASES = [
    pytest.param(model, name, marks=[] if model == "chain" else pytest.mark.long)
    for model, names in LAYOUTS_OF_MODEL.items()
    for name in names
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("layouts")


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> Outcomes:
    """Return the results of ten steps of a model with every layout, computed on first use."""

    @cache
    def of(model: str) -> dict[str, dict[str, Any]]:
        results = {"single": launch(ranks_layouts.train_one, "single", model, folder / model, processes=1)}
        for ranks, names in by_ranks(LAYOUTS_OF_MODEL[model], LAYOUTS).items():
            results |= launch(ranks_layouts.train_all, names, model, folder / model, processes=ranks)
        return results

    return of


@pytest.mark.parametrize(("model", "name"), CASES)
def test_results_are_those_of_one_process(outcomes: Outcomes, name: str, model: str) -> None:
    require_same(outcomes(model)[name], outcomes(model)["single"])


@pytest.mark.parametrize(("model", "name"), [case for case in CASES if LAYOUTS[str(case.values[1])][1].is_exact(1)])
def test_exact_layouts_give_the_bits_of_one_process(outcomes: Outcomes, name: str, model: str) -> None:
    single, result = outcomes(model)["single"], outcomes(model)[name]
    assert result["steps"] == single["steps"]
    assert result["checksum"] == single["checksum"]
    for kind in ("weights", "average", "buffers"):
        assert all(torch.equal(result[kind][key], tensor) for key, tensor in single[kind].items())


MODELS = [
    pytest.param("chain"),
    pytest.param("full", marks=pytest.mark.long),
]


@pytest.mark.parametrize("model", MODELS)
def test_checksum_of_a_state_is_the_same_in_every_layout(folder: Path, model: str) -> None:
    run = folder / "checksums"
    launch(ranks_layouts.train_one, "single", model, run / model, processes=1)
    names, checkpoint = LAYOUTS_OF_MODEL[model], run / model / "single"
    checksums = launch(ranks_layouts.loaded_checksums, ["single"], model, checkpoint, processes=1)
    for ranks, group in by_ranks(names, LAYOUTS).items():
        checksums |= launch(ranks_layouts.loaded_checksums, group, model, checkpoint, processes=ranks)
    assert len(checksums) == len(names) + 1
    assert {name: value for name, value in checksums.items() if value != checksums["single"]} == {}


@pytest.mark.parametrize("name", LAYOUTS)
def test_names_of_layouts(outcomes: Outcomes, name: str) -> None:
    assert outcomes("chain")[name]["layout"] == name.partition(" (")[0]


@pytest.mark.long
def test_results_on_eight_ranks(outcomes: Outcomes, folder: Path) -> None:
    single = outcomes("chain")["single"]
    results = launch(ranks_layouts.train_all, list(EIGHT_RANKS), "chain", folder / "eight", processes=8)
    for name, result in results.items():
        require_same(result, single)
        assert result["layout"] == name.removesuffix(" (8)")


@pytest.mark.parametrize("name", ["fsdp", "fsdp (offload)", "fsdp (meta)", "hsdp", "fsdp (3)"])
def test_a_rank_stores_only_its_shard(outcomes: Outcomes, name: str) -> None:
    ranks, strategy = LAYOUTS[name]
    shards = strategy.mesh.shard or ranks
    total = outcomes("chain")["single"]["size"]
    assert outcomes("chain")[name]["size"] == pytest.approx(total / shards, rel=0.2)


# Tolerances of weights after ten steps, relative to the largest element: without and with a tensor axis, whose
# partial results are rounded before they are added. Observed differences are a tenth.
TOLERANCE = {"fp32": (5e-6, 5e-6), "bf16": (1e-6, 5e-2), "fp16": (1e-6, 3e-3)}


@pytest.mark.long
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_results_in_lower_precision(precision: str) -> None:
    single = launch(ranks_layouts.in_precision, ["single"], precision, processes=1)["single"]
    tolerance, tolerance_tp = TOLERANCE[precision]
    for ranks, names in by_ranks(LAYOUTS, LAYOUTS).items():
        for name, result in launch(ranks_layouts.in_precision, names, precision, processes=ranks).items():
            difference = distance(result["weights"], single["weights"])
            assert difference < (tolerance_tp if "tp" in name.split() else tolerance), name
            if LAYOUTS[name][1].is_exact(1):
                assert difference == 0, name


# One layout of every kind; the long tests use all variants.
KINDS = [name for name in LAYOUTS if "(" not in name and name != "ddp x device_map"]


def require_matrix(outcomes: Outcomes, folder: Path, model: str, names: list[str]) -> None:
    """Require that every layout resumes the checkpoints of all layouts."""
    expected, saved = outcomes(model)["single"], ["single", *names]
    results = launch(ranks_layouts.resume_all, ["single"], model, folder / model, saved, processes=1)
    for ranks, group in by_ranks(names, LAYOUTS).items():
        results |= launch(ranks_layouts.resume_all, group, model, folder / model, saved, processes=ranks)
    assert len(results) == len(saved) ** 2
    for outcome in results.values():
        require_same(outcome, expected, HALF)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_every_kind_of_layout_resumes_the_checkpoints_of_all_kinds(outcomes: Outcomes, folder: Path) -> None:
    require_matrix(outcomes, folder, "chain", KINDS)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("model", LAYOUTS_OF_MODEL)
def test_every_layout_resumes_the_checkpoints_of_all_layouts(outcomes: Outcomes, folder: Path, model: str) -> None:
    require_matrix(outcomes, folder, model, LAYOUTS_OF_MODEL[model])
