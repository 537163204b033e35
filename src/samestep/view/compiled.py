"""torch.compile around a module with divided calls: only the module's own forward is compiled.

`torch.compile(model)` compiles every function that it reaches. The way of a divided call is not for
a compiler, so it is left out, and the compiler is put back for the forward of the own rows.

Private: `torch._C._dynamo.eval_frame`, `torch._dynamo.eval_frame.skip_code` (torch 2.11 and 2.13).
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

_eval_frame = torch._C._dynamo.eval_frame


class ForwardOfCalls:
    """The attribute `forward` of a class with divided calls.

    Args:
        call: receives the module, its eager forward, the forward to use, and the arguments.
        base: the class's own forward.
    """

    def __init__(self, call: Callable[..., Any], base: Callable[..., Any]) -> None:
        # Named and documented as the module's own: trainers of other libraries read the signature.
        @functools.wraps(base)
        def forward(self: Any, *arguments: Any, **options: Any) -> Any:
            if torch.compiler.is_compiling():  # a larger function is compiled, and computed whole
                return base(self, *arguments, **options)
            compiler = _eval_frame.set_eval_frame(None)
            try:
                return call(self, compiler, arguments, options)
            finally:
                _eval_frame.set_eval_frame(compiler)

        self._forward: Any = forward
        self._is_skipped = False

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if not self._is_skipped and "torch._dynamo" in sys.modules:
            # Here, since torch.compile loads the compiler, and reads this attribute, after
            # `samestep.parallel`.
            sys.modules["torch._dynamo"].eval_frame.skip_code(self._forward.__code__)
            self._is_skipped = True
        if instance is None:
            return self._forward
        return types.MethodType(self._forward, instance)


def with_compiler(compiler: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs `function` as the compiler would."""
    if compiler is None:
        return function

    def traced(*arguments: Any, **options: Any) -> Any:
        # The compiler skips frames of torch.nn, such as the forward of `Sequential`, but not
        # inlined frames.
        return function(*arguments, **options)

    def compiled(*arguments: Any, **options: Any) -> Any:
        _eval_frame.set_eval_frame(compiler)
        try:
            return traced(*arguments, **options)
        finally:
            _eval_frame.set_eval_frame(None)

    return compiled
