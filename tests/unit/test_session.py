"""`samestep.init`: a private world that leaves the script as it is; uncaught errors; `main_first`."""

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn

import samestep
from helpers.started import as_srun, as_torchrun, free_port, ranks
from samestep.distributed.kernels import kernel_settings
from samestep.distributed.resources import usable_processors
from samestep.distributed.status import local_rank_status
from samestep.distributed.torch_errors import MEMORY_FIX
from samestep.errors import InputError, RankDesyncError
from samestep.launcher.failure import RankError
from samestep.launcher.process_state import Job, process_state
from samestep.session import UncaughtErrors, start

ALONE = """
import json, sys
import torch, torch.distributed as dist
import samestep
before = (torch.get_num_threads(), torch.get_rng_state().tolist(), sys.excepthook is sys.__excepthook__)
assert samestep.is_main()
with samestep.init() as world:
    after = (torch.get_num_threads(), torch.get_rng_state().tolist(), sys.excepthook is sys.__excepthook__)
    settings = [torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark, dist.is_initialized()]
    values = samestep.all_gather({"rank": world.rank})
again = samestep.init()
print(json.dumps([before == after, settings, values, again is not world, samestep.all_gather(1)]))
"""

SEEN = """
import json, os, sys
import torch.distributed as dist
import samestep
first = samestep.is_main()
with samestep.init(device="cpu") as world:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "SLURM_PROCID", "SLURM_NTASKS")
    seen = [first == world.is_main, dist.is_initialized(), [name for name in names if name in os.environ]]
    print(json.dumps([samestep.all_gather(world.rank), *seen]))
with samestep.init(device="cpu") as world:  # of the launcher whose variables are hidden now
    assert world.size == 2
"""


PENDING = """
import torch
import samestep
world = samestep.init(device="cpu")
if samestep.is_main():
    samestep.all_gather(1)
else:
    world.group.allreduce([torch.ones(1000)])
    raise ValueError("the cause")
"""


def facts() -> list[dict[str, Any]]:
    """Return the surroundings of a script before and after `init`, by rank."""
    before = samestep.is_main()
    world = samestep.init()
    seen = {
        "rank": world.rank,
        "is_main": [before, samestep.is_main()],
        "same": samestep.init() is world,
        "visible group": dist.is_initialized(),
        "variables": [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name in os.environ],
        "numbers": [random.random(), numpy.random.rand(), torch.rand(()).item()],
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    tensor = torch.full((2,), float(world.rank + 1))
    world.all_reduce(tensor)
    world.broadcast(tensor)
    return samestep.all_gather({**seen, "sum": tensor.tolist()})


def settings_of_kernels(reduction: Literal["fast", "exact"]) -> list[tuple[Any, ...]]:
    """Return torch's settings as the script has them, around a divided step, and after the world; of all ranks."""
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    seen = [kernel_settings()]
    torch.manual_seed(0)
    with samestep.init(device="cpu", reduction=reduction) as world:
        model = samestep.parallel(nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 1)), reduction=reduction)
        torch.backends.cudnn.benchmark = True
        for _ in range(3):  # watched, tried, divided
            model(torch.randn(256, 64)).sum().backward()
            seen.append(kernel_settings())
        rows = samestep.all_gather(seen, world)
    assert all(row == rows[0] for row in rows)
    return [*seen, kernel_settings()]


def other_kernels() -> None:
    """Select kernels by their time on one rank."""
    with samestep.init(device="cpu") as world:
        torch.backends.cudnn.benchmark = not world.is_main
        model = samestep.parallel(nn.Linear(4, 4))
        model(torch.ones(8, 4)).sum().backward()


def two_blocks() -> list[list[int]]:
    """Return the ranks in two worlds, one after another."""
    gathered = []
    for _ in range(2):
        with samestep.init() as world:
            gathered.append(samestep.all_gather(world.rank))
    return gathered


def group_of_the_script() -> list[float]:
    """Return sums of a default group that the script creates beside the private one, before and after its end."""
    with samestep.init() as world:
        store = dist.PrefixStore("script", process_state.launch_store)
        dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
        own = torch.ones(1)
        dist.all_reduce(own)
        world.all_reduce(own)
    assert dist.is_initialized()
    dist.all_reduce(own)
    dist.destroy_process_group()
    return own.tolist()


def gathers_of_equal_values() -> list[str]:
    world = samestep.init(device="cpu")
    samestep.parallel(nn.Linear(2, 2))
    samestep.all_gather(world.rank)
    samestep.all_gather(True)
    samestep.all_gather(torch.arange(2) + world.rank)
    for _ in range(2):
        samestep.all_gather(0.5)
    samestep.all_gather(torch.ones(2))
    assert process_state.view is not None
    return sorted(text.split(": ", 1)[1] for text in process_state.view._notes)


def diverging() -> None:
    """Issue different operations on the ranks."""
    world = samestep.init(device="cpu")
    samestep.all_gather(0) if world.is_main else world.barrier()


def raising() -> None:
    """Fail on one rank inside the block."""
    with samestep.init(device="cpu") as world:
        if world.rank == 1:
            raise OSError("the switch was off")
        world.barrier()


def test_nothing_changes_on_one_process() -> None:
    done = subprocess.run([sys.executable, "-c", ALONE], check=False, capture_output=True, text=True, timeout=120)
    assert done.stderr == ""
    assert json.loads(done.stdout) == [True, [False, False, False], [{"rank": 0}], True, [1]]


@pytest.mark.parametrize("processes", [1, 3])
def test_script_sees_one_process_and_all_ranks_agree(processes: int) -> None:
    rows = samestep.launch(facts, processes=processes)
    assert [row["rank"] for row in rows] == list(range(processes))
    threads = max(1, usable_processors() // processes)
    for row in rows:
        main = row["rank"] == 0
        assert row["is_main"] == [main, main]
        assert row["same"]
        assert not row["visible group"]
        assert not row["deterministic"]
        assert row["variables"] == []
        assert row["numbers"] == rows[0]["numbers"]
        assert row["sum"] == [processes * (processes + 1) / 2] * 2
        if processes > 1:
            assert row["threads"] <= threads


def test_ranks_with_other_settings_of_torch_are_refused() -> None:
    with pytest.raises(RankError, match=r"torch\.backends\.cudnn\.benchmark is False and True") as raised:
        samestep.launch(other_kernels, processes=2)
    assert raised.value.code == "E_RANK_SETTINGS"


def test_world_ends_with_its_block() -> None:
    assert samestep.launch(two_blocks, processes=2) == [[0, 1], [0, 1]]


def test_default_group_of_the_script_is_independent() -> None:
    assert samestep.launch(group_of_the_script, processes=2) == [8.0]


def test_sums_over_ranks_of_equal_values_are_noted() -> None:
    reason = "of equal values: every rank has whole batches, so a sum over ranks counts each value 2 times"
    assert samestep.launch(gathers_of_equal_values, processes=2) == [f"samestep.all_gather {reason}"] * 2
    assert samestep.launch(gathers_of_equal_values, processes=1) == []


def test_ranks_that_diverge_are_named() -> None:
    with pytest.raises(RankError, match="diverged"):
        samestep.launch(diverging, processes=2)


def test_failure_of_a_rank_ends_the_block() -> None:
    with pytest.raises(RankError, match="the switch was off"):
        samestep.launch(raising, processes=2)


def test_other_options_than_those_of_the_first_call_are_an_error() -> None:
    with samestep.init(device="cpu", reduction="fast") as world:
        assert samestep.init() is world
        assert samestep.init(device="cpu") is world
        with pytest.raises(InputError, match="joined with reduction='fast'") as raised:
            samestep.init(reduction="exact")
        assert raised.value.code == "E_LAUNCH"
        with pytest.raises(InputError, match="already has a process group"), start(device="cpu"):
            pass
    assert not dist.is_initialized()


def test_exact_requests_deterministic_kernels() -> None:
    before = kernel_settings()
    threads = torch.get_num_threads()
    try:
        with samestep.init(device="cpu", reduction="exact"):
            assert torch.are_deterministic_algorithms_enabled()
            assert torch.get_num_threads() == 1
        assert kernel_settings() == before
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("is_recipe", [False, True])
def test_fast_leaves_the_kernels_of_the_script(is_recipe: bool) -> None:
    measures = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    before = kernel_settings()
    try:
        with (
            start(device="cpu", reduction="fast", threads=torch.get_num_threads())
            if is_recipe
            else samestep.init(device="cpu")
        ):
            assert kernel_settings() == before
            assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.benchmark = measures


@pytest.mark.parametrize("reduction", ["fast", "exact"])
def test_settings_of_kernels_are_those_of_the_script_after_divided_calls(reduction: str) -> None:
    before, *during, after = samestep.launch(settings_of_kernels, reduction, processes=2)
    assert after == before
    if reduction == "fast":
        assert during == [before] * 3
    else:  # with the script's precision of products
        assert during == [(*before[:-3], False, before[-2], True)] * 3


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_variables_of_another_launcher_are_hidden(launcher: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SEEN, encoding="utf-8")
    variables = as_torchrun(free_port()) if launcher == "torchrun" else as_srun(str(free_port()))
    with ranks(variables, 2, script, cwd=tmp_path, command=[sys.executable]) as started:
        done = started.wait()
    for one in done:
        assert (one.code, one.err) == (0, "")
        assert json.loads(one.out) == [[0, 1], True, False, []]


@pytest.mark.slow
def test_rank_with_an_uncaught_error_ends_in_spite_of_a_collective_in_progress(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(PENDING, encoding="utf-8")
    with ranks(as_torchrun(free_port()), 2, script, cwd=tmp_path, command=[sys.executable]) as started:
        main, other = started.wait()
    assert (main.code, other.code) == (1, 1)
    assert other.err.endswith("ValueError: the cause\n")
    assert "the cause" not in main.err


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Errors that a hook of the script has shown."""
    errors: list[Any] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: errors.append(error))
    hook = sys.excepthook
    yield errors
    assert sys.excepthook is hook


def job() -> Job:
    """Return a job of one rank, which waits for no other."""
    return Job(0, 1, dist.HashStore(), 0, ("127.0.0.1", 1), True, 60.0)


def call_hook(error: BaseException) -> None:
    """Call the hook as the interpreter does."""
    sys.excepthook(type(error), error, error.__traceback__)


def test_first_error_of_the_job_is_shown_by_the_hook_of_the_script(shown: list[Any]) -> None:
    same_job, error = job(), OSError("the switch was off")
    for each in (error, OSError("a consequence")):
        uncaught = UncaughtErrors(same_job, local_rank_status())
        call_hook(each)
        uncaught.close()
    assert shown == [error]


def test_fix_follows_the_traceback(shown: list[Any], capfd: pytest.CaptureFixture[str]) -> None:
    uncaught, error = UncaughtErrors(job(), local_rank_status()), MemoryError()
    call_hook(error)
    uncaught.close()
    assert shown == [error]
    assert capfd.readouterr().err.splitlines() == [f"  fix:      {MEMORY_FIX}"]


def test_error_of_samestep_has_no_traceback(shown: list[Any], capfd: pytest.CaptureFixture[str]) -> None:
    uncaught = UncaughtErrors(job(), local_rank_status())
    call_hook(RankDesyncError("rank 1 has left the loop", expected="all ranks in step", fix="leave together"))
    uncaught.close()
    assert shown == []
    assert capfd.readouterr().err.splitlines() == [
        "error: rank 1 has left the loop [E_RANK_DESYNC]",
        "  expected: all ranks in step",
        "  fix:      leave together",
    ]


def test_interrupt_is_the_matter_of_the_hook_before(shown: list[Any]) -> None:
    uncaught = UncaughtErrors(job(), local_rank_status())
    for _ in range(2):
        call_hook(KeyboardInterrupt())
    uncaught.close()
    assert len(shown) == 2


def test_later_hook_of_the_script_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    uncaught = UncaughtErrors(job(), local_rank_status())
    later = sys.excepthook = lambda *_: None
    uncaught.close()
    assert sys.excepthook is later


def test_error_that_leaves_the_block_of_the_session_reaches_the_hook(shown: list[Any]) -> None:
    uncaught, error = UncaughtErrors(job(), local_rank_status()), OSError("the switch was off")
    uncaught.close(OSError, error, None)
    call_hook(error)
    uncaught.close()
    assert shown == [error]


def test_without_a_job_errors_are_shown_as_python_does(shown: list[Any]) -> None:
    assert process_state.external_job is None
    uncaught, error = UncaughtErrors(None, local_rank_status()), OSError("no space")
    uncaught.report(error)
    assert shown == [error]


def appended_lines(file: Path) -> list[str]:
    world = samestep.init(device="cpu")
    with samestep.main_first():
        if world.is_main:
            time.sleep(0.2)  # other ranks would write first
        with file.open("a", encoding="utf-8") as lines:
            lines.write(f"{world.rank}\n")
    samestep.all_gather(None)
    return file.read_text(encoding="utf-8").split()


@pytest.mark.parametrize("processes", [1, 3])
def test_main_first_runs_the_block_on_rank_0_before_others(processes: int, tmp_path: Path) -> None:
    lines = samestep.launch(appended_lines, tmp_path / "lines", processes=processes)
    assert lines[0] == "0"
    assert sorted(lines) == ["0", "1", "2"][:processes]
