"""Pitfall examples: the common method is wrong, Samestep's is right, and the documentation shows their output."""

import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "pitfalls"
PAGES = [ROOT / "docs" / "concepts" / "seven-mistakes.md", ROOT / "docs" / "start" / "migrate" / "data-parallel.md"]
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))
SHOWN = re.compile(r"^`examples/pitfalls/(\w+)\.py`\n+```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)
HASH = re.compile(r"\b[0-9a-f]{12}\b")
NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e-?\d+)?")
ROUNDING = 1e-12
pytestmark = pytest.mark.slow  # each example starts ranks several times


class Examples:
    """Examples, each run on first use in this process, so that ranks are forks of one server."""

    def __init__(self) -> None:
        self._modules: dict[str, ModuleType] = {}
        self._results: dict[str, tuple[Any, str]] = {}

    def result(self, name: str) -> Any:
        """Return the result of an example's `main`."""
        return self._run(name)[0]

    def printed(self, name: str) -> str:
        """Return the output of an example's `main`."""
        return self._run(name)[1]

    def _run(self, name: str) -> tuple[Any, str]:
        if name not in self._results:
            with redirect_stdout(StringIO()) as output:
                result = importlib.import_module(name).main()
            self._results[name] = result, output.getvalue()
        return self._results[name]


@pytest.fixture(scope="module")
def examples() -> Iterator[Examples]:
    """Return the examples; ranks import their files by name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield Examples()
    for name in NAMES:
        sys.modules.pop(name, None)


def test_evaluation_counts_each_sample_once(examples: Examples) -> None:
    alone, usual, ours = examples.result("padded_evaluation")
    assert ours == alone
    assert (alone[0], usual[0]) == (361, 364)
    assert usual[1] != alone[1]


def test_token_loss_is_not_a_mean_of_means(examples: Examples) -> None:
    usual, ours = examples.result("mean_of_means")
    assert ours < ROUNDING
    assert usual > 0.01


def test_each_epoch_has_another_order(examples: Examples) -> None:
    alone, usual, ours = examples.result("forgotten_set_epoch")
    assert ours == alone
    assert len({tuple(order) for order in ours}) == 3
    assert len({tuple(order) for order in usual}) == 1


def test_batch_norm_uses_the_whole_batch(examples: Examples) -> None:
    distances = examples.result("batch_norm")
    assert max(distances["samestep on 4"]) < ROUNDING
    assert min(distances["DDP on 4"]) > 0.01


def test_learning_rate_and_batch_size_are_independent_of_processes(examples: Examples) -> None:
    usual, ours = examples.result("learning_rate")
    assert [steps for steps, _ in ours] == [24, 24, 24]
    assert [loss for _, loss in ours] == pytest.approx([ours[0][1]] * 3, rel=1e-4)
    assert len({round(loss, 3) for _, loss in usual}) == 3


def test_losses_of_replicas_are_not_averaged(examples: Examples) -> None:
    alone, usual, ours = examples.result("data_parallel_loss")
    assert ours == pytest.approx(alone, rel=ROUNDING)
    assert abs(usual - alone) > 0.01 * alone


def test_random_numbers_are_independent_of_ranks(examples: Examples) -> None:
    counts = examples.result("dropout_and_augmentation")
    assert counts["samestep on 4"] == counts["samestep on 1"] == (16, 16, 16)
    assert counts["one seed on 4"][:2] == (4, 4)
    assert counts["seed + rank on 4"] == (16, 16, 0)


def test_replicas_are_trained_together(examples: Examples) -> None:
    among, usual, ours = examples.result("skipped_wrapper")
    assert ours < ROUNDING
    assert min(among, usual) > 0.01


@pytest.mark.parametrize("name", NAMES)
def test_documentation_shows_the_output(examples: Examples, name: str) -> None:
    """Words are equal; numbers may differ by rounding and hashes may differ on another processor."""
    texts = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    shown, printed = dict(SHOWN.findall(texts))[name], examples.printed(name)
    shown, printed = HASH.sub("HASH", shown), HASH.sub("HASH", printed)
    assert NUMBER.sub("N", shown) == NUMBER.sub("N", printed)
    numbers = [[float(number) for number in NUMBER.findall(text)] for text in (shown, printed)]
    assert numbers[0] == pytest.approx(numbers[1], rel=0.01, abs=ROUNDING)


def test_example_runs_as_a_script() -> None:
    file = FOLDER / "data_parallel_loss.py"
    done = subprocess.run([sys.executable, file], text=True, capture_output=True, check=True, timeout=100)
    assert done.stdout.count("\n") == 3
    assert done.stderr.count("\n") == 1  # the calls were divided
