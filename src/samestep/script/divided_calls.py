"""Division of the calls of modules, and of the batches of loaders, in a script for one device.

The outermost call of a module with parameters is divided, as that of a module given to
`samestep.parallel`. The state of the division is kept beside the module: its class, its attributes
and its files stay the script's own.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
from torch import nn

from samestep.distributed.collective_check import script_line
from samestep.script.patches import replaced
from samestep.script.summary import Records
from samestep.view.compiled import ForwardOfCalls, with_compiler
from samestep.view.parallel_module import ParallelModule

# The calls of `DataParallel` are those of the module inside, which is the outermost one.
_WRAPPERS = (nn.DataParallel, torch.jit.ScriptModule)


def is_divisible(module: nn.Module) -> bool:
    """Whether an outermost call is divided: of a module with parameters, which is no wrapper."""
    return not isinstance(module, _WRAPPERS) and next(module.parameters(), None) is not None


def _is_in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1  # private


class OutermostCalls:
    """Owners of the calls of modules, made at the first outermost call of each module.

    Args:
        owner_of: makes the owner of a module's calls, on all ranks at the same call.
        records: receives the times of calls and backwards.
    """

    def __init__(self, owner_of: Callable[[nn.Module], ParallelModule], records: Records) -> None:
        self._owner_of = owner_of
        self._records = records
        self._owners: dict[int, tuple[weakref.ref[nn.Module], ParallelModule, ForwardOfCalls]] = {}
        # Attribute of the module in a call, and its own one before.
        self._forward: tuple[Any, Any] = (None, None)
        self._thread = threading.get_ident()
        self._process = os.getpid()
        self._is_inside = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Replace `nn.Module.__call__` during the block."""
        of_torch = nn.Module.__call__
        # Not `backward` and `grad` themselves, by which tensors with rows elsewhere are dispatched.
        # Private.
        run_backward = vars(torch.autograd)["_engine_run_backward"]

        @functools.wraps(of_torch)
        def call(module: nn.Module, /, *arguments: Any, **options: Any) -> Any:
            if self._is_inside or torch.compiler.is_compiling() or not self._is_outermost(module):
                return of_torch(module, *arguments, **options)
            return self._divided(of_torch, module, arguments, options)

        @functools.wraps(run_backward)
        def timed(*arguments: Any, **options: Any) -> Any:
            is_other = self._is_inside or self._thread != threading.get_ident()
            if is_other or _is_in_backward():
                return run_backward(*arguments, **options)
            began = perf_counter()
            result = run_backward(*arguments, **options)
            self._records.add_backward(began, script_line(sys._getframe(1)))
            return result

        with (
            self._records.steps_counted(),
            replaced(nn.Module, __call__=call),
            replaced(torch.autograd, _engine_run_backward=timed),
        ):
            yield

    def _is_outermost(self, module: nn.Module) -> bool:
        # A process that the script has forked has no other ranks.
        if self._thread != threading.get_ident() or self._process != os.getpid():
            return False
        if id(module) in self._owners:
            return True
        # In a backward, checkpointing computes modules that are inside of others again.
        return not _is_in_backward() and is_divisible(module)

    def _owner(self, module: nn.Module) -> tuple[ParallelModule, ForwardOfCalls]:
        key = id(module)
        known = self._owners.get(key)
        if known is not None and known[0]() is module:
            return known[1:]

        def forget(reference: weakref.ref[nn.Module]) -> None:
            # Otherwise another module has this address by now.
            if key in self._owners and self._owners[key][0] is reference:
                del self._owners[key]

        def compute(
            module: nn.Module, compiler: Any, arguments: tuple[Any, ...], options: dict[str, Any]
        ) -> Any:
            eager = self._put_back(module) or functools.partial(type(module).forward, module)
            return owner.call(with_compiler(compiler, eager), eager, arguments, options)

        owner = self._owner_of(module)
        forward = ForwardOfCalls(compute, type(module).forward)
        self._owners[key] = (weakref.ref(module, forget), owner, forward)
        return owner, forward

    def _put_back(self, module: nn.Module) -> Any:
        """Give its own attribute `forward` back to a compiled or patched module.

        Returns:
            The attribute, or None.
        """
        attributes = module.__dict__
        used, own = self._forward
        if used is not None and attributes.get("forward") is used:
            del attributes["forward"]
            if own is not None:
                attributes["forward"] = own
        return own

    def _divided(
        self,
        of_torch: Callable[..., Any],
        module: nn.Module,
        arguments: tuple[Any, ...],
        options: dict[str, Any],
    ) -> Any:
        """Call a module; hooks of the module see whole batches, as the script outside of it."""
        self._is_inside = True
        try:
            owner, forward = self._owner(module)
            begin = self._records.begin_call(owner.summary)
            # For the way from `__call__` to `forward` only: copies and files of the module must not
            # contain it.
            attributes = module.__dict__
            self._forward = forward.__get__(module), attributes.get("forward")
            attributes["forward"] = self._forward[0]
            try:
                result = of_torch(module, *arguments, **options)
            finally:
                self._put_back(module)
                self._forward = None, None
            self._records.end_call(owner.summary, begin, script_line(sys._getframe(2)))
            return result
        finally:
            self._is_inside = False
