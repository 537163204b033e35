"""Every example of a pitfall is wrong where it says so, and right with Samestep; the page shows what they print."""

import importlib
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "pitfalls"
PAGE = (ROOT / "docs" / "exactness.md").read_text(encoding="utf-8")
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))
SHOWN = re.compile(r"^### [^\n]*/pitfalls/(\w+)\.py\)\n+```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)
HASH = re.compile(r"\b[0-9a-f]{12}\b")
NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e-?\d+)?")
ROUNDING = 1e-12


class Examples:
    """The examples, each run when it is first asked for, in this process: ranks are forks of one server."""

    def __init__(self) -> None:
        self._modules: dict[str, ModuleType] = {}
        self._found: dict[str, tuple[Any, str]] = {}

    def found(self, name: str) -> Any:
        """What `main` of an example returns."""
        return self._run(name)[0]

    def printed(self, name: str) -> str:
        """What `main` of an example prints."""
        return self._run(name)[1]

    def _run(self, name: str) -> tuple[Any, str]:
        if name not in self._found:
            with redirect_stdout(StringIO()) as output:
                found = importlib.import_module(name).main()
            self._found[name] = found, output.getvalue()
        return self._found[name]


@pytest.fixture(scope="module")
def examples() -> Iterator[Examples]:
    """Ranks import the files by name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield Examples()
    for name in NAMES:
        sys.modules.pop(name, None)


def test_evaluation_counts_the_samples_that_are_there(examples: Examples) -> None:
    alone, usual, ours = examples.found("padded_evaluation")
    assert ours == alone
    assert (alone[0], usual[0]) == (361, 364)
    assert usual[1] != alone[1]


def test_each_module_that_tests_import_has_a_name_of_its_own() -> None:
    """Python keeps modules by name: a second one would be the first, wherever the first was imported before."""
    folders = ("examples", "examples/pitfalls", "tests")
    times = Counter(path.stem for folder in folders for path in (ROOT / folder).glob("*.py"))
    assert len(times) > 50
    assert [name for name, number in times.items() if number > 1] == []


def test_token_losses_are_not_a_mean_of_means(examples: Examples) -> None:
    usual, ours = examples.found("mean_of_means")
    assert ours < ROUNDING
    assert usual > 0.01


def test_each_epoch_has_its_order(examples: Examples) -> None:
    alone, usual, ours = examples.found("forgotten_set_epoch")
    assert ours == alone
    assert len({tuple(order) for order in ours}) == 3
    assert len({tuple(order) for order in usual}) == 1


def test_batch_norm_has_the_group_that_is_said(examples: Examples) -> None:
    distances = examples.found("batch_norm")
    assert max(distances["samestep sync on 4"]) < ROUNDING
    assert min(distances["DDP on 4"]) > 0.01
    assert distances["samestep shard on 4"] == distances["samestep shard on 1"]
    assert distances["samestep shard on 4"][0] == pytest.approx(distances["DDP on 4"][0], rel=ROUNDING)


def test_learning_rate_and_batch_are_not_the_machines(examples: Examples) -> None:
    usual, ours = examples.found("learning_rate")
    assert len(set(ours)) == 1
    assert len(set(usual)) == len(usual)


def test_replicas_losses_are_not_averaged(examples: Examples) -> None:
    alone, usual, ours = examples.found("data_parallel_loss")
    assert ours == pytest.approx(alone, rel=ROUNDING)
    assert abs(usual - alone) > 0.01 * alone


def test_random_numbers_know_no_rank(examples: Examples) -> None:
    found = examples.found("dropout_and_augmentation")
    assert found["samestep on 4"] == found["samestep on 1"] == (16, 16, 16)
    assert found["one seed on 4"][:2] == (4, 4)
    assert found["seed + rank on 4"] == (16, 16, 0)


@pytest.mark.parametrize("name", NAMES)
def test_the_page_shows_what_is_printed(examples: Examples, name: str) -> None:
    """Words and numbers; where another processor rounds otherwise, a number may be a little off, and hashes others."""
    shown, printed = dict(SHOWN.findall(PAGE))[name], examples.printed(name)
    shown, printed = HASH.sub("HASH", shown), HASH.sub("HASH", printed)
    assert NUMBER.sub("N", shown) == NUMBER.sub("N", printed)
    numbers = [[float(number) for number in NUMBER.findall(text)] for text in (shown, printed)]
    assert numbers[0] == pytest.approx(numbers[1], rel=0.01, abs=ROUNDING)


def test_an_example_is_a_program() -> None:
    file = FOLDER / "data_parallel_loss.py"
    done = subprocess.run([sys.executable, file], text=True, capture_output=True, check=True, timeout=100)
    assert done.stdout.count("\n") == 3
    assert done.stderr == ""
