"""Checks that run on real ranks: functions of a worker module, whose results are gathered from all ranks."""

from __future__ import annotations

import copy
import functools
import math
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import samestep
from samestep.config import StrategyConfig
from samestep.errors import SamestepError
from samestep.parallelize import parallel_module
from samestep.view.view import View

Check = Callable[[], Any]


def run_checks(
    checks: dict[str, Check], strategy: StrategyConfig | None = None, reduction: Literal["fast", "exact"] = "fast"
) -> dict[str, list[Any]]:
    """Return for each check what it returned on each rank; a text that begins with `failed:` for an exception."""
    torch.set_default_dtype(torch.float64)
    View.divides_small_calls = True
    world = samestep.init(threads=1, timeout=timedelta(seconds=60), strategy=strategy, reduction=reduction)
    if reduction == "exact":
        samestep.parallel = functools.partial(samestep.parallel, reduction=reduction)
    results = {}
    for name, check in checks.items():
        torch.manual_seed(0)
        try:
            own = check()
        except Exception:
            own = f"failed: {traceback.format_exc()}"
        results[name] = samestep.all_gather(own, world)
    return results


def error_code(compute: Callable[[], Any]) -> str:
    """Return the code of the error that `compute` raises, the name of another exception, or `none`."""
    try:
        compute()
    except SamestepError as error:
        return error.code
    except Exception as error:
        return type(error).__name__
    return "none"


def deviation(model: nn.Module, script: Callable[[nn.Module], Iterable[Tensor | None]], **options: Any) -> list[Any]:
    """Run a script with a model and with a copy whose calls are divided.

    Returns:
        The largest difference of what the script yields, infinite if a tensor is absent in one run, and the numbers of
        divided and of whole calls.
    """
    divided = samestep.parallel(copy.deepcopy(model), **options)
    outcomes = []
    for one in (model, divided):
        torch.manual_seed(1)
        outcomes.append(list(script(one)))
    owner = parallel_module(divided)
    assert owner is not None
    return [difference(*outcomes), owner.summary.divided, owner.summary.whole]


def difference(one: list[Tensor | None], other: list[Tensor | None]) -> float:
    """Return the largest difference between tensors; infinite if shapes differ or one side has none."""
    assert one
    if len(one) != len(other):
        return math.inf
    largest = 0.0
    for a, b in zip(one, other, strict=True):
        if a is None and b is None:
            continue
        if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
            return math.inf
        if a.numel():
            full = b.full_tensor() if isinstance(b, DTensor) else b
            found = float((a.detach() - full.detach()).abs().max())
            largest = max(largest, math.inf if math.isnan(found) else found)
    return largest


def gradients(model: nn.Module) -> list[Tensor | None]:
    """Return copies of the gradients of a model's parameters."""
    return [None if one.grad is None else one.grad.clone() for one in model.parameters()]
