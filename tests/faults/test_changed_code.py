"""Code that is edited during a run: the run is refused, or ends with the weights of an undisturbed one."""

import json
import shutil
import time
from pathlib import Path

import pytest

from helpers.fault_cases import in_step, inject
from helpers.surroundings import RecordFault, nothing_left_behind, require_single_report, wait_for_end
from helpers.system import Running, here, last_saved, samestep, steps_saved, weights

RECIPE = Path(__file__).parents[1] / "helpers" / "faulty.yaml"
MODEL = """
from helpers.recorded import Net as Base
import my_constant

class Net(Base):
    def forward(self, images):
        return super().forward(images) * my_constant.FACTOR
"""
# Of two lengths: Python compares length and second of a module with its bytecode.
CONSTANT, CHANGED = "FACTOR = 1.0\n", "FACTOR = 1.50\n"
OWN_MODEL = ("model.name=my_model:Net",)
SAVING = ("--checkpoint-every", 3)


def project(path: Path) -> Path:
    """Write a model of the user and a module that the model imports, and return the path of the run."""
    (path / "my_model.py").write_text(MODEL, encoding="utf-8")
    (path / "my_constant.py").write_text(CONSTANT, encoding="utf-8")
    return path / "runs/a"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    path = tmp_path_factory.mktemp("undisturbed")
    run = project(path)
    assert here("train", RECIPE, "--name", "a", *OWN_MODEL, cwd=path) == 0
    return weights(run)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with a run on one process that a failure ended in step 7."""
    path = tmp_path_factory.mktemp("stopped")
    run = project(path)
    (path / "fault.json").write_text(json.dumps(in_step("raise", 0, 7)), encoding="utf-8")
    assert here("train", RECIPE, "--name", "a", *OWN_MODEL, *SAVING, cwd=path) == 1
    assert steps_saved(run)[-1] == 6
    return path


@pytest.fixture
def copy(stopped: Path, tmp_path: Path) -> Path:
    return shutil.copytree(stopped, tmp_path / "copy", symlinks=True)


def test_resume_of_changed_code_needs_acceptance(
    copy: Path, undisturbed: tuple[str, str], capsys: pytest.CaptureFixture[str], record_fault: RecordFault
) -> None:
    run = copy / "runs/a"
    before = (run / "environment.json").read_bytes()
    (copy / "my_constant.py").write_text(CHANGED, encoding="utf-8")
    for _ in range(2):  # a refused attempt is no acceptance
        capsys.readouterr()
        assert here("resume", run, cwd=copy) == 2
        report = capsys.readouterr().err
        assert "E_CODE_CHANGED" in report.splitlines()[0]
        assert "my_constant (" in report
        assert "my_model" not in report
        assert (run / "environment.json").read_bytes() == before
    accepted = shutil.copytree(copy, copy.parent / "accepted", symlinks=True)
    (copy / "my_constant.py").write_text(CONSTANT, encoding="utf-8")
    assert here("resume", run, cwd=copy) == 0
    assert weights(run) == undisturbed
    assert here("resume", accepted / "runs/a", "--accept-changes", cwd=accepted) == 0
    assert weights(accepted / "runs/a") != undisturbed
    record_fault("code is edited before resume", "exit code 2; undone: the same weights")


@pytest.mark.slow
def test_restart_does_not_use_changed_code(
    tmp_path: Path, undisturbed: tuple[str, str], record_fault: RecordFault
) -> None:
    run = project(tmp_path)
    (tmp_path / "pace").write_text("0.1", encoding="utf-8")
    arguments = ("train", RECIPE, "--name", "a", *OWN_MODEL, *SAVING, "--processes", 2, "--max-restarts", 2)
    with Running(*arguments, cwd=tmp_path) as running:
        running.until(lambda: last_saved(run), "a checkpoint")
        (tmp_path / "my_constant.py").write_text(CHANGED, encoding="utf-8")
        inject(tmp_path, {"kind": "kill", "rank": 1})
        running.until((tmp_path / "fired.json").exists, "the kill")
        with nothing_left_behind(running, tmp_path):
            done = wait_for_end(running, time.monotonic())
    titles = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert done.code == 2
    assert len(titles) == 1
    assert "E_CODE_CHANGED" in titles[0]
    (tmp_path / "my_constant.py").write_text(CONSTANT, encoding="utf-8")
    assert here("resume", run, cwd=tmp_path) == 0
    assert weights(run) == undisturbed
    record_fault("code is edited, then a rank is killed, restarts allowed", "exit code 2")


@pytest.mark.long
def test_changes_of_other_files_are_accepted(
    copy: Path, undisturbed: tuple[str, str], record_fault: RecordFault
) -> None:
    (copy / "other.py").write_text("1\n", encoding="utf-8")
    (copy / "my_constant.py").touch()
    moved = copy.rename(copy.parent / "moved")
    assert here("resume", moved / "runs/a", "--processes", 3, cwd=moved) == 0
    assert weights(moved / "runs/a") == undisturbed
    record_fault("a project is moved, and unrelated files are edited", "exit code 0")


LOOP = """
import sys, torch, samestep
from torch.utils.data import TensorDataset
import my_constant

inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
torch.manual_seed(0)
model = torch.nn.Linear(8, 3)
model = samestep.parallel(model)
optimizer = torch.optim.Adam(model.parameters())
dataset = TensorDataset(inputs, inputs[:, :3].argmax(dim=1))
batches = samestep.loader(dataset, batch_size=8, shuffle=True)
checkpoints = samestep.CheckpointManager("loop", model, batches, optimizer=optimizer)
checkpoints.resume(accept_changes="accept" in sys.argv)
for steps, (rows, classes) in enumerate(batches, start=1):
    torch.nn.functional.cross_entropy(model(rows), classes).backward()
    optimizer.step()
    optimizer.zero_grad()
    checkpoints.save()
    if steps == 4 and "stop" in sys.argv:
        break
"""


@pytest.mark.long
def test_a_script_does_not_resume_with_changed_code(tmp_path: Path, record_fault: RecordFault) -> None:
    project(tmp_path)
    script = tmp_path / "loop.py"
    script.write_text(LOOP, encoding="utf-8")
    assert here("run", "--processes", 2, script, "stop", cwd=tmp_path) == 0
    assert steps_saved_by(tmp_path) == [3, 4]
    for file, change in ((script, "\n# edited\n"), (tmp_path / "my_constant.py", CHANGED)):
        text = file.read_text(encoding="utf-8")
        file.write_text(text + change, encoding="utf-8")
        done = samestep("run", "--processes", 2, script, cwd=tmp_path)
        title = require_single_report(done, 2)
        assert "E_CODE_CHANGED" in title
        assert file.name in done.err
        assert steps_saved_by(tmp_path) == [3, 4]
        if file == script:
            file.write_text(text, encoding="utf-8")
    assert here("run", "--processes", 2, script, "accept", cwd=tmp_path) == 0
    assert steps_saved_by(tmp_path) == [7, 8]
    record_fault("a script is edited before it resumes", "exit code 2; with acceptance it resumes")


def steps_saved_by(path: Path) -> list[int]:
    return sorted(int(folder.name.removeprefix("step-")) for folder in (path / "loop").glob("step-*"))
