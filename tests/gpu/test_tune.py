"""`samestep tune` on a GPU: what a rank may take of it is held, and more shards take less. Not run on hardware yet."""

from pathlib import Path

import pytest
import torch

from samestep.errors import EXIT_DIFFERS, EXIT_DONE
from system import answer, here

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]
RECIPE = Path(__file__).parents[1] / "tuned.yaml"
BIG = ("--set", "data.options.size=256", "model.options.width=64", "batch_size=16", "shards=1", "--device", "cuda")
SMALL = ("--try", "none", "--workers", "0,1", "--prefetch", "2", "--seconds", "0.02", "--no-picture", "--json")


def test_shards_that_do_not_fit_into_a_part_of_the_gpu_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert here("tune", RECIPE, *BIG, *SMALL, "--memory", "400MiB", cwd=tmp_path) == EXIT_DIFFERS
    memory = answer(capsys)["memory"]
    assert memory["shards_that_fit"] in (2, 4, 8, 16)
    assert not list(tmp_path.iterdir())


def test_a_choice_is_of_the_gpus_of_the_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert here("tune", RECIPE, *BIG, *SMALL, cwd=tmp_path) == EXIT_DONE
    found = answer(capsys)
    assert found["place"]["machine"]["gpus"]
    assert found["memory"]["peak_bytes"] > 0
