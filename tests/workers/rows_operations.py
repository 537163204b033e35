"""Each operation of a table on plain tensors and on Rows: value, dtype, gradients, aliasing, generator, exceptions."""

from __future__ import annotations

import faulthandler
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import samestep
from samestep.errors import SamestepError
from samestep.global_view import joined_view
from samestep.view.crossings import RowBounds
from samestep.view.ranks import Slices
from samestep.view.rows import Rows, gathered
from workers.rows_table import CASES, Case, Leaves

_SEED = 3


def run(form: str = "", cases: list[str] | None = None, progress: str = "") -> dict[str, Any]:
    """Return the number of cases of a form of tensors, and the difference of each case that has one, by name."""
    torch.set_num_threads(1)
    if progress:
        faulthandler.dump_traceback_later(100, exit=True)
    samestep.init(threads=1)
    view = joined_view(None, "fast")
    found: dict[str, Any] = {}
    count = 0
    for case in CASES:
        if case.name not in cases if cases else case.form != form:
            continue
        count += 1
        if progress:
            Path(f"{progress}{view.ranks.rank}").write_text(case.name, encoding="utf-8")
        for difference in _differences(case, view):
            found.setdefault(case.name, difference)
    return {"cases": count, **found}


def _differences(case: Case, view: Any) -> Iterator[str]:
    for has_gradients in (True, False):
        if has_gradients and not case.has_gradients:
            continue
        plain = _outcome(case, None, has_gradients)
        own = _outcome(case, view, has_gradients)
        if not own:
            continue
        if "error" in own and "error" not in plain:
            yield own["error"]
            continue
        for name in [*plain, *own]:
            difference = _difference(plain.get(name), own.get(name), case.tolerance)
            if difference:
                yield f"{name}{' with gradients' if has_gradients else ''}: {difference}"


def _difference(one: Any, other: Any, tolerance: float) -> str:
    if isinstance(one, float) and isinstance(other, float):
        one, other = torch.tensor(one), torch.tensor(other)
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return "" if type(one) is type(other) and one == other else f"{one!r:.300} / {other!r:.900}"
    if one.shape != other.shape or one.dtype != other.dtype:
        return f"{tuple(one.shape)} {one.dtype} / {tuple(other.shape)} {other.dtype}"
    if one.is_floating_point():
        if torch.allclose(one.double(), other.double(), tolerance, tolerance, equal_nan=True):
            return ""
        return f"differ by {(one.double() - other.double()).abs().max():.1e}"
    return "" if torch.equal(one, other) else f"{one} / {other}"


def _outcome(case: Case, view: Any, has_gradients: bool) -> dict[str, Any]:
    """Return everything that a case computes, on plain tensors without a view."""
    torch.manual_seed(_SEED)
    leaves = Leaves(has_gradients)
    inputs = [leaves.own(value) for value in case.inputs()]
    arguments = list(inputs)
    if view is not None:
        bounds = [
            (case.batch * rank // view.ranks.size, case.batch * (rank + 1) // view.ranks.size)
            for rank in range(view.ranks.size)
        ]
        slices = Slices(bounds, view.ranks.size, view.ranks.rank)
        rows = [RowBounds(view.row_messages(), slices, len(value) // case.batch) for value in inputs]
        inputs = [
            value.detach()[bound.start : bound.stop].clone().requires_grad_(value.requires_grad)
            for value, bound in zip(inputs, rows, strict=True)
        ]
        arguments = [Rows(value, bound) for value, bound in zip(inputs, rows, strict=True)]
    found: dict[str, Any] = {}
    try:
        result = case.compute(leaves, *arguments)
        results = [item for item in _tensors(result) if isinstance(item, Tensor)]
        for index, item in enumerate(_tensors(result)):
            found[f"value {index}"] = gathered(item).detach().clone() if isinstance(item, Tensor) else item
        if has_gradients:
            _backward(results)
    except SamestepError as error:
        if case.name.startswith("may be refused") and error.code == "E_INCOMPATIBLE":
            return {}
        found["error"] = "refused" if case.is_refused else traceback.format_exc()[-900:]
        return found
    except Exception as error:
        found["error"] = "refused" if case.is_refused else f"{type(error).__name__} {error}"[:100]
        return found
    if case.is_refused:
        return {"error": "refused" if view is None else "was not"}
    if has_gradients:
        for index, value in enumerate(inputs):
            gradient = torch.zeros_like(value) if value.grad is None else value.grad
            found[f"gradient {index}"] = gradient if view is None else rows[index].gather([gradient + 0])
        for name, value in leaves.made.items():
            found[f"gradient of {name}"] = value.grad
    else:
        _write(results, arguments, found)
    found["generator"] = torch.rand(1)
    return found


def _tensors(result: Any) -> list[Any]:
    if isinstance(result, tuple | list):
        return [one for item in result for one in _tensors(item)]
    return [result]


def _backward(results: list[Tensor]) -> None:
    total = None
    for item in results:
        if item.requires_grad:
            weights = torch.linspace(1, 2, item.numel(), dtype=torch.float64).view(item.shape)
            part = (item.double() * weights).sum()
            total = part if total is None else total + part
    if total is not None and total.requires_grad:
        total.backward()


def _write(results: list[Tensor], arguments: list[Tensor], found: dict[str, Any]) -> None:
    """Write into the results and the arguments in several ways, and note what each sees."""
    writes: list[Callable[[Tensor], Any]] = [
        lambda value: value.fill_(1),
        lambda value: value[0].fill_(2),
        lambda value: value.numpy().__setitem__(Ellipsis, 3),
        lambda value: value[-1:].fill_(4),
    ]
    targets = [*results[:2], *arguments]
    for number, write in enumerate(writes):
        for place, value in enumerate(targets):
            if value.dim() == 0 or (value.dtype == torch.bfloat16 and number == 2):
                continue
            try:
                write(value)
            except (RuntimeError, ValueError, IndexError) as error:
                found[f"write {number} {place}"] = str(error)[:60]
        for index, item in enumerate(targets):
            found[f"write {number}, seen by {index}"] = gathered(item.clone()).clone()
