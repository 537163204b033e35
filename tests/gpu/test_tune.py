"""Tests of `samestep tune` on a GPU: memory limit and saved machine."""

from pathlib import Path

import pytest
import torch

from helpers.system import answer, here
from samestep.errors import EXIT_DIFFERS, EXIT_DONE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]
RECIPE = Path(__file__).parents[1] / "helpers" / "tuned.yaml"
BIG = (
    "--set",
    "data.options.size=256",
    "model.options.width=64",
    "batch_size=16",
    "microbatches=1",
    "--device",
    "cuda",
)
SMALL = ("--try", "none", "--workers", "0,1", "--prefetch", "2", "--seconds", "0.02", "--no-picture", "--json")


def test_microbatches_that_exceed_the_memory_limit_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert here("tune", RECIPE, *BIG, *SMALL, "--memory", "400MiB", cwd=tmp_path) == EXIT_DIFFERS
    memory = answer(capsys)["memory"]
    assert memory["microbatches_that_fit"] in (2, 4, 8, 16)
    assert not list(tmp_path.iterdir())


def test_saved_setting_names_the_gpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert here("tune", RECIPE, *BIG, *SMALL, cwd=tmp_path) == EXIT_DONE
    result = answer(capsys)
    assert result["place"]["machine"]["gpus"]
    assert result["memory"]["peak_bytes"] > 0
