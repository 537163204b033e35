"""Migrated scripts print the loss of the original scripts, on any number of processes."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from helpers.migration_pages import EXAMPLES, NAMES, PAGES, chinese_pages, page, updated_page
from helpers.system import environment, samestep
from samestep.config.key_suggestions import SYNONYMS, suggest

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def printed_loss(*arguments: object, cwd: Path) -> float:
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return loss_in(done.stdout)


def loss_in(text: str) -> float:
    return float(re.findall(r"loss (\d+\.\d{4})$", text, re.MULTILINE)[-1])


@pytest.mark.parametrize("name", NAMES)
def test_page_shows_current_diff(name: str) -> None:
    assert page(name).read_text(encoding="utf-8") == updated_page(name), "run python tests/helpers/migration_pages.py"


FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
FLAG = re.compile(r"^\| `(--?[a-z][\w-]*) ?([^`]*)` \| ([^|]*) \|", re.MULTILINE)


@pytest.mark.parametrize("chinese", chinese_pages(), ids=lambda path: path.name)
def test_chinese_page_has_the_code_of_the_english_page(chinese: Path) -> None:
    texts = [path.read_text(encoding="utf-8") for path in (chinese, chinese_pages()[chinese])]
    code, tables = ([FENCE.findall(text) for text in texts], [FLAG.findall(text) for text in texts])
    assert set(code[0]) <= set(code[1])
    assert [block for block in code[0] if "console" in block] == [block for block in code[1] if "console" in block]
    ours = [[(flag, value, re.findall(r"`([^`]+)`", cell)) for flag, value, cell in table] for table in tables]
    assert ours[0] == ours[1]


@pytest.mark.parametrize("name", ["ddp", "data-parallel", "segmentation", "accumulation"])
def test_flags_of_the_tables_have_the_key_of_the_error(name: str) -> None:
    rows = FLAG.findall((PAGES / f"{name}.md").read_text(encoding="utf-8"))
    assert len(rows) >= 5
    cells: dict[str, str] = {}
    for flag, _, cell in rows:
        cells[flag] = cells.get(flag, "") + cell
    for flag, cell in cells.items():
        if "`-" in cell:  # an option of `samestep train`
            assert (suggest(flag, SYNONYMS.values()) or flag) in cell, flag


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_migrated_script_gives_the_same_loss(name: str, tmp_path: Path) -> None:
    before, after = EXAMPLES / f"{name}_before.py", EXAMPLES / f"{name}_after.py"
    expected = printed_loss(*(TORCHRUN if name == "ddp" else ()), before, cwd=tmp_path)
    loss = printed_loss(after, cwd=tmp_path)
    assert loss == pytest.approx(expected, abs=2e-4)
    (tmp_path / "several").mkdir()
    done = samestep("run", "--processes", 3, after, cwd=tmp_path / "several")
    assert done.code == 0, done.err
    assert loss_in(done.out) == loss, "one and three processes"


@pytest.mark.long
@pytest.mark.parametrize("name", ["lightning_trainer", "accelerate_loop", "fabric_loop", "transformers_trainer"])
def test_script_of_a_framework_prints_the_same_loss_unchanged(name: str, tmp_path: Path) -> None:
    script = EXAMPLES.parent / f"frameworks/{name}.py"
    expected = printed_loss(script, cwd=tmp_path)
    done = samestep("run", "--processes", 3, script, cwd=tmp_path)
    assert done.code == 0, done.err
    assert loss_in(done.out) == pytest.approx(expected, abs=1.1e-4)


@pytest.mark.long
def test_migrated_plain_loop_resumes_on_another_number_of_processes(tmp_path: Path) -> None:
    script = EXAMPLES / "plain_after.py"
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
    loss = printed_loss(script, cwd=whole)
    with subprocess.Popen(
        [sys.executable, "-u", script], cwd=killed, env=environment(), stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        while not process.stdout.readline().startswith("epoch 3"):
            assert process.poll() is None
        process.kill()
    done = samestep("run", "--processes", 3, script, cwd=killed)
    assert done.code == 0, done.err
    assert "epoch 2" not in done.out
    assert loss_in(done.out) == loss
    expected, weights = (torch.load(folder / "digits.pt") for folder in (whole, killed))
    torch.testing.assert_close(weights, expected, rtol=1e-4, atol=1e-5)
