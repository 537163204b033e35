"""`samestep audit` names every planted mistake, and reports nothing about correct scripts."""

import json
import os
import pty
import signal
import sys
import termios
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from helpers.system import COMMAND, Done, Running, environment, samestep
from samestep.errors import EXIT_DIFFERS, EXIT_DONE, EXIT_FAILED, EXIT_INPUT
from samestep.tools.audit.step_findings import FIXES
from samestep.tools.audit.worlds import group_worlds

SCRIPTS = Path(__file__).parent / "scripts"
LAUNCHER = SCRIPTS / "fork_ranks.py"
# Names of the findings of each script.
MISTAKES = {
    "accelerate_evaluation": {"evaluation-counted-twice"},
    "accelerate_files": {"files-written-by-several-ranks"},
    "accelerate_loader": {"repeated-samples"},
    "accelerate_loss": {"loss-normalisation"},
    "accelerate_model": {"unreduced-gradients"},
    "accelerate_schedule": {"schedule-stepped-too-often"},
    "augmentation_equal": {"equal-random-draws"},
    "average_buffers": {"different-buffers"},
    "average_on_main": {"different-parameters"},
    "average_swapped": {"different-parameters"},
    "buffers": {"different-buffers"},
    "copies": {"independent-copies"},
    "copies_of_parts": {"independent-copies"},
    "dropout_equal": {"equal-random-draws"},
    "evaluation_dropped": {"evaluation-counted-twice"},
    "evaluation_overlap": {"evaluation-counted-twice"},
    "evaluation_padded": {"evaluation-counted-twice"},
    "fabric_evaluation": {"evaluation-counted-twice"},
    "fabric_loader": {"repeated-samples"},
    "fabric_module": {"unreduced-gradients"},
    "fabric_order": {"repeated-order"},
    "files": {"files-written-by-several-ranks"},
    "gradients_not_reduced": {"unreduced-gradients"},
    "gradients_of_module": {"unreduced-gradients"},
    "learning_rate": {"different-learning-rates"},
    "lightning": {"repeated-samples", "files-written-by-several-ranks"},
    "lightning_evaluation": {"evaluation-counted-twice"},
    "lightning_schedule": {"schedule-stepped-too-often"},
    "lightning_seed": {"equal-random-draws"},
    "loaded_on_main": {"different-parameters"},
    "loss_mean": {"loss-normalisation"},
    "missing_samples": {"missing-samples"},
    "order_repeated": {"repeated-order"},
    "parameters_initial": {"different-parameters"},
    "parameters_loaded": {"different-parameters"},
    "repeated_samples": {"repeated-samples"},
    "repeated_samples_of_rank": {"repeated-samples", "missing-samples"},
    "replacement_equal": {"repeated-samples"},
    "schedule": {"schedule-stepped-too-often"},
    "schedule_period": {"schedule-stepped-too-often"},
    "schedule_zero": {"schedule-stepped-too-often"},
    "transformers_files": {"files-written-by-several-ranks"},
    "transformers_loader": {"repeated-samples"},
    "transformers_loss": {"loss-normalisation"},
    "transformers_parameters": {"different-parameters"},
}
WRONG = sorted(SCRIPTS.glob("wrong_*.py"))
RIGHT = sorted(path for path in SCRIPTS.glob("right_*.py") if path.stem != "right_single_process")

FRAMEWORKS = ("accelerate", "fabric", "lightning", "transformers")  # the other scripts use plain PyTorch

QUICK = (
    *("wrong_dropout_equal", "wrong_evaluation_padded", "wrong_gradients_of_module", "wrong_repeated_samples"),
    *("wrong_average_on_main", "right_accumulation", "right_ddp", "right_evaluation_means", "right_own_parts"),
)
SLOW = (
    *("wrong_accelerate_loss", "wrong_fabric_order", "wrong_lightning_evaluation", "wrong_transformers_loader"),
    *("right_fabric", "right_transformers"),
)


def audit(folder: Path, *command: object) -> Done:
    return samestep("audit", "--json", "--", sys.executable, *command, cwd=folder)


def findings(done: Done) -> dict[str, set[str]]:
    """Return the names of the findings of each script."""
    result: dict[str, Any] = json.loads(done.out)
    assert not result["failures"]
    names: dict[str, set[str]] = {}
    for world in result["worlds"]:
        assert world["ranks"] == 2
        # Scripts without training evaluate only.
        assert world["steps"] > 0 or "loaded_on_main" in world["program"]
        assert all(finding["fix"] for finding in world["findings"])
        names.setdefault(Path(world["program"]).stem, set()).update(f["name"] for f in world["findings"])
    return names


def groups() -> list[Any]:
    """Return scripts for one command each; a command with several scripts has several worlds."""
    scripts = {path.stem: path for path in (*WRONG, *RIGHT)}
    plain = [scripts.pop(name) for name in QUICK]
    frameworks = [scripts.pop(name) for name in SLOW]
    others = list(scripts.values())
    chunks = [frameworks, *(others[i : i + 5] for i in range(0, len(others), 5))]
    return [
        pytest.param(plain, id="plain", marks=pytest.mark.slow),
        *(pytest.param(chunk, id=chunk[0].stem, marks=pytest.mark.long) for chunk in chunks),
    ]


@pytest.mark.parametrize("scripts", groups())
def test_mistakes_are_named_and_correct_scripts_have_no_finding(scripts: list[Path], tmp_path: Path) -> None:
    done = audit(tmp_path, LAUNCHER, 2, *scripts)
    expected = {path.stem: MISTAKES.get(path.stem.removeprefix("wrong_"), set()) for path in scripts}
    assert findings(done) == expected, done.out
    assert done.code == (EXIT_DIFFERS if any(expected.values()) else EXIT_DONE), done.err
    worlds = {Path(world["program"]).stem: world for world in json.loads(done.out)["worlds"]}
    for name in ("right_evaluation_gathered", "right_evaluation_means"):  # neither right nor wrong by counts
        if name in worlds:
            assert "counts of evaluations" not in worlds[name]["checked"]
            assert any(text.startswith("the evaluation at ") for text in worlds[name]["not_checked"])


def test_every_mistake_has_a_script_and_every_finding_a_mistake() -> None:
    assert {path.stem.removeprefix("wrong_") for path in WRONG} == MISTAKES.keys()
    assert all(sum(name.startswith(framework) for name in MISTAKES) >= 3 for framework in FRAMEWORKS)
    assert set().union(*MISTAKES.values()) == FIXES.keys()


@pytest.mark.long
def test_torchrun_and_the_line_of_the_script(tmp_path: Path) -> None:
    script = SCRIPTS / "wrong_gradients_of_module.py"
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    done = audit(tmp_path, *torchrun, script)
    assert done.code == EXIT_DIFFERS, done.err
    [world] = json.loads(done.out)["worlds"]
    [finding] = world["findings"]
    file, _, line = finding["line"].rpartition(":")
    assert Path(file) == script
    assert script.read_text().splitlines()[int(line) - 1].strip() == "optimizer.step()"
    assert finding["name"] == "unreduced-gradients"


@pytest.mark.slow
def test_single_process_and_report(tmp_path: Path) -> None:
    done = samestep("audit", "--", sys.executable, SCRIPTS / "right_single_process.py", cwd=tmp_path)
    assert done.code == EXIT_DONE, done.err
    assert "0 findings; 1 rank, 40 optimizer steps" in done.out


@pytest.mark.slow
def test_code_of_a_failed_command_and_its_findings(tmp_path: Path) -> None:
    script = tmp_path / "failing.py"
    script.write_text("import torch\nfrom torch.optim import SGD\nSGD([torch.zeros(1)]).step()\nraise SystemExit(7)\n")
    done = audit(tmp_path, script)
    assert done.code == 7
    assert json.loads(done.out)["exit_code"] == 7


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
def test_signal_ends_all_processes_of_the_command(number: signal.Signals, tmp_path: Path) -> None:
    script = tmp_path / "endless.py"
    script.write_text(
        "import os, time\nimport torch\nfrom torch.optim import SGD\nSGD([torch.zeros(1)]).step()\n"
        "open(os.environ['RANK'], 'w').close()\nwhile True:\n    time.sleep(0.1)\n"
    )
    with Running("audit", "--", sys.executable, LAUNCHER, 2, script, cwd=tmp_path) as running:
        running.until(lambda: {"0", "1"} <= {path.name for path in tmp_path.iterdir()}, "two ranks")
        running.kill_group(number)
        done = running.wait(30)
        assert done.code == 128 + number
        assert "1 finding; 2 ranks" in done.out
        assert "independent-copies" in done.out  # no process group
        assert running.processes() == []


def test_processes_without_complete_events_are_left_out() -> None:
    update = {"kind": "update", "step": 0}
    [world] = group_worlds([[], [{"kind": "process", "pid": 1, "world": None, "program": "train.py"}, update]])
    assert world.ranks == {0: [update]}


def test_command_reads_the_terminal(tmp_path: Path) -> None:
    """Input, `stty` and a debugger work as without an audit; afterwards the shell has the terminal again."""
    code = "import os; print(input(), os.popen('stty size').read(), flush=True); breakpoint()"
    command = (*COMMAND, "audit", "--", sys.executable, "-c", code)
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(tmp_path)
        os.execve(sys.executable, command, environment())
    termios.tcsetwinsize(terminal, (30, 111))
    os.write(terminal, b"Ada\nprint(6 * 7)\nc\n")
    output = b""
    with suppress(OSError):  # of the terminal, after the end
        while data := os.read(terminal, 4096):
            output += data
    os.close(terminal)
    _, status = os.waitpid(process, 0)
    assert os.waitstatus_to_exitcode(status) == EXIT_FAILED  # nothing to observe
    for text in (b"Ada 30 111", b"42\r\n", b"E_NOTHING_OBSERVED"):
        assert text in output, output.decode()


@pytest.mark.slow
def test_command_without_torch(tmp_path: Path) -> None:
    done = audit(tmp_path, "-c", "print('text')")
    assert done.code == EXIT_FAILED
    assert "E_NOTHING_OBSERVED" in done.err
    assert done.out == ""


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "code"), [([], "E_MISSING_KEY"), (["--", "no-such-program"], "E_FILE_MISSING")])
def test_invalid_commands(arguments: list[str], code: str, tmp_path: Path) -> None:
    done = samestep("audit", *arguments, cwd=tmp_path)
    assert done.code == EXIT_INPUT
    assert code in done.err
