"""Every command and code block of the documents is run, and its output is the documented one."""

import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from helpers.system import here
from samestep.recipes.recipe_files import make_recipe

ROOT = Path(__file__).parents[2]
# A Chinese page has the commands of the English page (tests/docs/test_migrate.py).
PAGES = [path for path in (ROOT / "docs").rglob("*.md") if not path.name.endswith(".zh.md")]
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES])
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Pages with Python blocks in the quick tests.
QUICK = ("README.md", "own-loop.md")
HASH = re.compile(r"\b[0-9a-f]{64}\b")
DISTANCE = re.compile(r"\d\.\de-\d\d")
# Syntax that needs a shell.
SHELL = re.compile(r"[|<>&;$`]")
INDENTED_MAKE = re.compile(r"^    make ([\w-]+)", re.MULTILINE)


@dataclass(frozen=True)
class Command:
    """A command as a document types it, and the output it shows."""

    line: str
    shown: list[str]


def blocks(document: Path, language: str) -> list[str]:
    return [body for found, body in FENCE.findall(document.read_text(encoding="utf-8")) if found == language]


def commands(block: str) -> list[Command]:
    found: list[Command] = []
    for line in block.splitlines():
        if line.startswith("$ "):
            found.append(Command(line.removeprefix("$ "), []))
        else:
            found[-1].shown.append(line)
    return found


def without_numbers(line: str) -> str:
    """A line of output without its numbers: another kind of processor is faster, and has other last bits."""
    line = HASH.sub("HASH", line.removesuffix("  best"))
    if DISTANCE.search(line):  # a small one can be zero on another kind of processor
        line = re.sub(r" {3,}bits", "   1.0e-07", line)
    return re.sub(r" *\d[\d,.]*", " N", line)  # columns of numbers are aligned at the right


@pytest.fixture
def place(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    return tmp_path


def in_shell(line: str, place: Path) -> str:
    """Return the output of a line in a shell."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "COLUMNS": "200"}
    done = subprocess.run(
        ["bash", "-c", line], cwd=place, env=environment, text=True, capture_output=True, check=False, timeout=110
    )
    assert done.returncode == 0, f"$ {line}\n{done.stdout}{done.stderr}"
    return shown_of(line, done.stdout, done.stderr)


def shown_of(line: str, out: str, err: str) -> str:
    """Return the output as documents show it: with the progress lines, for training."""
    return err + out if "train" in line else out


def marks_of_blocks(document: Path) -> list[pytest.MarkDecorator]:
    """The Python blocks of the strategies' pages have their turn in the long tests."""
    if document.name in QUICK:
        return []
    return [pytest.mark.long if document.parent.name == "strategies" else pytest.mark.slow]


def marked(document: Path) -> Any:
    """The commands of other pages have their turn in the long tests."""
    is_long = document.name != "README.md"
    return pytest.param(document, marks=pytest.mark.long if is_long else pytest.mark.slow, id=document.name)


@pytest.fixture
def in_turn(place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[[str], str]:
    """The same, but the command's own process is this one, so that its ranks are forked from one server for all."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")

    def ran(line: str) -> str:
        command, *arguments = shlex.split(line)
        # Ranks of `samestep run` write to the descriptors of the fork server.
        if command != "samestep" or arguments[0] == "run" or SHELL.search(line):
            return in_shell(line, place)
        capfd.readouterr()
        code = here(*arguments, cwd=place)
        out, err = capfd.readouterr()
        assert code == 0, f"$ {line}\n{out}{err}"
        return shown_of(line, out, err)

    return ran


@pytest.mark.timeout(400)
@pytest.mark.parametrize("document", [marked(document) for document in DOCUMENTS if blocks(document, "console")])
def test_commands_do_what_is_shown(document: Path, place: Path, in_turn: Callable[[str], str]) -> None:
    lines = [command for block in blocks(document, "console") for command in commands(block)]
    hashes: set[str] = set()
    for number, command in enumerate(lines):
        is_typed = document.name == "README.md" and number == 0  # as it stands
        printed = in_shell(command.line, place) if is_typed else in_turn(command.line)
        hashes |= set(HASH.findall(printed))
        if command.shown:
            shown = [without_numbers(line) for line in printed.splitlines()]
            assert shown == [without_numbers(line) for line in command.shown], command.line
    assert len(hashes) <= 1, "a document trains the same thing in several ways, to the same bits"


@pytest.mark.parametrize(
    "document",
    [
        pytest.param(document, marks=marks_of_blocks(document), id=document.name)
        for document in DOCUMENTS
        if blocks(document, "python")
    ],
)
def test_python_blocks_run(document: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are forks of a server that has imported torch, also those that a block itself starts."""
    monkeypatch.chdir(place)
    for number, block in enumerate(blocks(document, "python")):
        script = place / f"block{number}.py"
        script.write_text(block, encoding="utf-8")
        if document.parent.name == "strategies" or "samestep.launch(" in block:
            in_shell(f"python {script}", place)
        elif "__main__" in block:
            with warnings.catch_warnings():
                warnings.simplefilter("default")  # those of other packages
                runpy.run_path(str(script), run_name="__main__")
        else:
            assert here("run", "--processes", 2, script, cwd=place) == 0


def test_yaml_recipes_are_valid() -> None:
    recipes = [block for document in DOCUMENTS for block in blocks(document, "yaml")]
    assert recipes
    for recipe in recipes:
        make_recipe(yaml.safe_load(recipe), (), origin="a document")


@pytest.mark.slow
def test_recipe_of_the_recipes_page_trains(place: Path) -> None:
    page = ROOT / "docs" / "guides" / "recipes.md"
    (place / "points.py").write_text(blocks(page, "python")[0], encoding="utf-8")
    (place / "points.yaml").write_text(blocks(page, "yaml")[0], encoding="utf-8")
    printed = in_shell("samestep train points.yaml --processes 3 --name points", place)
    assert "evaluated   200 samples" in printed


def test_own_loop_page_shows_the_example_as_it_is() -> None:
    example = (ROOT / "examples" / "plain_loop.py").read_text(encoding="utf-8")
    assert blocks(ROOT / "docs" / "start" / "own-loop.md", "python")[0] == example


def test_make_targets_of_the_documents_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = {target for document in DOCUMENTS for target in INDENTED_MAKE.findall(document.read_text(encoding="utf-8"))}
    assert {"demo", "test"} <= named
    for target in named:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_recipe_keys_are_all_documented() -> None:
    page = (ROOT / "docs" / "reference" / "recipe.md").read_text(encoding="utf-8")
    raw = yaml.safe_load(blocks(ROOT / "docs" / "guides" / "recipes.md", "yaml")[0])
    from samestep.recipes.recipe_files import recipe_data

    data = recipe_data(make_recipe(raw, (), origin="a document"))
    for key, value in data.items():
        inner = [f"{key}.{name}" for name in value] if isinstance(value, dict) else [key]
        for name in inner:
            assert f"`{name}`" in page, name
