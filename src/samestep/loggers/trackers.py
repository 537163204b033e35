"""Loggers by name, and those for TensorBoard, Weights & Biases, MLflow and trackio.

A missing package raises `InputError`.

The id of a run is stored in the run directory, so that a resumed run continues the same run of a tracker.
"""

from __future__ import annotations

import logging
import secrets
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from samestep.distributed.disk_operations import disk_operations
from samestep.distributed.env import read_wandb_mode
from samestep.loggers.logger import EVENTS, Event, JsonlLogger, Logger, MetricLogger, require_package, write_errors

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


def create_loggers(names: Sequence[str], run: Path, *, first_step: int = 0, quiet: bool = False) -> list[Logger]:
    """Return the loggers of a run, some of `samestep.config.LOGGERS`, in the order of their names.

    Trackers continue the run whose id is in the run directory.

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
        "trackio": lambda: TrackioLogger(run, resume=True),
    }
    return [create[name]() for name in names]


class TensorBoardLogger(MetricLogger):
    """Writes metrics as TensorBoard scalars.

    Args:
        path: log directory.
        first_step: step that the run continues after; TensorBoard hides later steps of the earlier files in the
            directory. An event `resume` sets it too. None hides nothing.
    """

    def __init__(self, path: Path, first_step: int | None = None) -> None:
        self._path, self._first_step = path, first_step
        self._writer: SummaryWriter | None = None

    def log_event(self, event: Event) -> None:
        if event["event"] == "resume" and self._first_step is not None:
            self.close()
            self._writer, self._first_step = None, event["step"]
        super().log_event(event)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        # Outside of the disk operation: most of a second, more on a busy machine.
        from torch.utils.tensorboard import SummaryWriter

        with disk_operations.run("write", self._path):
            if self._writer is None:
                first = self._first_step if self._path.exists() else None
                self._writer = SummaryWriter(self._path, purge_step=None if first is None else first + 1)
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        if self._writer is not None:
            with disk_operations.run("write", self._path):
                self._writer.close()


class _IdFile:
    """File in a run directory with the id of the run of a tracker."""

    def __init__(self, run: Path, tracker: str) -> None:
        self._path = run / tracker / "run-id.txt"

    def read(self) -> str | None:
        return self._path.read_text(encoding="utf-8") if self._path.exists() else None

    def write(self, run_id: str) -> None:
        with write_errors(OSError):
            self._path.parent.mkdir(exist_ok=True)
            self._path.write_text(run_id, encoding="utf-8")


def tensorboard_command(folder: Path) -> str:
    """Return the command that shows a folder in TensorBoard, with the path of a program that is not on PATH."""
    program = "tensorboard" if shutil.which("tensorboard") else Path(sys.executable).with_name("tensorboard")
    return f"{program} --logdir {shlex.quote(str(folder))}"


class WandbLogger(MetricLogger):
    """Logs metrics and the recipe to Weights & Biases.

    Without a mode, WANDB_MODE decides; without the variable the mode is offline: files are written to `wandb/` in the
    run directory, and `wandb sync` uploads them.

    Args:
        run: run directory; its name is the name of the run in Weights & Biases.
        project: project in Weights & Biases.
        mode: `offline`, `online` or `disabled`.
        resume: continue the run that an earlier logger of this directory created.
    """

    def __init__(
        self,
        run: Path,
        *,
        project: str = "samestep",
        mode: Literal["offline", "online", "disabled"] | None = None,
        resume: bool = False,
    ) -> None:
        require_package("wandb", "wandb")
        self._directory, self._project, self._mode, self._resume = run, project, mode, resume
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

            id_file = _IdFile(self._directory, "wandb")
            run_id = id_file.read() if self._resume else None
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
            id_file.write(self._run.id)
        return self._run


_FLUSH_SECONDS = 1.0
_MAX_METRICS, _MAX_PARAMS = 1000, 100  # limits of one request to MLflow
_MAX_PARAM_CHARACTERS = 6000


class MLflowLogger(MetricLogger):
    """Logs metrics and the recipe to MLflow.

    Without a tracking URI, MLFLOW_TRACKING_URI decides; without the variable, metrics are stored in the SQLite file
    `mlflow.db` in the run directory. Metrics are sent about once per second.

    Args:
        run: run directory; its name is the name of the run in MLflow.
        experiment: experiment in MLflow.
        tracking_uri: URI of the tracking store.
        resume: continue the run that an earlier logger of this directory created.
    """

    def __init__(
        self, run: Path, *, experiment: str = "samestep", tracking_uri: str | None = None, resume: bool = False
    ) -> None:
        for package in ("mlflow", "sqlalchemy", "alembic"):
            require_package("mlflow", package)
        self._directory, self._experiment, self._uri, self._resume = run, experiment, tracking_uri, resume
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
        self._send("params", [Param(key, text[:_MAX_PARAM_CHARACTERS]) for key, text in missing], _MAX_PARAMS)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = round(time.time() * 1000)
        self._pending += [Metric(name, value, now, step) for name, value in values.items()]
        if time.monotonic() - self._last_flush > _FLUSH_SECONDS or len(self._pending) >= _MAX_METRICS:
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

            logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)  # notes on the creation of tables
            directory = self._directory.resolve()
            uri = self._uri or (None if mlflow.is_tracking_uri_set() else f"sqlite:///{directory / 'mlflow.db'}")
            with write_errors(_mlflow_error()):
                client = mlflow.MlflowClient(tracking_uri=uri)
                experiment = client.get_experiment_by_name(self._experiment)
                experiment_id = experiment.experiment_id if experiment else client.create_experiment(self._experiment)
                id_file = _IdFile(self._directory, "mlflow")
                known = id_file.read() if self._resume else None
                self._run_id = known or client.create_run(experiment_id, run_name=directory.name).info.run_id
                client.update_run(self._run_id, status="RUNNING")
            id_file.write(self._run_id)
            self._client = client
        return self._client


def _mlflow_error() -> type[Exception]:
    from mlflow.exceptions import MlflowException

    error: type[Exception] = MlflowException
    return error


class TrackioLogger(MetricLogger):
    """Logs metrics and the recipe to trackio.

    trackio stores metrics in its own folder, which TRACKIO_DIR selects; TRACKIO_SPACE_ID selects a server instead.

    Args:
        run: run directory; the name of the run in trackio is its name with a random suffix.
        project: project in trackio.
        resume: continue the run that an earlier logger of this directory created.
    """

    def __init__(self, run: Path, *, project: str = "samestep", resume: bool = False) -> None:
        require_package("trackio", "trackio", fix="pip install trackio")
        self._directory, self._project, self._resume = run, project, resume
        self._config: dict[str, Any] = {}
        self._run: Any = None

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Log the recipe as the configuration of the run, if no metric has been logged."""
        self._config = dict(config)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._open().log(dict(values), step=step)

    def close(self) -> None:
        if self._run is not None:
            with redirect_stdout(sys.stderr):
                self._run.finish()

    def _open(self) -> Any:
        if self._run is None:
            import trackio  # type: ignore[import-not-found]

            id_file = _IdFile(self._directory, "trackio")
            name = id_file.read() if self._resume else None
            name = name or f"{self._directory.resolve().name}-{secrets.token_hex(4)}"
            id_file.write(name)
            with redirect_stdout(sys.stderr):
                self._run = trackio.init(
                    project=self._project,
                    name=name,
                    config=self._config,
                    resume="allow",
                    embed=False,
                    auto_log_gpu=False,
                    auto_log_cpu=False,
                )
        return self._run


def flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and values of nested mappings."""
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
