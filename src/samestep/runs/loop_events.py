"""Events and progress of a custom loop, from the hooks of its engines."""

from __future__ import annotations

import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from samestep.data.batch import GlobalBatch
from samestep.data.loader import Loader
from samestep.engine.callbacks import Callback
from samestep.engine.checksum import checksum_event
from samestep.engine.engine import Engine
from samestep.engine.fast_merging import SEPARATE
from samestep.engine.step_stats import StepResult
from samestep.errors import InputError
from samestep.loggers.logger import RunLogger
from samestep.loggers.rank_monitor import RankProgress

STEP_SECONDS = 0.1  # least time between two logged steps
_OTHER = "loaded"  # prefix of the evaluation of another state than that of the last step


class ComputationLog:
    """Logs how an engine computes the microbatches of a rank, when that changes: separately, together, as CUDA graphs.

    Args:
        logger: the logger of the run.
    """

    def __init__(self, logger: RunLogger) -> None:
        self._logger = logger
        # As logged last:
        self._separate_reason: str | None = None
        self._replays_graphs: bool | None = None

    def end_step(self, engine: Engine, step: int) -> None:
        """Log changes in a step."""
        if (reason := engine.separate_reason) != self._separate_reason:
            self._separate_reason = reason
            self._logger.log_event("note", text=f"{SEPARATE}: {reason}")
        if (graphs := engine.step_runner.replays_graphs) not in (None, self._replays_graphs):
            self._replays_graphs, reason = graphs, engine.step_runner.graphs_reason
            self._logger.log_event("cuda_graphs", step=step, used=graphs, reason=reason)


class LoopEvents(Callback):
    """Logs steps, evaluations and checkpoints of the engines of a world, and holds the progress of this rank.

    A step is logged if `STEP_SECONDS` have passed since the last logged one, if it was skipped, and before any
    other event. Its speed and its wait for data are means over the steps since then. All values are on the host
    already. The first engine that steps defines the steps of the run; values of others are metrics with their names.

    Args:
        logger: the logger of the run, which has no destination on ranks other than 0.
        is_new: the run has no earlier part.
        checksum_every: steps between logged checksums of the state, 0 for none.
    """

    def __init__(self, logger: RunLogger, *, is_new: bool, checksum_every: int) -> None:
        self._logger, self._checksum_every = logger, checksum_every
        self._engines, self._numbers = 0, WeakKeyDictionary[Engine, int]()
        self._main: int | None = None  # number of the engine that made the first step
        self._began = self._mark = time.perf_counter()
        self._last: int | None = 0 if is_new else None  # last step of this process; None before
        self._logged: dict[str, float] = {}  # by engine: time of the last logged step
        self._pending: StepResult | None = None  # the last step, unless logged
        self._rate: dict[str, float] = {}
        self._evaluations = 0  # of the state after the last step
        self._steps = self._samples = 0  # since the last logged step
        self._seconds = self._data_seconds = 0.0
        self._loader: Loader | None = None
        self._position: dict[str, int] = {}  # epoch of the last batch with a loader, and its number of steps
        self._local_samples = 0
        self._has_config = self._is_stopped = False
        self._computation = ComputationLog(logger)

    @property
    def rank_progress(self) -> RankProgress:
        """Work of this rank; any thread may read it."""
        loader = self._loader
        return RankProgress(self._last or 0, self._local_samples, loader.waits.seconds if loader is not None else 0.0)

    def engine_created(self, engine: Engine) -> None:
        self._engines += 1
        self._numbers[engine] = self._engines

    def _prefix(self, engine: Engine) -> str:
        """Return the prefix of metrics of an engine; empty for the engine that defines the steps of the run."""
        number = self._numbers[engine]
        return "" if self._main in (None, number) else f"engine {number}/"

    def begin_step(self, engine: Engine, batch: GlobalBatch) -> None:
        if not self._prefix(engine):
            self._main = self._numbers[engine]
            self._begin(engine, batch)

    def _begin(self, engine: Engine, batch: GlobalBatch) -> None:
        if self._last != engine.steps:
            self._flush()
            self._resume(engine.steps, batch)
        if not self._has_config:
            self._has_config, self._mark = True, time.perf_counter()
            config = _config(engine, batch)
            self._logger.log_config(config)
            self._logger.log_event("config", config=config)
        self._end_of_batch = batch.end
        self._size, self._local_size = batch.size, sum(microbatch.size for microbatch in batch.local_microbatches)
        loader = batch.source if isinstance(batch.source, Loader) else None
        if loader is not self._loader:
            self._loader, self._position = loader, {}
            self._data_seconds = loader.waits.seconds - loader.waits.last if loader is not None else 0.0
        if loader is not None:
            epoch, position = batch.begin.epoch, self._position
            if position.get("epoch") != epoch:
                steps = -(-loader.samples_of(epoch) // loader.batch_size)
                self._position = position = {"epoch": epoch, "step_in_epoch": 0, "steps_in_epoch": steps}
            position["step_in_epoch"] = batch.begin.samples // loader.batch_size + 1

    def end_step(self, engine: Engine, result: StepResult) -> None:
        now = time.perf_counter()
        if name := self._prefix(engine):
            if now - self._logged.get(name, -math.inf) >= STEP_SECONDS:
                self._logged[name] = now
                values = {"loss": result.loss, **_rate(engine, result)}
                self._logger.log_metrics(result.step, {f"{name}{key}": value for key, value in values.items()})
            return
        self._last, self._evaluations = result.step, 0
        self._is_stopped = result.stop
        self._steps += 1
        self._samples += self._size
        self._local_samples += self._local_size
        self._seconds += now - self._mark
        self._mark = now
        is_due = now - self._logged.get(name, -math.inf) >= STEP_SECONDS
        self._pending, self._rate = result, _rate(engine, result)
        if is_due or result.skipped:
            self._logged[name] = now
            self._flush()
        self._computation.end_step(engine, result.step)
        if self._checksum_every and result.step % self._checksum_every == 0:
            self._log_checksum(engine)

    def _log_checksum(self, engine: Engine) -> None:
        try:
            event = checksum_event(engine, self._end_of_batch)
        except InputError as error:  # a loop without checkpoints can have any state
            self._checksum_every = 0
            self._logger.log_event("note", text=f"no checksums of the state: {error.value}")
            return
        self._logger.log_event("checksum", **event)
        self._mark = time.perf_counter()

    def end_evaluation(self, engine: Engine, values: dict[str, float]) -> None:
        name = self._prefix(engine)
        self._flush()
        if self._last is None:
            self._resume(engine.steps, None)
        if name or engine.steps != self._last:
            prefix = f"{name}evaluation/" if name else f"{_OTHER}/"
            named = {f"{prefix}{key}": value for key, value in values.items() if key != "samples"}
            self._logger.log_metrics(engine.steps, named)
        else:
            self._evaluations += 1
            epoch = {} if self._loader is None else {"epoch": self._loader.cursor.epoch}
            named = values
            if self._evaluations > 1:  # on other data
                named = {f"{key}_{self._evaluations}": value for key, value in values.items() if key != "samples"}
            self._logger.log_event("evaluation", step=self._last, **epoch, **named)
        self._mark = time.perf_counter()

    def checkpoint_saved(self, step: int, path: Path, is_best: bool) -> None:
        self._flush()
        self._logger.log_event("checkpoint", step=step, path=path.name, is_best=is_best)
        self._mark = time.perf_counter()

    def end(self) -> None:
        """Log the end of the run."""
        self._flush()
        step = self._last or 0
        if self._is_stopped:
            self._logger.log_event("stop", step=step, text=f"stopped after step {step}")
        seconds = round(time.perf_counter() - self._began, 3)
        self._logger.log_event("end", stopped=self._is_stopped, step=step, seconds=seconds)

    def _resume(self, step: int, batch: GlobalBatch | None) -> None:
        position = {"epoch": batch.begin.epoch, "samples": batch.begin.samples} if batch is not None else {}
        text = f"resuming after step {step}"
        self._logger.log_event("resume", step=step, **position, text=text)
        self._last = step

    def _flush(self) -> None:
        """Log the last step, unless it is logged."""
        result, loader, waited, self._pending = self._pending, self._loader, 0.0, None
        if result is None:
            return
        position = self._position
        if loader is not None:
            total = loader.waits.seconds
            waited, self._data_seconds = total - self._data_seconds, total
            position = position | ({"epochs": loader.planned_epochs} if loader.planned_epochs else {})
        self._logger.log_event(
            "step",
            step=result.step,
            **position,
            loss=result.loss,
            **self._rate,
            grad_norm=result.grad_norm,
            skipped=result.skipped,
            samples_per_second=round(self._samples / max(self._seconds, 1e-9), 1),
            data_seconds=round(waited / self._steps, 6),
        )
        self._steps = self._samples = 0
        self._seconds = 0.0


def _rate(engine: Engine, result: StepResult) -> dict[str, float]:
    """Return the learning rate as `lr`; nothing if another library updates the parameters."""
    return {"lr": result.lr} if getattr(engine.optimizer, "has_rate", True) else {}


def _config(engine: Engine, batch: GlobalBatch) -> dict[str, Any]:
    """Return the settings of a loop by the keys of recipes."""
    optimizer, source = engine.optimizer, batch.source
    config: dict[str, Any] = {
        "batch_size": source.batch_size if isinstance(source, Loader) else batch.size,
        "microbatches": batch.microbatches,
        "step": asdict(engine.config),
    }
    if getattr(optimizer, "has_rate", True):
        options = {key: v for key, v in optimizer.defaults.items() if isinstance(v, bool | int | float | str)}
        config["optimizer"] = {"name": type(optimizer).__name__, "options": options}
    return config
