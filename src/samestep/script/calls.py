"""Division of the calls of modules in a script that knows one device.

The outermost call of a module with parameters is divided, as that of a module given to
`samestep.parallel`. The state
of the division is kept beside the module: its class, its attributes and its files stay the script's
    own.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
from torch import nn

from samestep.script.records import Records
from samestep.script.replaced import replaced
from samestep.view.compiled import ForwardOfCalls, with_compiler
from samestep.view.in_step import script_line
from samestep.view.parallel import ParallelModule

# Their calls are those of the module inside, which is the outermost one.
_TRANSPARENT = (nn.DataParallel,)


def is_divisible(module: nn.Module) -> bool:
    """Whether an outermost call of a module is divided: it has parameters, and is no wrapper of another module."""
    is_wrapper = isinstance(module, (*_TRANSPARENT, torch.jit.ScriptModule))
    return not is_wrapper and next(module.parameters(), None) is not None


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
        self._forward: tuple[Any, Any] = (
            None,
            None,
        )  # attribute of the module in a call, and its own one before
        self._thread = threading.get_ident()
        self._is_inside = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Replace `nn.Module.__call__` during the block."""
        of_torch = nn.Module.__call__

        @functools.wraps(of_torch)
        def call(module: nn.Module, /, *arguments: Any, **options: Any) -> Any:
            if self._is_inside or torch.compiler.is_compiling() or not self._is_outermost(module):
                return of_torch(module, *arguments, **options)
            return self._divided(of_torch, module, arguments, options)

        nn.Module.__call__ = call  # type: ignore[method-assign]
        # Not `backward` and `grad` themselves, by which tensors with rows elsewhere are dispatched.
        # Private.
        backward = self._timed(vars(torch.autograd)["_engine_run_backward"])
        try:
            with (
                self._records.steps_counted(),
                replaced(torch.autograd, _engine_run_backward=backward),
            ):
                yield
        finally:
            nn.Module.__call__ = of_torch  # type: ignore[method-assign]

    def _timed(self, run_backward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that also records the backwards of the script, which are in no call and no backward."""

        @functools.wraps(run_backward)
        def timed(*arguments: Any, **options: Any) -> Any:
            if (
                self._is_inside
                or self._thread != threading.get_ident()
                or torch._C._current_graph_task_id() != -1
            ):
                return run_backward(*arguments, **options)
            began = perf_counter()
            result = run_backward(*arguments, **options)
            self._records.add_backward(began, script_line(sys._getframe(1)))
            return result

        return timed

    def _is_outermost(self, module: nn.Module) -> bool:
        if self._thread != threading.get_ident():
            return False
        if id(module) in self._owners:
            return True
        # In a backward, checkpointing computes modules that are inside of others again.
        return torch._C._current_graph_task_id() == -1 and is_divisible(module)  # private

    def _owner(self, module: nn.Module) -> tuple[ParallelModule, ForwardOfCalls]:
        known = self._owners.get(id(module))
        if known is not None and known[0]() is module:
            return known[1:]
        key = id(module)

        def forget(reference: weakref.ref[nn.Module]) -> None:
            if (
                key in self._owners and self._owners[key][0] is reference
            ):  # otherwise another module has this address
                del self._owners[key]

        def compute(
            module: nn.Module, compiler: Any, arguments: tuple[Any, ...], options: dict[str, Any]
        ) -> Any:
            eager = self._put_back(module) or functools.partial(type(module).forward, module)
            return owner.call(with_compiler(compiler, eager), eager, arguments, options)

        owner = self._owner_of(module)
        self._owners[key] = (
            weakref.ref(module, forget),
            owner,
            ForwardOfCalls(compute, type(module).forward),
        )
        return self._owners[key][1:]

    def _put_back(self, module: nn.Module) -> Any:
        """Give its own attribute `forward`, of compiled and patched modules, back to a module; return it, or None."""
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
        """Call a module; hooks of the module itself see whole batches, as the script outside of it."""
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
