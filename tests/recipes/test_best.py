"""Selection of the best checkpoint of a recipe."""

from pathlib import Path

import pytest

from helpers.system import events, here
from samestep.errors import EXIT_DONE, EXIT_INPUT
from samestep.metrics.metrics import BestRule


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
    assert here("train", "digits", "--name", "a", "--set", *small, "best_by=loss", "best_mode=max", cwd=tmp_path) == 0
    run = tmp_path / "runs" / "a"
    first, second = events(run, "evaluation")
    assert first["loss"] > second["loss"]
    assert (first["is_best"], second["is_best"]) == (True, False)
    assert (run / "checkpoints" / "best").resolve() != (run / "checkpoints" / "last").resolve()
    assert here("train", "digits", "--name", "b", "--set", *small, "best_by=f1", cwd=tmp_path) == EXIT_INPUT
    assert not (tmp_path / "runs" / "b").exists()
    assert here("eval", run, "--checkpoint", "best", cwd=tmp_path) == EXIT_DONE
