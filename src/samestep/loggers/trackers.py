"""Loggers by name, and those for TensorBoard, Weights & Biases and MLflow.

A missing package raises `InputError`.

The id of a run is stored in the run directory, so that a resumed run continues the same run of a
tracker.
"""

from __future__ import annotations

import logging
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from samestep.config.validation import require_package
from samestep.distributed.disk_operations import disk_operations
from samestep.distributed.env import read_wandb_mode
from samestep.loggers.logger import EVENTS, Event, JsonlLogger, Logger, MetricLogger, write_errors

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


def create_loggers(
    names: Sequence[str], run: Path, *, first_step: int = 0, quiet: bool = False
) -> list[Logger]:
    """Return the loggers of a run, some of `samestep.config.LOGGERS`, in the order of their names.

    Trackers continue the run with the id of the run directory.

    Args:
        names: names of loggers.
        run: run directory.
        first_step: step that the run continues after.
        quiet: show no progress.
    """
    from rich.console import Console  # lazy: `tensorboard_command` does not need rich

    from samestep.loggers.progress import ProgressLogger

    create: dict[str, Callable[[], Logger]] = {
        "jsonl": lambda: JsonlLogger(run / EVENTS),
        "tensorboard": lambda: TensorBoardLogger(run / "tensorboard", first_step),
        "progress": lambda: ProgressLogger(Console(stderr=True, quiet=quiet)),
        "wandb": lambda: WandbLogger(run, resume=True),
        "mlflow": lambda: MLflowLogger(run, resume=True),
    }
    return [create[name]() for name in names]


class TensorBoardLogger(MetricLogger):
    """Writes metrics as TensorBoard scalars.

    Args:
        path: log directory.
        first_step: step that the run continues after; TensorBoard hides later steps of the earlier
            files in the directory. An event `resume` sets it too. None hides nothing.
    """

    def __init__(self, path: Path, first_step: int | None = None) -> None:
        self._path = path
        self._first_step = first_step
        self._writer: SummaryWriter | None = None

    def log_event(self, event: Event) -> None:
        if event["event"] == "resume" and self._first_step is not None:
            self.close()
            self._writer = None
            self._first_step = event["step"]
        super().log_event(event)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        # Outside of the disk operation: most of a second, more on a busy machine.
        from torch.utils.tensorboard import SummaryWriter

        with disk_operations.run("write", self._path):
            if self._writer is None:
                first = self._first_step if self._path.exists() else None
                self._writer = SummaryWriter(
                    self._path, purge_step=None if first is None else first + 1
                )
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        if self._writer is not None:
            with disk_operations.run("write", self._path):
                self._writer.close()


def tensorboard_command(folder: Path) -> str:
    """Return the command that shows a folder in TensorBoard, with the path of a program that is not on PATH."""
    program = (
        "tensorboard"
        if shutil.which("tensorboard")
        else Path(sys.executable).with_name("tensorboard")
    )
    return f"{program} --logdir {shlex.quote(str(folder))}"


class Tracker(MetricLogger):
    """Base class of trackers, which store the id of their run in the run directory.

    Args:
        run: run directory; its name is the name of the run in the tracker.
        name: name of the logger.
        resume: continue the run that an earlier logger of this directory created.
    """

    def __init__(self, run: Path, name: str, *, resume: bool) -> None:
        self._directory = run
        self._id_path = run / name / "run-id.txt"
        self._resume = resume

    def _read_id(self) -> str | None:
        if self._resume and self._id_path.exists():
            return self._id_path.read_text(encoding="utf-8")
        return None

    def _write_id(self, run_id: str) -> None:
        with write_errors(OSError):
            self._id_path.parent.mkdir(exist_ok=True)
            self._id_path.write_text(run_id, encoding="utf-8")


class WandbLogger(Tracker):
    """Logs metrics and the recipe to Weights & Biases.

    Without a mode, WANDB_MODE decides; without the variable the mode is offline: files are written
    to `wandb/` in the run directory, and `wandb sync` uploads them.

    Args:
        run: run directory.
        project: project in Weights & Biases.
        mode: `offline`, `online` or `disabled`.
        resume: continue the run of this directory.
    """

    def __init__(
        self,
        run: Path,
        *,
        project: str = "samestep",
        mode: Literal["offline", "online", "disabled"] | None = None,
        resume: bool = False,
    ) -> None:
        require_package("the logger wandb", "wandb", "'samestep[loggers]'")
        super().__init__(run, "wandb", resume=resume)
        self._project = project
        self._mode = mode
        self._run: Any = None

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Log the recipe as the configuration of the run."""
        self._open().config.update(dict(config), allow_val_change=True)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._open().log(dict(values), step=step)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()

    def _open(self) -> Any:
        if self._run is None:
            import wandb

            run_id = self._read_id()
            with write_errors(wandb.Error):
                self._run = wandb.init(
                    project=self._project,
                    name=self._directory.resolve().name,
                    dir=self._directory,
                    mode=self._mode or read_wandb_mode() or "offline",
                    id=run_id,
                    resume=None if run_id is None else "allow",
                    settings=wandb.Settings(silent=True, console="off", x_disable_stats=True),
                )
            self._write_id(self._run.id)
        return self._run


_FLUSH_SECONDS = 1.0
# Limits of one request to MLflow.
_MAX_METRICS = 1000
_MAX_PARAMS = 100
_MAX_PARAM_CHARACTERS = 6000


class MLflowLogger(Tracker):
    """Logs metrics and the recipe to MLflow.

    Without a tracking URI, MLFLOW_TRACKING_URI decides; without the variable, metrics are stored in
    the SQLite file `mlflow.db` in the run directory. Metrics are sent about once per second.

    Args:
        run: run directory.
        experiment: experiment in MLflow.
        tracking_uri: URI of the tracking store.
        resume: continue the run of this directory.
    """

    def __init__(
        self,
        run: Path,
        *,
        experiment: str = "samestep",
        tracking_uri: str | None = None,
        resume: bool = False,
    ) -> None:
        for package in ("mlflow", "sqlalchemy", "alembic"):
            require_package("the logger mlflow", package, "'samestep[loggers]'")
        super().__init__(run, "mlflow", resume=resume)
        self._experiment = experiment
        self._uri = tracking_uri
        self._client: Any = None
        self._run_id = ""
        self._pending: list[Any] = []
        self._last_flush = 0.0

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Log the recipe as parameters such as `optimizer.options.lr`, unless the run has them already."""
        from mlflow.entities import Param

        client = self._open()
        with write_errors(_mlflow_error()):
            known = client.get_run(self._run_id).data.params  # MLflow refuses another value
        missing = [(key, str(value)) for key, value in flatten(config) if key not in known]
        self._send(
            "params",
            [Param(key, text[:_MAX_PARAM_CHARACTERS]) for key, text in missing],
            _MAX_PARAMS,
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = round(time.time() * 1000)
        self._pending += [Metric(name, value, now, step) for name, value in values.items()]
        if (
            time.monotonic() - self._last_flush > _FLUSH_SECONDS
            or len(self._pending) >= _MAX_METRICS
        ):
            self._flush()

    def log_event(self, event: Event) -> None:
        super().log_event(event)
        if event["event"] == "checkpoint":  # a run that is killed continues after this step
            self._flush()

    def close(self) -> None:
        if self._client is not None or self._pending:
            self._flush()
            with write_errors(_mlflow_error()):
                self._client.set_terminated(self._run_id)

    def _flush(self) -> None:
        self._send("metrics", self._pending, _MAX_METRICS)
        self._pending.clear()
        self._last_flush = time.monotonic()

    def _send(self, kind: str, items: list[Any], limit: int) -> None:
        client = self._open()
        with write_errors(_mlflow_error()):
            for first in range(0, len(items), limit):
                client.log_batch(self._run_id, **{kind: items[first : first + limit]})

    def _open(self) -> Any:
        if self._client is None:
            import mlflow

            logging.getLogger("mlflow.store.db.utils").setLevel(
                logging.WARNING
            )  # notes on the creation of tables
            directory = self._directory.resolve()
            uri = self._uri or (
                None if mlflow.is_tracking_uri_set() else f"sqlite:///{directory / 'mlflow.db'}"
            )
            with write_errors(_mlflow_error()):
                client = mlflow.MlflowClient(tracking_uri=uri)
                experiment = client.get_experiment_by_name(self._experiment)
                experiment_id = (
                    experiment.experiment_id
                    if experiment
                    else client.create_experiment(self._experiment)
                )
                known = self._read_id()
                self._run_id = (
                    known or client.create_run(experiment_id, run_name=directory.name).info.run_id
                )
                client.update_run(self._run_id, status="RUNNING")
            self._write_id(self._run_id)
            self._client = client
        return self._client


def _mlflow_error() -> type[Exception]:
    from mlflow.exceptions import MlflowException

    error: type[Exception] = MlflowException
    return error


def flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and values of nested mappings."""
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
