"""Run of a script on several processes: what a script that knows one device needs, around its own code."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from samestep.config import Reduction, StrategyConfig
from samestep.distributed.streams import report_line
from samestep.global_view import joined_view, owner_of
from samestep.launcher.job import rank_and_size
from samestep.launcher.worker import run_script
from samestep.script.calls import OutermostCalls
from samestep.script.loaders import own_rows_of_loaders
from samestep.script.mode import file_of_module, imports_samestep
from samestep.session import init
from samestep.view.batches import ViewOfBatches
from samestep.view.view import View


def run(
    script: Path,
    arguments: tuple[str, ...],
    restarts: int = 0,
    max_restarts: int = 0,
    *,
    is_module: bool = False,
    own_group: bool = False,
    reduction: Reduction = "fast",
) -> None:
    """Run a script in this rank, with the calls of its models divided unless it imports Samestep.

    Args:
        script: file, or the name of a module with `is_module`.
        arguments: arguments of the script.
        restarts: number of earlier starts.
        max_restarts: largest number of restarts.
        is_module: run a module, as `python -m`.
        own_group: the script creates a process group of its own; nothing is divided.
        reduction: reduction of divided calls.
    """
    rank, size = rank_and_size()
    file, package = file_of_module(str(script)) if is_module else (script, "")
    is_unchanged = not own_group and not (file is not None and imports_samestep(file, package))
    if rank == 0 and size > 1:
        report_line(f"samestep: {script} on {size} processes: {_mode(is_unchanged, own_group)}")
    run_script(
        *(script, arguments, restarts, max_restarts),
        own_group=own_group,
        is_module=is_module,
        surroundings=partial(_surroundings, reduction, is_unchanged=is_unchanged),
    )


def _mode(is_unchanged: bool, own_group: bool) -> str:
    if own_group:
        return "it creates a process group of its own"
    return "calls of its models are divided" if is_unchanged else "it imports samestep"


@contextmanager
def _surroundings(reduction: Reduction, *, is_unchanged: bool) -> Iterator[None]:
    if not is_unchanged:
        yield
        return
    with unchanged(reduction):
        yield


@contextmanager
def unchanged(reduction: Reduction = "fast", strategy: StrategyConfig | None = None) -> Iterator[None]:
    """Give a script that knows one device what it needs on several ranks, during the block."""
    _, size = rank_and_size()
    with ExitStack() as stack:
        if size == 1 and reduction == "fast":
            stack.enter_context(own_rows_of_loaders(lambda: None))
            yield
            return
        init(reduction=reduction, strategy=strategy)
        view = joined_view(None, reduction)
        options: dict[str, Any] = {
            "microbatches": None,
            "batch_norm": "global",
            "reduction": reduction,
            "whole": True,
            "strict": False,
        }
        calls = OutermostCalls(partial(owner_of, **options))
        stack.enter_context(own_rows_of_loaders(partial(_readers, view)))
        stack.enter_context(calls.installed())
        yield
    if view.ranks.rank == 0:
        for line in summary(view):
            report_line(line)


def _readers(view: View) -> ViewOfBatches | None:
    return ViewOfBatches(view) if view.ranks.size > 1 else None


def summary(view: View) -> Sequence[str]:
    """Return lines that say which calls were divided, and why others were whole."""
    lines = []
    for module in view.modules:
        calls = module.divided + module.watched + module.whole
        reasons = f"; whole: {'; '.join(module.reasons)}" if module.reasons else ""
        lines.append(f"samestep: {module.module}: {module.divided} of {calls} calls divided{reasons}")
    return lines
