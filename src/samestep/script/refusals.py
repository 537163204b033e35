"""Operations that an unchanged script is refused."""

from __future__ import annotations

import bdb
import getpass
import pdb
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import samestep.loading
import samestep.parallelize
import samestep.session
from samestep.distributed.collective_check import line_of_script
from samestep.errors import InputError
from samestep.script.patches import replaced


def _refusing(operation: str, expected: str, fix: str, code: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        value = f"{line_of_script()}: {operation} in an unchanged script"
        raise InputError(value, expected, fix, code=code)

    return refuse


def terminal_refusal(problem: str) -> InputError:
    """Return the error for an operation at the terminal, which each process would ask."""
    return InputError(
        f"{line_of_script()}: {problem}, in a script on several processes",
        expected="one reader of standard input, in the main thread of each process",
        fix="samestep run --processes 1",
        code="E_LAUNCH",
    )


def _refuse_debugger(*_: Any, **__: Any) -> NoReturn:
    raise terminal_refusal("a debugger")


def _refuse_password(*_: Any, **__: Any) -> NoReturn:
    raise terminal_refusal("getpass, which asks at the terminal of each process")


@contextmanager
def refusals() -> Iterator[None]:
    """Refuse operations outside of the global view during the block."""
    with ExitStack() as stack:
        # Not `torch.multiprocessing.spawn`: the package has a function of this name.
        spawn = sys.modules["torch.multiprocessing.spawn"]
        # In each module with the name: a script may import from any of them.
        for owner, name, operation in (
            (dist, "init_process_group", "torch.distributed.init_process_group"),
            (dist.distributed_c10d, "init_process_group", "torch.distributed.init_process_group"),
            (torch.multiprocessing, "spawn", "torch.multiprocessing.spawn"),
            (spawn, "spawn", "torch.multiprocessing.spawn"),
            (torch.multiprocessing, "start_processes", "torch.multiprocessing.start_processes"),
            (spawn, "start_processes", "torch.multiprocessing.start_processes"),
            (DistributedDataParallel, "__init__", "DistributedDataParallel"),
        ):
            expected = "a script for one process, whose work is divided"
            fix = "samestep run --own-group for a script that distributes its work; or remove this"
            refuse = _refusing(operation, expected, fix, "E_OWN_GROUP")
            stack.enter_context(replaced(owner, **{name: refuse}))
        for module, name in (
            (samestep.session, "init"),
            (samestep.parallelize, "parallel"),
            (samestep.loading, "loader"),
        ):
            expected = "the script itself imports samestep, and so decides which calls are divided"
            fix = "import samestep in the script itself"
            refuse = _refusing(f"samestep.{name}", expected, fix, "E_LAUNCH")
            stack.enter_context(replaced(module, **{name: refuse}))
        stack.enter_context(replaced(getpass, getpass=_refuse_password))
        stack.enter_context(replaced(bdb.Bdb, set_trace=_refuse_debugger))
        # `post_mortem` does not call `set_trace`.
        stack.enter_context(replaced(pdb.Pdb, interaction=_refuse_debugger))
        yield
