"""One run of an unchanged script in a rank, with a record of its steps, its text and the ways of its calls."""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from samestep.config import StrategyConfig
from samestep.launcher.process_state import process_state, rank_and_size
from samestep.launcher.worker import run_script
from samestep.script.unchanged import unchanged
from samestep.strategies.divided_parameters import full_tensor
from samestep.view.view import View

STEPS = 10  # whose parameters are recorded


@dataclass(frozen=True)
class Observed:
    """How a script runs.

    Attributes:
        script: its file.
        folder: folder in which it runs, and that receives the record.
        is_plain: by plain Python, on one process.
        is_double: with float64 as default type.
        reduction: of divided calls.
        strategy: of divided calls.
    """

    script: Path
    folder: Path
    is_plain: bool = False
    is_double: bool = False
    reduction: Any = "fast"
    strategy: Any = "ddp"

    def run(self) -> None:
        """Run the script in this rank."""
        rank, _ = rank_and_size()
        work = self.folder / "work"
        work.mkdir(parents=True, exist_ok=True)
        os.chdir(work)
        if rank == 0:
            for number, name in ((1, "out"), (2, "err")):
                descriptor = os.open(self.folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                os.dup2(descriptor, number)
        torch.set_num_threads(1)
        seed_all()
        View.divides_small_calls = True
        if self.is_double:
            torch.set_default_dtype(torch.float64)
        run_script(self.script, (), own_group=False, surroundings=partial(self._surroundings, rank))

    @contextmanager
    def _surroundings(self, rank: int) -> Iterator[None]:
        steps: list[numpy.ndarray[Any, Any]] = []
        hook = register_optimizer_step_post_hook(partial(_record, steps))
        record: dict[str, Any] = {"calls": []}
        try:
            if self.is_plain:
                yield
                return
            with unchanged(self.reduction, StrategyConfig(name=self.strategy)) as summary:
                yield
                if process_state.view is not None:
                    record["calls"] = [vars(one) for one in process_state.view.modules]
                record["draws"] = any(reading.state.draws for reading in summary.readings.values())
        finally:
            hook.remove()
            sys.stdout.flush()
            if rank == 0:
                (self.folder / "calls.json").write_text(json.dumps(record, default=list), encoding="utf-8")
                numpy.savez(self.folder / "steps.npz", *steps)


def seed_all() -> None:
    """Seed the global generators: scripts without seeds are compared too."""
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


def _record(steps: list[Any], optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if len(steps) < STEPS:
        values = [value for group in optimizer.param_groups for value in group["params"]]
        steps.append(torch.cat([full_tensor(value.detach()).double().flatten() for value in values]).numpy())


def run(observed: Observed) -> None:
    """Run a script as described, in this rank."""
    observed.run()
