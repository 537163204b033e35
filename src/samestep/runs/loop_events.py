"""Events and progress of the loop of a script, from the steps of its optimizer."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from samestep.loggers.logger import RunLogger
from samestep.loggers.rank_monitor import RankProgress

STEP_SECONDS = 0.1  # least time between two logged steps


class LoopEvents:
    """Logs the steps of the first optimizer that steps, and holds the progress of this rank.

    A step is logged if `STEP_SECONDS` have passed since the last logged one, and at the end. Losses
    and other values are the script's own, which logs them with `World.log`.

    Args:
        logger: the logger of the run, which has no destination on ranks other than 0.
    """

    def __init__(self, logger: RunLogger) -> None:
        self._logger = logger
        self._optimizer: torch.optim.Optimizer | None = None
        self._steps = 0
        self._logged_step = 0
        self._began = self._logged = time.perf_counter()
        self._hook = register_optimizer_step_post_hook(self._end_step)

    @property
    def rank_progress(self) -> RankProgress:
        """Work of this rank; any thread may read it."""
        return RankProgress(self._steps, 0, 0.0)

    def _end_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._optimizer is None:
            self._optimizer = optimizer
        if optimizer is not self._optimizer:
            return
        self._steps += 1
        if time.perf_counter() - self._logged >= STEP_SECONDS:
            self._log_step()

    def _log_step(self) -> None:
        if self._optimizer is None or self._steps == self._logged_step:
            return
        now = time.perf_counter()
        rate = round((self._steps - self._logged_step) / max(now - self._logged, 1e-9), 3)
        self._logged_step = self._steps
        self._logged = now
        group = self._optimizer.param_groups[0]
        values = {"lr": float(group["lr"])} if "lr" in group else {}
        self._logger.log_event("step", step=self._steps, **values, steps_per_second=rate)

    def close(self) -> None:
        """Stop observing, and log the last step."""
        self._hook.remove()
        self._log_step()

    def end(self, *, stopped: bool = False) -> None:
        """Log the end of the run, which a stop request can have caused."""
        self._log_step()
        seconds = round(time.perf_counter() - self._began, 3)
        self._logger.log_event("end", stopped=stopped, step=self._steps, seconds=seconds)
