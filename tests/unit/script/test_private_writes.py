"""Random operations on files have the same results on every rank as in one process, in any order of the ranks."""

import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.file_ranks import Rank, on_ranks, tree

NAMES = ["a", "b", "c", "d/x", "d/y", "e", "e/f", "l", "d", "e/g", "l/x", "../work/a", "./b"]


def _write(mode: str) -> Callable[..., Any]:
    def write(path: str, other: str, text: str) -> Any:
        with open(path, mode) as file:
            start = file.read(3) if mode == "r+" else ""
            file.write(text)
            return start

    return write


def _entries(path: str, other: str, text: str) -> Any:
    with os.scandir(path) as entries:
        return sorted((entry.name, entry.is_dir(), entry.is_file(), entry.is_symlink()) for entry in entries)


def _exists(path: str, other: str, text: str) -> Any:
    functions = (os.path.exists, os.path.isdir, os.path.isfile, os.path.islink, os.path.lexists)
    resolved = os.path.realpath(path).rpartition("/work")[2]
    return *(function(path) for function in functions), os.access(path, os.R_OK), resolved


def _is_apart(path: str, other: str) -> bool:
    return not f"{os.path.abspath(other)}/".startswith(f"{os.path.abspath(path)}/") and "l" not in path + other


def _copy_tree(path: str, other: str, text: str) -> Any:
    if _is_apart(path, other):
        shutil.copytree(path, other, symlinks=True, dirs_exist_ok=len(text) % 2 == 0)


def _move(path: str, other: str, text: str) -> Any:
    if _is_apart(path, other):
        shutil.move(path, other)


OPERATIONS: list[Callable[[str, str, str], Any]] = [
    *(_write(mode) for mode in ("w", "w", "a", "a", "x", "r+")),
    *(_entries, _exists, _copy_tree, _move),
    *(lambda path, other, text: Path(path).read_text(),) * 3,
    lambda path, other, text: os.mkdir(path),
    lambda path, other, text: Path(path).mkdir(parents=True, exist_ok=True),
    lambda path, other, text: os.remove(path),
    lambda path, other, text: os.rmdir(path),
    lambda path, other, text: shutil.rmtree(path, ignore_errors=True),
    *(lambda path, other, text: os.rename(path, other),) * 2,
    lambda path, other, text: os.replace(path, other),
    lambda path, other, text: os.symlink(os.path.basename(path), other) if path[-1] != other[-1] else None,
    lambda path, other, text: sorted(os.listdir(path)),
    lambda path, other, text: sorted((folder, sorted(some), sorted(files)) for folder, some, files in os.walk(".")),
    lambda path, other, text: sorted(map(str, Path().glob("**/*"))),
    lambda path, other, text: os.stat(path).st_size if os.path.isfile(path) else None,
    lambda path, other, text: os.truncate(path, 5),
    lambda path, other, text: Path(path).touch(),
    lambda path, other, text: shutil.copy2(path, other) and None,
]


def _run(seed: int, pause: Callable[[], None], exchange: Callable[[], None] = lambda: None) -> list[Any]:
    """Run 60 operations of this seed; return the results, or the kinds of errors."""
    draws = random.Random(seed)
    results = []
    for step in range(60):
        if step == 0 or (step % 20 == 0 and seed % 2):
            exchange()
        operation = draws.randrange(len(OPERATIONS))
        path, other = draws.choice(NAMES), draws.choice(NAMES)
        pause()
        try:
            result = OPERATIONS[operation](path, other, str(draws.random()) * draws.randint(1, 4))
        except shutil.Error:
            result = "shutil.Error"
        except OSError as error:
            # A file in the place of a folder is refused by either of these.
            number = {20: 2, 22: 2, 21: 39}.get(error.errno or 0, error.errno)
            result = (number, str(error.filename) if number not in (39, 40) else "")
        results.append((step, operation, path, other, result))
    return results


def _prepared(work: Path) -> Path:
    (work / "d").mkdir(parents=True)
    (work / "e").mkdir()
    for name, text in (("a", "old a"), ("d/x", "old x"), ("d/y", "old y" * 30)):
        (work / name).write_text(text)
    return work


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(1, marks=pytest.mark.slow),
        pytest.param(21, marks=pytest.mark.long),
        pytest.param(41, marks=pytest.mark.long),
    ],
)
def test_random_operations_have_the_results_of_one_process(first: int, tmp_path: Path) -> None:
    previous = os.getcwd()
    for seed in range(first, first + 20):
        plain = _prepared(tmp_path / f"{seed}/plain/work")
        os.chdir(plain)
        try:
            expected = _run(seed, lambda: None)
        finally:
            os.chdir(previous)

        def body(rank: Rank, seed: int = seed) -> Any:
            pauses = random.Random(seed * 10 + rank.rank)
            return _run(seed, lambda: time.sleep(pauses.choice([0, 0, 0.001])), rank.exchange)

        work = _prepared(tmp_path / f"{seed}/ranks/work")
        results = on_ranks(body, work, keep_bytes=2**20)
        for rank, result in enumerate(results):
            assert isinstance(result, list), result
            assert [one for one in zip(result, expected, strict=True) if one[0] != one[1]] == [], (seed, rank)
        assert tree(work) == tree(plain), seed
