"""Operations that an unchanged script is refused, wrappers of one device, and child processes."""

import logging
import multiprocessing
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import samestep
from samestep.errors import InputError
from samestep.script.refusals import refusals

GROUPS: dict[str, Callable[[], Any]] = {
    "torch.distributed.init_process_group": lambda: dist.init_process_group("gloo"),
    "torch.multiprocessing.spawn": lambda: torch.multiprocessing.spawn(print, nprocs=2),
    "torch.multiprocessing.start_processes": lambda: torch.multiprocessing.start_processes(print, nprocs=2),
    "DistributedDataParallel": lambda: DistributedDataParallel(nn.Linear(1, 1)),
}
CALLS: dict[str, Callable[[], Any]] = {
    "samestep.init": lambda: samestep.init(device="cpu"),
    "samestep.parallel": lambda: samestep.parallel(nn.Linear(1, 1)),
    "samestep.loader": lambda: samestep.loader([1]),
}


@pytest.fixture
def unchanged() -> Iterator[None]:
    with refusals(has_own_device=True):
        yield


def refused(call: Callable[[], Any], code: str) -> InputError:
    with pytest.raises(InputError) as caught:
        call()
    assert (caught.value.code, caught.value.exit_code) == (code, 2)
    assert caught.value.value.startswith(f"{__file__}:")
    return caught.value


@pytest.mark.parametrize("name", GROUPS)
def test_groups_of_the_script_are_refused(name: str, unchanged: None) -> None:
    error = refused(GROUPS[name], "E_OWN_GROUP")
    assert error.value.endswith(f": {name} in an unchanged script")
    assert "samestep run --own-group" in (error.fix or "")
    assert not dist.is_initialized()


@pytest.mark.parametrize("name", CALLS)
def test_calls_of_samestep_are_refused(name: str, unchanged: None) -> None:
    error = refused(CALLS[name], "E_LAUNCH")
    assert error.value.endswith(f": {name} in an unchanged script")
    assert error.fix == "import samestep in the script itself"


def test_refused_functions_are_restored() -> None:
    import samestep.global_view
    import samestep.loading
    import samestep.session

    spawn = sys.modules["torch.multiprocessing.spawn"]
    wrappers = (nn.DataParallel, nn.SyncBatchNorm, DistributedDataParallel)
    homes = (samestep.session, samestep.global_view, samestep.loading)
    owners = (dist, dist.distributed_c10d, torch.multiprocessing, spawn, *homes, *wrappers, type(os.environ))
    before = [dict(vars(owner)) for owner in owners]
    method = multiprocessing.get_start_method(allow_none=True)
    with refusals(has_own_device=True):
        assert all(dict(vars(owner)) != one for owner, one in zip(owners, before, strict=True))
    assert [dict(vars(owner)) for owner in owners] == before
    assert multiprocessing.get_start_method(allow_none=True) == method


def test_data_parallel_is_the_module_itself(unchanged: None, caplog: pytest.LogCaptureFixture) -> None:
    module = nn.Linear(3, 2)
    batch = torch.rand(5, 3)
    with caplog.at_level(logging.INFO, logger="samestep"):
        wrapped = nn.DataParallel(module, device_ids=[0, 1, 2, 3], output_device=2)
    assert wrapped.module is module
    assert list(wrapped.state_dict()) == ["module.weight", "module.bias"]
    assert torch.equal(wrapped(input=batch), module(batch))
    assert isinstance(wrapped, nn.DataParallel)
    (message,) = (record.message for record in caplog.records)
    assert message.startswith(f"{__file__}:")
    assert message.endswith(": DataParallel is the module itself: Samestep divides its calls")


def test_data_parallel_moves_inputs_to_the_device_of_the_module(
    unchanged: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("samestep.script.refusals.is_accelerator", lambda device: device.type == "meta")
    wrapped = nn.DataParallel(nn.Bilinear(3, 2, 4)).to("meta")
    output = wrapped(torch.rand(5, 3), input2=torch.rand(5, 2))
    assert (output.device.type, output.shape) == ("meta", (5, 4))


def test_batch_norm_is_not_converted(unchanged: None, caplog: pytest.LogCaptureFixture) -> None:
    module = nn.Sequential(nn.BatchNorm1d(2))
    with caplog.at_level(logging.INFO, logger="samestep"):
        assert nn.SyncBatchNorm.convert_sync_batchnorm(module) is module
    assert type(module[0]) is nn.BatchNorm1d
    assert len(caplog.records) == 1
    assert "batch norm uses statistics of the whole batch" in caplog.text


@pytest.mark.parametrize("has_own_device", [False, True])
def test_visible_devices(
    has_own_device: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with refusals(has_own_device=has_own_device), caplog.at_level(logging.INFO, logger="samestep"):
        os.environ["CUDA_VISIBLE_DEVICES"] = "0"
        seen = [os.environ["CUDA_VISIBLE_DEVICES"]]
        os.environ.update(CUDA_VISIBLE_DEVICES="1")
        seen.append(os.environ["CUDA_VISIBLE_DEVICES"])
        command = [sys.executable, "-c", "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"]
        seen.append(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
        os.environ.pop("CUDA_VISIBLE_DEVICES")
        seen.append(os.environ.get("CUDA_VISIBLE_DEVICES", "none"))
        monkeypatch.setenv("SOMETHING_ELSE", "set")
        assert os.environ["SOMETHING_ELSE"] == "set"
    assert seen == (["3"] * 4 if has_own_device else ["0", "1", "1", "none"])
    assert len(caplog.records) == (3 if has_own_device else 0)


def train() -> float:
    model = nn.Linear(1, 1)
    model(torch.ones(1, 1)).sum().backward()
    return 1.0


def prepare(number: int) -> float:
    model = nn.Linear(1, 1).requires_grad_(False)
    return model(torch.full((1, 1), float(number))).item() * 0 + number**2


class Squares(Dataset[float]):
    def __init__(self) -> None:
        self.read = lambda number: float(number**2)  # spawned workers could not receive it

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> float:
        return self.read(index)


def test_children_that_prepare_data_are_as_in_plain_python(unchanged: None) -> None:
    assert multiprocessing.get_start_method() == "fork"
    with multiprocessing.Pool(2) as pool:
        assert pool.map(prepare, [2, 3]) == [4.0, 9.0]
    with ProcessPoolExecutor(2) as executor:
        assert list(executor.map(prepare, [2, 3])) == [4.0, 9.0]
    assert torch.cat(list(DataLoader(Squares(), 2, num_workers=2))).tolist() == [0, 1, 4, 9]
    assert train() == 1.0  # this process may


@pytest.mark.parametrize(
    ("end", "code"), [(None, 0), (SystemExit(), 0), (SystemExit(3), 3), (SystemExit("text"), 1), (ValueError(), 1)]
)
def test_forked_child_ends_with_the_script(end: BaseException | None, code: int) -> None:
    codes = []
    with refusals(has_own_device=False):
        child = os.fork()
        if child == 0 and end is not None:
            raise end
        if child != 0:
            codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])]
    assert codes == [code]


def test_start_method_can_be_set_once_by_the_script(unchanged: None) -> None:
    multiprocessing.set_start_method("spawn")
    with pytest.raises(RuntimeError, match="already been set"):
        multiprocessing.set_start_method("fork")
    assert multiprocessing.get_start_method() == "spawn"


def _methods() -> list[str | None]:
    random.seed(0)
    before = multiprocessing.get_start_method(allow_none=True)
    with refusals(has_own_device=False):
        inside = multiprocessing.get_start_method()
        with multiprocessing.Pool(1) as pool:
            pool.map(prepare, [1])
    return [before, inside, multiprocessing.get_start_method(allow_none=True)]


@pytest.mark.slow
def test_ranks_start_processes_as_plain_python() -> None:
    assert samestep.launch(_methods, processes=1) == ["forkserver", "fork", "forkserver"]
