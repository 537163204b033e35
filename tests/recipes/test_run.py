"""Runs of recipes: training, evaluation, predictions and memory of GPUs."""

from pathlib import Path

import pytest
from safetensors.torch import save_file

from helpers.system import events, here, tree, weights
from samestep.distributed.devices import GpuMemory
from samestep.distributed.world import World
from samestep.errors import EXIT_DONE, EXIT_FAILED, EXIT_INPUT, InputError
from samestep.metrics.metrics import BestRule
from samestep.recipes.events import memory_event
from samestep.recipes.predict import picture_paths
from samestep.tools.top import read_status
from samestep.zoo.digits import DigitsNet

RECIPE = Path(__file__).parents[1] / "helpers" / "recorded.yaml"


@pytest.mark.parametrize("microbatches", [pytest.param(8, marks=pytest.mark.slow), "auto"])
def test_options_that_a_model_refuses_leave_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], microbatches: object
) -> None:
    settings = ("model.options.width=-3", f"microbatches={microbatches}")
    assert here("train", "digits", "--name", "a", "--processes", 2, *settings, cwd=tmp_path) == EXIT_INPUT
    err = capsys.readouterr().err
    assert "model.options.width is -3" in err
    assert "[E_VALUE]" in err
    assert "Traceback" not in err
    assert not tree(tmp_path)


def test_failure_of_user_code_in_the_build_is_logged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_net.py").write_text("def net():\n    raise RuntimeError('not yet')\n", encoding="utf-8")
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    name = "model.name=broken_net:net"
    assert here("train", RECIPE, "--name", "a", name, cwd=tmp_path) == EXIT_FAILED
    assert "broken_net.py" in capsys.readouterr().err
    (failure,) = events(tmp_path / "runs" / "a", "failure")
    assert (failure["code"], failure["text"]) == ("E_RANK_FAILED", "RuntimeError: not yet")
    assert read_status(tmp_path / "runs" / "a").state == "failed"


# --- best checkpoint ---


@pytest.mark.parametrize(
    ("by", "mode", "metrics", "rule"),
    [
        (None, None, ("accuracy", "top5"), BestRule("accuracy", "max")),
        (None, None, (), BestRule("loss", "min")),
        (None, None, ("perplexity",), BestRule("loss", "min")),
        ("perplexity", None, ("accuracy", "perplexity"), BestRule("perplexity", "min")),
        ("top5", None, ("accuracy", "top5"), BestRule("top5", "max")),
        ("loss_tokens", None, (), BestRule("loss_tokens", "min")),
        ("loss", "max", (), BestRule("loss", "max")),
    ],
)
def test_defaults(by: str | None, mode: str | None, metrics: tuple[str, ...], rule: BestRule) -> None:
    assert BestRule.of(by, mode, metrics) == rule  # type: ignore[arg-type]


@pytest.mark.slow
def test_recipe_selects_the_best_checkpoint_by_its_rule(tmp_path: Path) -> None:
    small = ("epochs=2", "batch_size=256", "model.options.width=4")
    assert here("train", "digits", "--name", "a", *small, "best_by=loss", "best_mode=max", cwd=tmp_path) == 0
    run = tmp_path / "runs" / "a"
    first, second = events(run, "evaluation")
    assert first["loss"] > second["loss"]
    assert (first["is_best"], second["is_best"]) == (True, False)
    assert (run / "checkpoints" / "best").resolve() != (run / "checkpoints" / "last").resolve()
    assert here("train", "digits", "--name", "b", *small, "best_by=f1", cwd=tmp_path) == EXIT_INPUT
    assert not (tmp_path / "runs" / "b").exists()
    assert here("eval", run, "--checkpoint", "best", cwd=tmp_path) == EXIT_DONE


# --- models of checkpoints do not need their initial weights; tasks have the class names of the run ---


SMALL = ("epochs=2", "model.options.width=8", "batch_size=256")


@pytest.mark.slow
def test_pretrained_file_is_not_needed_after_a_checkpoint(tmp_path: Path) -> None:
    file = tmp_path / "initial.safetensors"
    save_file(DigitsNet(width=8).state_dict(), file)
    overrides = (*SMALL, f"model.pretrained={file}")
    assert here("train", "digits", "--name", "a", *overrides, cwd=tmp_path) == 0
    file.unlink()
    run = tmp_path / "runs/a"
    before = weights(run)
    assert here("eval", run, cwd=tmp_path) == 0
    assert here("resume", run, "--processes", 3, cwd=tmp_path) == 0
    assert weights(run) == before
    assert here("export", run, cwd=tmp_path) == 0
    assert here("train", "digits", "--name", "b", *overrides, cwd=tmp_path) == 2, "a new run needs the file"


def test_pictures_replace_neither_each_other_nor_inputs(tmp_path: Path) -> None:
    left, right, other = (tmp_path / name for name in ("left/7.png", "right/7.png", "left/8.jpg"))
    assert picture_paths([left, other], tmp_path) == [tmp_path / "7.png", tmp_path / "8.png"]
    for files, out in (([left, right], tmp_path), ([left, other], tmp_path / "left"), ([left, left], tmp_path)):
        with pytest.raises(InputError) as error:
            picture_paths(files, out)
        assert error.value.code == "E_OUTPUT"


def test_memory_of_an_epoch(alone: World, monkeypatch: pytest.MonkeyPatch) -> None:
    assert memory_event(alone) is None  # without GPUs
    unit = 2**30
    memory = GpuMemory(allocated=unit, peak=6 * unit, reserved=8 * unit, free=70 * unit, total=80 * unit)
    monkeypatch.setattr("samestep.recipes.events.gpu_memory", lambda: memory)
    event = memory_event(alone)
    assert event is not None
    assert "6 GiB and 2 GiB for connections, of 80 GiB" in event.pop("text")
    assert event == {"peak_bytes": 6 * unit, "other_bytes": 2 * unit, "total_bytes": 80 * unit}
