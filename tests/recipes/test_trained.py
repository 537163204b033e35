"""What a model began with is not needed again once a checkpoint has its weights."""

from pathlib import Path

import pytest
from safetensors.torch import save_file

from samestep.recipes.digits import DigitsNet
from system import here, weights

SMALL = ("epochs=2", "model.options.width=8", "batch_size=256")


@pytest.mark.slow
def test_pretrained_weights_may_go_once_there_is_a_checkpoint(tmp_path: Path) -> None:
    file = tmp_path / "given.safetensors"
    save_file(DigitsNet(width=8).state_dict(), file)
    given = ("--set", *SMALL, f"model.pretrained={file}")
    assert here("train", "digits", "--name", "a", *given, cwd=tmp_path) == 0
    file.unlink()
    run = tmp_path / "runs/a"
    before = weights(run)
    assert here("eval", run, cwd=tmp_path) == 0
    assert here("resume", run, "--processes", 3, cwd=tmp_path) == 0
    assert weights(run) == before
    assert here("export", run, cwd=tmp_path) == 0
    assert here("train", "digits", "--name", "b", *given, cwd=tmp_path) == 2, "a new run needs them"
