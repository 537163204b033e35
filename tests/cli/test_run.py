"""`samestep run`: user scripts with start(), for one process, and with a process group of their own."""

import json
import os
import pty
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.system import Running, here, samestep, until
from samestep.cli.main import build_parser

WITH_START = """
import json, sys
import samestep
from samestep.session import start
with start() as world:
    if world.is_main:
        print(json.dumps({"size": world.size, "arguments": sys.argv[1:], "main": __name__}))
"""

FOR_TORCHRUN = """
import json, os, sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import sibling

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(3, 1))
model(torch.full((2, 3), float(dist.get_rank()))).sum().backward()
total = torch.ones(1)
dist.all_reduce(total)
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RESTART_COUNT")
if int(os.environ["LOCAL_RANK"]) == 0:
    variables = {name: os.environ[name] for name in names}
    grad = model.module.weight.grad.sum().item()
    print(json.dumps({"total": total.item(), "grad": grad, "sibling": sibling.VALUE, **variables}))
dist.destroy_process_group()
"""

# nanoGPT and others take their part for several processes if they see RANK.
SEES_ONE_PROCESS = """
import os
import samestep
import torch.distributed as dist

names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
world = samestep.init()
print(os.environ.get("RANK"), world.size, [name for name in names if name in os.environ])
if int(os.environ.get("RANK", -1)) != -1 or dist.is_initialized():
    dist.init_process_group()
print("as one process")
"""

FAILS_ONCE = """
import os, sys
import samestep
from samestep.session import start
with start() as world:
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and world.rank == 1:
        raise OSError("the switch was off")
    world.barrier()
    if world.is_main:
        print("went well at attempt", os.environ["TORCHELASTIC_RESTART_COUNT"])
"""

WAITS = """
import time
from pathlib import Path
import samestep
from samestep.session import start
with start() as world:
    world.barrier()
    Path(f"began-{world.rank}").touch()
    while not world.stop_requested:
        time.sleep(0.01)
    world.barrier()
    Path(f"ended-{world.rank}").touch()
"""


def script(folder: Path, text: str) -> Path:
    path = folder / "script.py"
    path.write_text(text, encoding="utf-8")
    (folder / "sibling.py").write_text("VALUE = 7\n", encoding="utf-8")
    return path


def after_mode(err: str, mode: str) -> str:
    """Return what follows the first line of standard error, which names the mode."""
    first, _, rest = err.partition("\n")
    assert first.startswith("samestep: ")
    assert first.endswith(mode)
    return rest


SAMESTEP = "processes: it imports samestep"
ONE = pytest.param(1, marks=pytest.mark.long)
OWN_GROUP = "processes: it creates a process group of its own"


@pytest.mark.slow
def test_script_receives_its_arguments(tmp_path: Path) -> None:
    done = samestep("run", "--processes", 3, script(tmp_path, WITH_START), "--epochs", 3, "--help", cwd=tmp_path)
    assert (done.code, after_mode(done.err, SAMESTEP)) == (0, "")
    assert json.loads(done.out) == {"size": 3, "arguments": ["--epochs", "3", "--help"], "main": "__main__"}


@pytest.mark.slow
def test_script_for_torchrun_has_its_variables(tmp_path: Path) -> None:
    done = samestep("run", "--processes", 4, "--own-group", script(tmp_path, FOR_TORCHRUN), cwd=tmp_path)
    assert (done.code, after_mode(done.err, OWN_GROUP)) == (0, "")
    assert json.loads(done.out) == {
        "total": 4.0,
        "grad": 2 * 3 * 1.5,  # samples, inputs, and the mean over ranks
        "sibling": 7,
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


@pytest.mark.slow
def test_plain_script_runs_on_every_rank_and_only_rank_0_prints(tmp_path: Path) -> None:
    text = 'import os\nprint("rank", os.environ["RANK"])\n'
    done = samestep("run", "--processes", 2, "--own-group", script(tmp_path, text), cwd=tmp_path)
    assert (done.code, done.out) == (0, "rank 0\n")
    (log,) = tmp_path.glob("runs/script-*/logs/rank-1.log")
    assert log.read_text(encoding="utf-8") == "rank 1\n"


def test_script_sees_one_process(tmp_path: Path) -> None:
    done = samestep("run", "--processes", 2, script(tmp_path, SEES_ONE_PROCESS), cwd=tmp_path)
    assert (done.code, after_mode(done.err, SAMESTEP)) == (0, "")
    assert done.out == "None 2 []\nas one process\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "line", ["int(os.environ['LOCAL_RANK'])", "torch.distributed.init_process_group('gloo')"], ids=["variable", "group"]
)
def test_script_that_needs_its_own_group_is_told_the_option(tmp_path: Path, line: str) -> None:
    done = samestep("run", "--processes", 2, script(tmp_path, f"import os, torch\n{line}\n"), cwd=tmp_path)
    assert done.code == 2
    assert "script.py" in done.err
    assert "[E_OWN_GROUP]" in done.err
    assert "samestep run --own-group" in done.err


@pytest.mark.slow
def test_failure_is_reported_once_with_the_line_of_the_script(tmp_path: Path) -> None:
    done = samestep("run", "--processes", 2, "--own-group", script(tmp_path, FAILS_ONCE), cwd=tmp_path)
    assert done.code == 1
    assert done.err.count("error: ") == 1
    assert after_mode(done.err, OWN_GROUP).startswith(
        "error: rank 1 failed after samestep.init(): OSError: the switch was off [E_RANK_FAILED]"
    )
    assert 'raise OSError("the switch was off")' in done.err
    assert "script.py" in done.err


@pytest.mark.slow
def test_script_is_restarted_after_a_failure(tmp_path: Path) -> None:
    path = script(tmp_path, FAILS_ONCE)
    message = "restart 1 of 1, on 2 processes: rank 1 failed after samestep.init(): OSError: the switch was off\n"
    done = samestep("run", "--processes", 2, "--own-group", "--max-restarts", 1, path, cwd=tmp_path)
    assert (done.code, done.out) == (0, "went well at attempt 1\n"), done.err
    after = after_mode(done.err, OWN_GROUP)
    assert after.splitlines()[0] == message.strip()
    assert after_mode(after.partition("\n")[2], OWN_GROUP) == ""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_signal_stops_the_script(tmp_path: Path, number: signal.Signals) -> None:
    with Running("run", "--processes", 2, script(tmp_path, WAITS), cwd=tmp_path) as running:
        running.until(lambda: len(list(tmp_path.glob("began-*"))) == 2, "both ranks")
        running.kill_group(number)
        assert running.wait(60).code == 130
        assert len(list(tmp_path.glob("ended-*"))) == 2
        until(lambda: not running.processes(), "no process is left", 30)


@pytest.mark.slow
def test_failure_after_a_signal_is_not_restarted(tmp_path: Path) -> None:
    path = script(tmp_path, f'{WAITS}    raise OSError("no space for the result")\n')
    with Running("run", "--processes", 2, "--max-restarts", 1, path, cwd=tmp_path) as running:
        running.until(lambda: len(list(tmp_path.glob("began-*"))) == 2, "both ranks")
        running.kill_group(signal.SIGTERM)
        done = running.wait(60)
    assert done.code == 1
    assert "OSError: no space for the result [E_RANK_FAILED]" in after_mode(done.err, SAMESTEP).splitlines()[0]
    assert "restart" not in done.err


@pytest.mark.slow
def test_closed_terminal_stops_the_script(tmp_path: Path) -> None:
    outer, inner = pty.openpty()
    with Running("run", "--processes", 2, script(tmp_path, WAITS), cwd=tmp_path, terminal=inner) as running:
        os.close(inner)
        running.until(lambda: len(list(tmp_path.glob("began-*"))) == 2, "both ranks", 150)
        os.close(outer)
        running.kill_group(signal.SIGHUP)  # as the kernel does for a controlling terminal
        assert running.wait(90).code == 130
        assert len(list(tmp_path.glob("ended-*"))) == 2
        until(lambda: not running.processes(), "no process is left", 30)


PARSES = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--processes")
parser.add_argument("--run")
print(parser.parse_args())
"""


def test_invalid_arguments_of_a_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert here("run", "--processes", 1, script(tmp_path, PARSES), "--nope", cwd=tmp_path) == 2
    assert capsys.readouterr().err == ""  # parsers report by themselves


FORKS = """
import os, sys
child = os.fork()
if child == 0:
    sys.exit(5)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("processes", [ONE, 2])
def test_exit_code_of_a_child_is_its_own(tmp_path: Path, processes: int) -> None:
    done = samestep("run", "--processes", processes, script(tmp_path, FORKS), cwd=tmp_path)
    assert (done.code, done.out) == (0, "5\n")


LEAVES = """
import atexit, sys, threading, time
atexit.register(print, "first")
atexit.register(lambda: open("left", "a").write("x"))
open_file = open("open", "w")
open_file.write("y")
def late():
    time.sleep(0.5)
    open("late", "a").write("z")
threading.Thread(target=late).start()
END
"""


@pytest.mark.slow
@pytest.mark.parametrize("processes", [ONE, 2])
@pytest.mark.parametrize(("end", "code"), [("pass", 0), ("sys.exit(3)", 3), ("raise OSError", 1)])
def test_ends_as_in_plain_python(tmp_path: Path, processes: int, end: str, code: int) -> None:
    done = samestep("run", "--processes", processes, script(tmp_path, LEAVES.replace("END", end)), cwd=tmp_path)
    assert (done.code, done.out) == (code, "first\n")
    assert [(tmp_path / name).read_text() for name in ("left", "open")] == ["x", "y"]
    if "raise" not in end:
        assert (tmp_path / "late").read_text() == "z"


FAILS_IN_TRAINING = """
import torch
weight = torch.nn.Parameter(torch.ones(1))
optimizer = torch.optim.SGD([weight])
for number in range(STEPS):
    weight.square().sum().backward()
    optimizer.step()
raise OSError("the disk is full")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("steps", "activity"),
    [pytest.param(0, "before the first optimizer step", marks=pytest.mark.long), (3, "after optimizer step 3")],
)
def test_failure_names_the_step_of_an_unchanged_script(tmp_path: Path, steps: int, activity: str) -> None:
    text = FAILS_IN_TRAINING.replace("STEPS", str(steps))
    done = samestep("run", "--processes", 2, script(tmp_path, text), cwd=tmp_path)
    assert done.code == 1
    (title,) = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert re.sub(r"rank \d", "rank R", title) == (
        f"error: rank R failed {activity}: OSError: the disk is full [E_RANK_FAILED]"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "code"), [pytest.param("None", 0, marks=pytest.mark.long), ("0", 0), ("7", 7), ("'no data'", 1)]
)
@pytest.mark.parametrize("processes", [ONE, 2])
def test_exit_code_is_that_of_the_script(tmp_path: Path, processes: int, end: str, code: int) -> None:
    text = f"import sys, torch\ntorch.nn.Linear(3, 2)(torch.ones(4, 3))\nsys.exit({end})\n"
    done = samestep("run", "--processes", processes, script(tmp_path, text), cwd=tmp_path)
    assert done.code == code
    assert "error: " not in done.err
    assert done.err.count("no data\n") == (end == "'no data'")
    assert ("samestep: Linear: 0 of 1 calls divided" in done.err) == (processes == 2)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("import os\nos._exit(0)\n", 0),
        ("import os\nfrom samestep.session import start\nwith start():\n    pass\nos._exit(0)\n", 0),
        ("import os\nfrom samestep.session import start\nwith start():\n    os._exit(0)\n", 1),
    ],
    ids=["without a world", "after the world", "inside the world"],
)
def test_script_that_ends_its_process_with_exit_code_0(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, code: int
) -> None:
    assert here("run", "--processes", 1, script(tmp_path, text), cwd=tmp_path) == code
    title = "error: rank 0 ended with exit code 0 after samestep.init(), before the script ended [E_RANK_EXITED]\n"
    assert capsys.readouterr().err.startswith(title if code else "")


def test_script_that_ends_its_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = script(tmp_path, "import os\nos._exit(5)\n")
    assert here("run", "--processes", 1, path, cwd=tmp_path) == 1
    title = "error: rank 0 ended with exit code 5, before the script ended [E_RANK_EXITED]"
    assert capsys.readouterr().err.startswith(title)


def test_file_that_is_no_script(tmp_path: Path, refused: Callable[..., str]) -> None:
    (tmp_path / "model.pt").write_bytes(b"PK\0\1")
    assert refused("run", "--processes", 1, "model.pt").startswith("error: model.pt")
    (tmp_path / "reviews.csv").write_text("text,label\ngood film,1\n", encoding="utf-8")
    err = refused("run", "--processes", 1, "reviews.csv")
    assert err.startswith("error: reviews.csv, line 2: invalid syntax: good film,1 [E_UNREADABLE]")


@pytest.mark.parametrize("name", ["parts/train.py", "parts/inner/train.py", "parts/__main__.py"])
def test_file_of_a_package_is_one_to_run_by_its_name(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The advice of the error works: the module runs with its relative imports."""
    path = tmp_path / name
    path.parent.mkdir(parents=True)
    (tmp_path / "parts/__init__.py").write_text("VALUE = 7\n")
    (path.parent / "__init__.py").touch()
    dots = "." * (len(Path(name).parts) - 1)
    path.write_text(f"from {dots} import VALUE\nassert VALUE == 7\n")
    assert here("run", "--processes", 1, path, cwd=tmp_path) == 2
    advice = re.search(r"\[E_SCRIPT\]\n.*\n  fix: +samestep run -m (\S+), in (.*)\n", capsys.readouterr().err)
    assert advice is not None
    assert here("run", "--processes", 1, "-m", advice[1], cwd=Path(advice[2])) == 0


def test_missing_script_is_an_error(refused: Callable[..., str]) -> None:
    assert "nothing.py is not a file" in refused("run", "nothing.py")


@pytest.mark.parametrize("before", [(), ("--processes", "2")])
def test_script_after_the_separator(before: tuple[str, ...]) -> None:
    parsed = build_parser("run").parse_args([*before, "--", "train.py", "--epochs", "3"])
    assert (parsed.script, parsed.arguments) == (Path("train.py"), ["--epochs", "3"])
    assert parsed.processes == ("2" if before else None)


def test_runs_folder_that_cannot_be_created(refused: Callable[..., str], tmp_path: Path) -> None:
    path = script(tmp_path, "open('started', 'w').close()\n")
    err = refused("run", "--processes", 2, "--runs", "sibling.py/runs", path)
    assert re.match(r"error: sibling.py/runs/script-\S+/logs cannot be created: .* \[E_OUTPUT]", err)
    assert "--runs DIR" in err


EXPLAINED = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 3, 32, 32), torch.randint(4, (64,)))
layers = nn.Conv2d(3, 32, 3), nn.Conv2d(32, 32, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 4)
model = nn.Sequential(*layers)
model = nn.DataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(3):
    for rows, targets in DataLoader(data, batch_size=32):
        nn.functional.cross_entropy(model(rows), targets).backward()
    optimizer.step()
with torch.no_grad():
    model(rows[:1])
torch.save(model.state_dict(), "model.pt")
"""


@pytest.mark.slow
def test_summary_explains_what_was_divided_with_lines(tmp_path: Path) -> None:
    script(tmp_path, EXPLAINED)
    done = samestep("run", "--processes", 2, "--explain", "script.py", cwd=tmp_path)
    assert (done.code, done.out) == (0, "")
    lines = [line.removeprefix("samestep: ") for line in done.err.splitlines() if line.startswith("samestep: ")]
    assert lines[1] == "Sequential: 5 of 7 calls divided; whole: first of its kind (1), fewer rows than ranks (1)"
    assert re.fullmatch(r"\d+% of the time of model calls was divided", lines[2])
    assert lines[3:6] == [
        "TensorDataset: each process reads its own samples (rank 0 read 112 of the 192 of the run)",
        "the batch size is global: 32 rows are 16 on each process; 64 would need the memory per process that 32 need "
        "on one process",
        "calls, by line of the script:",
    ]
    assert re.sub(r"\d\.\d\d s", "T", "\n".join(sorted(lines[6:9]))).splitlines() == [
        "  script.py:14 Sequential: 1 whole, T, largest batch 32: first of its kind",
        "  script.py:14 Sequential: 5 divided, T, largest batch 32",
        "  script.py:17 Sequential: 1 whole without gradients, T, largest batch 1: fewer rows than ranks",
    ]
    assert lines[9:] == [
        "  backwards before a step: 2 (3 steps)",
    ]


@pytest.mark.parametrize(
    ("option", "code"),
    [("--exact", 2), ("--explain", 2), ("--strategy=fsdp", 2), ("--devices-per-process=2", 2), ("--strategy=ddp", 0)],
)
def test_options_of_divided_calls_are_those_of_unchanged_scripts(option: str, code: int, tmp_path: Path) -> None:
    path = script(tmp_path, "import samestep\n")
    assert here("run", option, "--processes", 1, path, cwd=tmp_path) == code
