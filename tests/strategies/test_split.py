"""Models split between ranks by a tensor axis, a pipeline axis and replicas, compared with the plain loop."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from helpers.forked_ranks import Job, run_jobs

TOLERANCE = 1e-13
PIPELINE = ["deep", "dropout", "layouts", "shared function", "first frozen", "last frozen", "images", "pair", "text"]
TENSOR = ["perceptron", "text", "layers"]


def job(ranks: int, name: str, models: list[str], **mesh: int) -> Job:
    return Job("run", ranks, {"name": name, "mesh": mesh, "models": models})


def require_equal(results: dict[str, Any], models: list[str]) -> None:
    """Require the values of the plain loop, and that all calls but the first of each kind were divided."""
    assert list(results) == models
    for name, ranks in results.items():
        for difference, divided, whole, reasons in ranks:
            assert difference <= TOLERANCE, name
            assert (divided, whole, reasons) == (4, 0, []), name


def test_two_ranks_have_the_values_of_the_plain_loop() -> None:
    pipeline, tensor = run_jobs(
        "workers.split",
        job(2, "pp", ["dropout", "shared function"], pipeline=2),
        job(2, "tp", ["layers"], tensor=2),
    )
    require_equal(pipeline, ["dropout", "shared function"])
    require_equal(tensor, ["layers"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh",
    [
        job(2, "pp", PIPELINE, pipeline=2),
        job(3, "pp", ["deep", "text", "layouts", "shared function"], pipeline=3),
        job(4, "pp", PIPELINE, pipeline=2, replicate=2),
        job(2, "tp", TENSOR, tensor=2),
        job(4, "tp", TENSOR, tensor=2, replicate=2),
        job(4, "ddp", ["layers"], tensor=2),
        job(4, "pp", ["text", "layers"], pipeline=2, tensor=2),
    ],
    ids=["pp 2", "pp 3", "ddp 2 x pp 2", "tp 2", "ddp 2 x tp 2", "ddp with a mesh", "tp 2 x pp 2"],
)
def test_layouts_have_the_values_of_the_plain_loop(mesh: Job) -> None:
    (results,) = run_jobs("workers.split", mesh, timeout=400)
    require_equal(results, mesh.arguments["models"])


@pytest.mark.slow
def test_checkpoints_belong_to_no_layout(tmp_path: Path) -> None:
    def until(epochs: int, ranks: int, name: str, **mesh: int) -> Job:
        arguments = {"name": name, "mesh": mesh, "models": ["text"], "folder": str(tmp_path / "changing")}
        return Job("checkpoints", ranks, {**arguments, "epochs": epochs})

    plain = until(5, 1, "auto")
    plain.arguments["folder"] = str(tmp_path / "plain")
    results = run_jobs(
        "workers.split",
        plain,
        until(1, 2, "pp", pipeline=2),
        until(2, 1, "auto"),
        until(3, 3, "pp", pipeline=3),
        until(4, 2, "tp", tensor=2),
        until(5, 4, "pp", pipeline=2, tensor=2),
        timeout=400,
    )
    assert [ranks for result in results for ranks in result.values()] == [[True] * n for n in (1, 2, 1, 3, 2, 4)]
    require_equal_files(tmp_path / "plain" / "text", tmp_path / "changing" / "text")


@pytest.mark.slow
def test_checkpoints_of_copies_of_stages_with_batch_norm(tmp_path: Path) -> None:
    def until(epochs: int, ranks: int, folder: str, name: str, **mesh: int) -> Job:
        arguments = {"name": name, "mesh": mesh, "models": ["images"], "folder": str(tmp_path / folder)}
        return Job("checkpoints", ranks, {**arguments, "epochs": epochs})

    results = run_jobs(
        "workers.split",
        until(2, 1, "plain", "auto"),
        until(1, 4, "changing", "pp", pipeline=2, replicate=2),
        until(2, 2, "changing", "auto"),
    )
    assert [ranks for result in results for ranks in result.values()] == [[True] * n for n in (1, 4, 2)]
    require_equal_files(tmp_path / "plain" / "images", tmp_path / "changing" / "images")


def require_equal_files(plain: Path, changing: Path) -> None:
    """Require that the last checkpoints have the same tensors to rounding, and the same other state of an optimizer."""
    for file in ("model", "optimizer"):
        one, other = (load_file(folder / "last" / f"{file}.safetensors") for folder in (plain, changing))
        assert list(one) == list(other)
        for name, tensor in one.items():
            torch.testing.assert_close(other[name], tensor, rtol=1e-9, atol=1e-9)
    one, other = (json.loads((folder / "last" / "state.json").read_text()) for folder in (plain, changing))
    assert one["optimizer"] == other["optimizer"]
    assert one["aliases"] == other["aliases"]


@pytest.mark.slow
def test_stages_have_the_bits_of_one_process() -> None:
    models = ["untied", "layouts", "first frozen", "images", "pair", "text"]

    def bits(ranks: int, name: str, names: list[str], **mesh: int) -> Job:
        return Job("bits", ranks, {"name": name, "mesh": mesh, "models": names})

    one, *others, refused = run_jobs(
        "workers.split",
        bits(1, "auto", models),
        bits(2, "auto", models),
        bits(2, "pp", models, pipeline=2),
        bits(3, "pp", ["untied", "text"], pipeline=3),
        bits(4, "pp", ["untied", "images"], pipeline=2, replicate=2),
        Job("refusals", 2, {"name": "pp", "mesh": {"pipeline": 2}, "models": ["deep", "shared function"]}),
        timeout=400,
    )
    assert refused == ["E_PIPELINE", "E_PIPELINE"]
    for results in others:
        for name, ranks in results.items():
            assert ranks[0][1:] == [6, 0, []]
            assert all(rank == one[name][0] for rank in ranks), name


@pytest.mark.slow
def test_bits_depend_on_the_number_of_slices_only() -> None:
    def with_slices(ranks: int, name: str, slices: int, **mesh: int) -> Job:
        arguments = {"name": name, "mesh": mesh, "models": TENSOR, "slices": slices}
        return Job("bits", ranks, arguments)

    one, *others, without = run_jobs(
        "workers.split",
        with_slices(1, "auto", 2),
        with_slices(2, "auto", 2),
        with_slices(2, "tp", 2, tensor=2),
        with_slices(4, "tp", 2, tensor=2, replicate=2),
        with_slices(1, "auto", 1),
        timeout=400,
    )
    for name, ranks in one.items():
        digest, divided, whole, reasons = ranks[0]
        assert (divided, whole, reasons) == (6, 0, [])
        for results in others:
            assert all(other == [digest, 6, 0, []] for other in results[name]), name
        assert without[name][0][0] != digest
