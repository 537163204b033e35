"""`samestep.init`: a private world of all ranks that leaves the script as it is."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import samestep
from helpers.started import as_srun, as_torchrun, free_port, ranks
from samestep.config import MeshConfig, StrategyConfig
from samestep.distributed.devices import ACCELERATOR, kernel_settings
from samestep.distributed.env import Sharing
from samestep.distributed.launcher_detection import find_rendezvous
from samestep.distributed.resources import usable_processors
from samestep.errors import EXIT_INPUT, InputError
from samestep.launcher.failure import RankError
from samestep.session import SessionOptions, _select_devices, start
from workers import sessions

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


def test_nothing_changes_on_one_process() -> None:
    done = subprocess.run([sys.executable, "-c", ALONE], check=False, capture_output=True, text=True, timeout=120)
    assert done.stderr == ""
    assert json.loads(done.stdout) == [True, [False, False, False], [{"rank": 0}], True, [1]]


@pytest.mark.parametrize("processes", [1, 3])
def test_script_sees_one_process_and_all_ranks_agree(processes: int) -> None:
    rows = samestep.launch(sessions.facts, processes=processes)
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
        assert row["mean"] == (processes - 1) / 2
        assert row["sum"] == [processes * (processes + 1) / 2] * 2
        if processes > 1:
            assert row["threads"] <= threads


def test_ranks_with_other_settings_of_torch_are_refused() -> None:
    with pytest.raises(RankError, match=r"torch\.backends\.cudnn\.benchmark is False and True") as raised:
        samestep.launch(sessions.other_kernels, processes=2)
    assert raised.value.code == "E_RANK_SETTINGS"


def test_world_ends_with_its_block() -> None:
    assert samestep.launch(sessions.two_blocks, processes=2) == [[0, 1], [0, 1]]


def test_default_group_of_the_script_is_independent() -> None:
    assert samestep.launch(sessions.group_of_the_script, processes=2) == [8.0]


def test_ranks_that_diverge_are_named() -> None:
    with pytest.raises(RankError, match="diverged"):
        samestep.launch(sessions.diverging, processes=2)


def test_failure_of_a_rank_ends_the_block() -> None:
    with pytest.raises(RankError, match="the switch was off"):
        samestep.launch(sessions.raising, processes=2)


class OneGpu:
    """torch's functions for accelerators on a machine with one."""

    def device_count(self) -> int:
        return 1

    def set_device(self, device: torch.device) -> None:
        assert device == torch.device(ACCELERATOR, 0)

    def get_device_properties(self, index: int) -> SimpleNamespace:
        return SimpleNamespace(uuid=f"gpu-{index}")


@pytest.mark.parametrize(
    ("sharing", "stages", "refusal"),
    [(None, 1, "E_DEVICES"), ("gloo", 1, None), ("gloo", 2, "E_INCOMPATIBLE"), ("nccl", 1, None), ("nccl", 2, None)],
)
def test_refusals_of_ranks_on_one_gpu(
    sharing: Sharing | None, stages: int, refusal: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda kind: OneGpu())
    strategy = StrategyConfig(name="pp", mesh=MeshConfig(pipeline=2)) if stages == 2 else None
    options = SessionOptions(device="cuda", strategy=strategy)
    second = find_rendezvous(as_torchrun(29500)(1, 2))
    if refusal is not None:
        with pytest.raises(InputError) as raised:
            _select_devices(options, None, second, sharing)
        assert raised.value.code == refusal
    else:
        # No GPU must belong to this rank alone.
        assert _select_devices(options, None, second, sharing) == (torch.device(ACCELERATOR, 0), [])


def test_gpus_of_ranks_that_do_not_share_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda kind: OneGpu())
    first = find_rendezvous(as_torchrun(29500)(0, 2))
    assert _select_devices(SessionOptions(device="cuda"), None, first, None)[1] == ["gpu-0"]


def test_other_value_of_the_switch_ends_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAMESTEP_SHARE_GPU", "often")
    with pytest.raises(InputError, match="'often'") as raised:
        samestep.launch(sessions.facts, processes=2)
    assert raised.value.exit_code == EXIT_INPUT


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
    before, *during, after = samestep.launch(sessions.settings_of_kernels, reduction, processes=2)
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
