"""Values that modules of Lightning log, by torchmetrics or in hooks, on the ranks of `helpers.forked_ranks`."""

import logging
import time
from typing import Any

import torch
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import MeanSquaredError, MetricCollection
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy, MulticlassF1Score

from helpers.forked_ranks import refusal
from workers.lightning_training import BATCH, CLASSES, Module, _loaders, _trainer, dataset, digest


class Collection(Module):
    """Logs a collection, which shares states, and a metric of some microbatches alone."""

    def __init__(self) -> None:
        super().__init__()
        self.net[1] = nn.Identity()  # microbatches have one sample
        options = {"num_classes": CLASSES, "average": "macro"}
        self.several = MetricCollection({"a": MulticlassAccuracy(**options), "f": MulticlassF1Score(**options)})
        self.rare = MulticlassAccuracy(CLASSES)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        inputs, targets = batch
        super().validation_step(batch, batch_idx)
        self.several.update(self.net(inputs), targets)
        self.log_dict(self.several)
        if targets[0] == 0:
            self.rare(self.net(inputs), targets)
            self.log("rare", self.rare)


def few() -> dict[str, Any]:
    """Train and validate with a last batch of fewer samples than ranks."""
    module, trainer = Collection(), _trainer(max_epochs=1)
    train = DataLoader(dataset(BATCH + 2), batch_size=BATCH)
    trainer.fit(module, train, DataLoader(dataset(2), batch_size=20))
    (values,) = trainer.validate(module, DataLoader(dataset(42), batch_size=40), verbose=False)
    metrics = {name: float(value) for name, value in sorted(trainer.callback_metrics.items())}
    return {"weights": digest(module.net), "epochs": module.epochs, "values": values, "metrics": metrics}


class Syncing(Module):
    """Calls a method of a metric that communicates, in a step."""

    def __init__(self, stage: str, *, on_step: bool = False) -> None:
        super().__init__()
        self.stage = stage
        self.synced = MulticlassAccuracy(CLASSES, dist_sync_on_step=on_step)

    def _sync(self, stage: str, batch: Any) -> None:
        if stage == self.stage:
            self.synced(self.net(batch[0]), batch[1])
            self.synced.compute()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self._sync("fit", batch)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._sync("validate", batch)
        super().validation_step(batch, batch_idx)

    def on_validation_epoch_end(self) -> None:
        self.synced.compute()


class Hooks(Module):
    """Logs values of the microbatches of the rank in a hook, in place of the step."""

    def __init__(self, name: str = "") -> None:
        super().__init__()
        self.hook = name
        self.outs: list[torch.Tensor] = []
        self.val_outs: list[torch.Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.outs.append(loss.detach())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.val_outs.append(nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def _log(self, hook: str, values: list[torch.Tensor]) -> None:
        if hook == self.hook:
            self.log("own", torch.stack(values).mean())

    def on_validation_epoch_end(self) -> None:
        self._log("on_validation_epoch_end", self.val_outs)

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        self._log("on_train_epoch_end", self.outs)
        self.log("equal", float(self.trainer.global_step))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        self._log("on_train_batch_end", self.outs)
        self.log("time", time.monotonic(), rank_zero_only=True)
        if self.global_rank == 0:
            self.log("memory", time.monotonic(), on_epoch=True, rank_zero_only=True)
        if self.hook == "rank 0" and self.global_rank == 0:
            self.log("own", 1.0)


class LoggingCallback(Callback):
    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        self.log("own", float(trainer.global_rank))


def collectives_of_metrics() -> dict[str, list[str]]:
    """Return code and text of the errors of metrics that communicate in a step."""
    train, tests = _loaders()
    options = {"max_epochs": 1, "limit_train_batches": 2}
    return {
        "none": refusal(_trainer(**options).fit, Syncing(""), train, tests),
        "compute in training": refusal(_trainer(**options).fit, Syncing("fit"), train),
        "compute in validation": refusal(_trainer().validate, Syncing("validate"), tests),
        "dist_sync_on_step": refusal(_trainer().validate, Syncing("validate", on_step=True), tests),
    }


def hooks() -> dict[str, list[str]]:
    """Return code and text of the errors of values of single ranks."""
    train, tests = _loaders()
    results = {}
    for hook in ("", "on_validation_epoch_end", "on_train_epoch_end", "on_train_batch_end", "rank 0"):
        trainer = _trainer(max_epochs=2, limit_train_batches=2, val_check_interval=1)
        results[hook] = refusal(trainer.fit, Hooks(hook), train, tests)
    trainer = _trainer(callbacks=[LoggingCallback()])
    results["callback"] = refusal(trainer.test, Module(), tests) + refusal(trainer.validate, Module(), tests)
    return results


class Inexact(Module):
    def __init__(self) -> None:
        super().__init__()
        self.error = MeanSquaredError()
        self.areas = MetricCollection({"exact": BinaryAUROC(thresholds=5), "listed": BinaryAUROC()})


def warned() -> list[str]:
    """Return the messages about metrics whose last bits depend on the number of processes."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("samestep").addHandler(handler)
    _trainer().validate(Inexact(), _loaders()[1], verbose=False)
    return [message for message in messages if "metric" in message]


def refused() -> dict[str, list[str]]:
    """Return code and text of the errors of options that are refused before the first batch of their effect."""
    train, tests = _loaders()
    scheduler = GradientAccumulationScheduler({5: 4})
    results = {"GradientAccumulationScheduler": refusal(_trainer(callbacks=[scheduler]).fit, Module(), train)}
    if hasattr(callbacks, "EMAWeightAveraging"):  # since 2.6
        results["val_check_interval"] = refusal(_trainer(val_check_interval="00:00:05:00").fit, Module(), train, tests)
    for mode in ("min_size", "max_size"):
        results[mode] = refusal(_trainer().validate, Module(), CombinedLoader([tests, tests], mode))
    return results
