"""Operations that an unchanged script is refused."""

import bdb
import getpass
import pdb
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

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
    with refusals():
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


def test_debuggers_are_refused(unchanged: None) -> None:
    def post_mortem() -> None:
        try:
            raise ValueError
        except ValueError as error:
            pdb.post_mortem(error.__traceback__)

    for call in (pdb.set_trace, lambda: pdb.Pdb().set_trace(), sys.__breakpointhook__, post_mortem):
        error = refused(call, "E_LAUNCH")
        assert error.value.endswith(": a debugger, in a script on several processes")
        assert error.fix == "samestep run --processes 1"


def test_passwords_are_refused(unchanged: None) -> None:
    assert "getpass" in refused(lambda: getpass.getpass("A"), "E_LAUNCH").value


def test_refused_functions_are_restored() -> None:
    import samestep.loading
    import samestep.parallelize
    import samestep.session

    spawn = sys.modules["torch.multiprocessing.spawn"]
    homes = (samestep.session, samestep.parallelize, samestep.loading)
    terminal = (getpass, bdb.Bdb, pdb.Pdb)
    owners = (dist, dist.distributed_c10d, torch.multiprocessing, spawn, DistributedDataParallel, *homes, *terminal)
    before = [dict(vars(owner)) for owner in owners]
    with refusals():
        assert all(dict(vars(owner)) != one for owner, one in zip(owners, before, strict=True))
    assert [dict(vars(owner)) for owner in owners] == before
