"""Command `samestep verify`: input errors, output and cleanup."""

import hashlib
import json
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.recorded import count_calls
from helpers.system import Running, answer, here, samestep, tree, until
from samestep.errors import EXIT_DIFFERS, EXIT_DONE, EXIT_STOPPED

PLANTED = Path(__file__).parents[1] / "planted"
RECIPE = Path(__file__).parents[1] / "helpers" / "recorded.yaml"
SAVING = Path(__file__).parents[1] / "helpers" / "saving_loop.py"

IDLE = "import samestep, torch\n\nsamestep.parallel(torch.nn.Linear(2, 2))\n"
OTHER = "import torch\n\ntorch.nn.Linear(2, 2)(torch.ones(1, 2))\n"
BY_HAND = "import os, torch.distributed as dist\n\ndist.init_process_group('gloo', rank=int(os.environ['RANK']))\n"
RAISING = "import samestep\n\nsamestep.init()\nraise ArithmeticError('no such number')\n"


@pytest.fixture
def scripts(tmp_path: Path) -> None:
    """Scripts that verify refuses, in the current folder of `refused`."""
    (tmp_path / "idle.py").write_text(IDLE)
    (tmp_path / "other.py").write_text(OTHER)
    (tmp_path / "by_hand.py").write_text(BY_HAND)


INPUT_ERRORS = {
    "digits --processes 1,two": "E_VALUE",
    "digits --processes 0": "E_VALUE",
    "digits --processes 1,9": "E_TOO_MANY_RANKS",
    "digits --kill-at 1 --resume-on 12": "E_TOO_MANY_RANKS",
    "digits --kill-at 1": "E_OPTION_CONFLICT",
    "digits --kill-at 4 --resume-on 1": "E_VALUE",
    "digits --out idle.py": "E_OUTPUT",
    "idle.py --processes 1,2": "E_NOTHING_OBSERVED",
    "other.py --processes 1,2": "E_NOTHING_OBSERVED",
    "images data.options.path=gone --processes 1,2": "E_FILE_MISSING",
}


@pytest.mark.usefixtures("scripts")
@pytest.mark.parametrize("arguments", INPUT_ERRORS)
def test_invalid_input_is_an_error(refused: Callable[..., str], arguments: str) -> None:
    assert f"[{INPUT_ERRORS[arguments]}]" in refused("verify", "--json", *arguments.split())


@pytest.mark.usefixtures("scripts")
def test_script_that_distributes_itself_is_one_for_the_audit(refused: Callable[..., str]) -> None:
    text = refused("verify", "--json", "by_hand.py", "--processes", "2,1")
    assert "error: by_hand.py distributes its work itself [E_NOTHING_OBSERVED]" in text
    assert "samestep audit -- COMMAND" in text


@pytest.mark.slow
def test_failed_script_is_reported_once_and_leaves_no_files(tmp_path: Path) -> None:
    (tmp_path / "raising.py").write_text(RAISING)
    done = samestep("verify", "raising.py", "--processes", "2,1", cwd=tmp_path)
    assert done.code == 1
    assert (
        len(re.findall(r"^error: rank \d failed.*: ArithmeticError: no such number \[E_\w+\]$", done.err, re.MULTILINE))
        == 1
    )
    assert done.err.count("Traceback") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["raising.py"]


@pytest.mark.slow
def test_certificate_of_a_script_with_arguments(tmp_path: Path) -> None:
    script = PLANTED / "right_resume.py"
    done = samestep("verify", script, "--processes", "2,1", "--steps", "2", "--", "{folder}", cwd=tmp_path)
    assert done.code == EXIT_DONE, done.err
    assert "holds: 2 runs computed the same, within rounding" in done.out
    assert re.search(
        r"^calls of Net on 2: \d divided, 1 whole \(1 of them the first of a kind\)$", done.out, re.MULTILINE
    )
    progress = [line for line in done.err.splitlines() if line.startswith("running")]
    assert progress == [
        "running right_resume.py on 2 processes",
        "running right_resume.py on 2 processes, perturbed",
        "running right_resume.py on 1 process",
        "running right_resume.py on 2 processes, other orders",
    ]
    [folder] = (tmp_path / "runs").iterdir()
    assert sorted(path.name for path in folder.iterdir()) == ["certificate.html", "certificate.json"]
    certificate = json.loads((folder / "certificate.json").read_text())
    assert (certificate["subject"], certificate["arguments"], certificate["steps"]) == (
        "right_resume.py",
        ["{folder}"],
        [1, 2],
    )
    assert certificate["environment"]["threads"] == [1]
    assert certificate["recipe"] is None
    hashes = {
        path: hashlib.sha256((PLANTED / path).read_bytes()).hexdigest() for path in ("right_resume.py", "parts.py")
    }
    assert certificate["sources"] == {"__main__": hashes["right_resume.py"], "parts": hashes["parts.py"]}
    assert hashes["parts.py"] in (folder / "certificate.html").read_text(encoding="utf-8")


@pytest.mark.long
@pytest.mark.slow
def test_files_in_the_folder_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "out" / "trials" / "notes.txt"
    file.parent.mkdir(parents=True)
    file.write_text("text")
    script = PLANTED / "right_unused_parameters.py"
    done = samestep("verify", script, "--processes", "1,2", "--out", "out", cwd=tmp_path)
    assert done.code == EXIT_DONE, done.err
    assert "turns values of rows into Python numbers" in done.out
    assert "turns values of rows into Python numbers" in (tmp_path / "out/certificate.html").read_text(encoding="utf-8")
    assert sorted(tree(tmp_path / "out")) == ["certificate.html", "certificate.json", "trials", "trials/notes.txt"]


HOLDING = """
import pathlib, time, torch, samestep

model = samestep.parallel(torch.nn.Linear(2, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()
    pathlib.Path("began").touch()
    time.sleep(0.1)
"""


@pytest.mark.slow
@pytest.mark.parametrize("subject", [RECIPE, pytest.param("train.py", marks=pytest.mark.long)])
def test_interrupt_leaves_no_process_and_no_files(tmp_path: Path, subject: Path | str) -> None:
    (tmp_path / "train.py").write_text(HOLDING, encoding="utf-8")
    (tmp_path / "hold").write_text("0 1", encoding="utf-8")  # of the recipe
    with Running("verify", subject, "--processes", "3", cwd=tmp_path) as running:
        running.until(lambda: count_calls(tmp_path) or (tmp_path / "began").exists(), "a step")
        running.kill_group(signal.SIGINT)
        running.until(lambda: "stopping; press Ctrl-C" in running.errors, "the note on Ctrl-C")
        (tmp_path / "hold").unlink()
        done = running.wait(60)
        assert done.code == EXIT_STOPPED, done.err
        assert "Traceback" not in done.err
        until(lambda: not running.processes(), "every process has ended", 30)
    assert not (tmp_path / "runs").exists()


@pytest.fixture
def saving(tmp_path: Path) -> Path:
    """Folder with a script that writes checkpoints to a fixed folder."""
    shutil.copy(SAVING, tmp_path / "train.py")
    return tmp_path


def begins(folder: Path) -> list[int]:
    """Return the steps at which the runs of the script began, and forget them."""
    file = folder / "positions.txt"
    positions = [int(line) for line in file.read_text(encoding="utf-8").split()]
    file.unlink()
    return positions


@pytest.mark.slow
def test_trials_neither_read_nor_write_the_checkpoints_and_the_run_of_a_script(saving: Path) -> None:
    assert here("verify", "train.py", "--processes", "1,2", "--out", "fresh", "--", 1, cwd=saving) == EXIT_DONE
    assert sorted(path.name for path in saving.iterdir()) == ["fresh", "positions.txt", "train.py"]
    assert here("run", "--processes", 2, "train.py", 2, cwd=saving) == EXIT_DONE
    assert set(begins(saving)) == {0}
    before = tree(saving)
    assert "checkpoints/step-000000008/model.safetensors" in before
    # The run could be continued; that of two epochs has ended.
    assert here("verify", "train.py", "--processes", "1,2", "--out", "out", "--", 4, cwd=saving) == EXIT_DONE
    certificate = json.loads((saving / "out" / "certificate.json").read_text(encoding="utf-8"))
    assert (certificate["holds"], certificate["steps"]) == (True, list(range(1, 17)))
    assert set(begins(saving)) == {0}
    shutil.rmtree(saving / "out")
    assert tree(saving) == before


@pytest.mark.slow
def test_killed_script_resumes_from_the_checkpoints_of_its_trial(saving: Path) -> None:
    assert here("run", "--processes", 1, "train.py", 1, cwd=saving) == EXIT_DONE
    assert begins(saving) == [0]
    before = tree(saving)
    killed = ("--processes", "1,2", "--kill-at", 6, "--resume-on", 1)
    assert here("verify", "train.py", *killed, "--out", "out", "--", 2, cwd=saving) == EXIT_DONE
    # Three complete trials; two killed ones with their resumptions; one with another order of sets.
    assert begins(saving) == [0, 0, 0, 0, 4, 0, 4, 0]
    shutil.rmtree(saving / "out")
    assert tree(saving) == before


UNCHANGED = """
import csv, os
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

inputs = torch.randn(512, 64)
data = TensorDataset(inputs, inputs.sum(dim=1).gt(0).long())
model = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Dropout(0.1), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
os.makedirs("results/new", exist_ok=True)
with open("results/losses.csv", "w", newline="") as file:
    for batch, targets in DataLoader(data, batch_size=128, shuffle=True):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(batch), targets)
        loss.backward()
        optimizer.step()
        csv.writer(file).writerow([loss.item()])
os.remove("results/stale.txt")
print(f"loss {loss.item():.4f}")
torch.save({"model": model.state_dict(), "epoch": 1}, "results/new/model.pt")
"""


@pytest.mark.slow
@pytest.mark.parametrize("options", [pytest.param((), marks=pytest.mark.long), ("--exact",)])
def test_unchanged_script_equals_plain_python_and_leaves_no_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...]
) -> None:
    (tmp_path / "train.py").write_text(UNCHANGED, encoding="utf-8")
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "losses.csv").write_text("0.1\n", encoding="utf-8")
    (tmp_path / "results" / "stale.txt").write_text("stale", encoding="utf-8")
    before = tree(tmp_path)
    arguments = ("--processes", "1,2,3", *options, "--json", "--out", "out")
    assert here("verify", "train.py", *arguments, cwd=tmp_path) == EXIT_DONE
    certificate = answer(capsys)
    assert certificate["reference"] == ("1 process" if options else "plain Python")
    assert [one["processes"] for one in certificate["comparisons"]][-2:] == ["2 processes", "3 processes"]
    for comparison in certificate["comparisons"]:
        # Four losses, the weights and the number of the epoch; the names of two files.
        assert comparison["compared"]["written files"] == 4 + 6 + 1 + 2
        assert comparison["compared"]["printed numbers"] == 1
        assert (comparison["first_difference"] is None) >= bool(options)
    for processes in ("2", "3"):
        [calls] = certificate["calls"][processes]
        divided = 4 if options else 3  # without the first call of a kind
        assert (calls["module"], calls["divided"], calls["whole"]) == ("Sequential", divided, 0)
    assert certificate["notes"][0].startswith("TensorDataset: each process reads its own samples")
    shutil.rmtree(tmp_path / "out")
    assert tree(tmp_path) == before


BY_PROCESS = """
import os, torch

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    {}
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
OF_PROCESS = {
    "model.register_forward_hook(lambda *call: call[2] * (1 + os.getpid() % 1000 / 1e3)); "
    "loss = model(torch.ones(8, 4)).sum()": "random state in the model",
    "loss = model(torch.full((8, 4), os.getpid() % 1000 / 1e3)).sum()": "data order",
}


@pytest.mark.slow
@pytest.mark.parametrize("line", OF_PROCESS)
def test_cause_of_a_difference_of_an_unchanged_script_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    (tmp_path / "train.py").write_text(BY_PROCESS.format(line), encoding="utf-8")
    code = here("verify", "train.py", "--processes", "1,2", "--json", "--out", "out", cwd=tmp_path)
    certificate = answer(capsys)
    assert (code, [one["cause"] for one in certificate["findings"]]) == (EXIT_DIFFERS, [OF_PROCESS[line]])


@pytest.mark.slow
def test_time_limit_of_an_unchanged_script_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = "import time; begin = time.perf_counter()\nwhile time.perf_counter() - begin < 0.5:\n    time.sleep(0.01)"
    script = BY_PROCESS.replace("for _ in range(2):", lines).format("loss = model(torch.ones(8, 4)).sum()")
    (tmp_path / "train.py").write_text(script, encoding="utf-8")
    code = here("verify", "train.py", "--processes", "1,2", "--json", "--out", "out", cwd=tmp_path)
    [finding] = answer(capsys)["findings"]
    assert code == EXIT_DIFFERS
    assert finding["cause"] in ("different steps on different ranks", "data order")


DRAWING = """
import torch
from torch.utils.data import DataLoader, Dataset

class Noisy(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.rand(4)

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for batch in DataLoader(Noisy(), batch_size=6):
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_data_that_draw_are_compared_with_the_first_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text(DRAWING, encoding="utf-8")
    assert here("verify", "train.py", "--processes", "1,2", "--json", "--out", "out", cwd=tmp_path) == EXIT_DONE
    certificate = answer(capsys)
    assert (certificate["reference"], certificate["steps"]) == ("1 process", [1, 2, 3, 4])
    assert any("are not those of plain Python" in note for note in certificate["notes"])
