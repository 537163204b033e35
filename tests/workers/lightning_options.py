"""Options and callbacks of Lightning's trainer, each in a short training, on the ranks of `helpers.forked_ranks`."""

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    Callback,
    EarlyStopping,
    ModelCheckpoint,
    StochasticWeightAveraging,
    Timer,
)
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader

from workers.lightning_training import BATCH, Module, _trainer, dataset, digest

Options = dict[str, Any]


class Backbone(Module):
    """Trains the first layer from the second epoch."""

    @property
    def backbone(self) -> Any:
        return self.net[0]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([parameter for parameter in self.parameters() if parameter.requires_grad], lr=0.1)


class ValueClipping(Module):
    def configure_gradient_clipping(self, optimizer: Any, **_: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.01, gradient_clip_algorithm="value")


class Skipping(Module):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 3 else None


class TwoLoaders(Module):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx)


class WithoutStatistics(Module):
    def __init__(self) -> None:
        super().__init__()
        self.net[1] = torch.nn.Identity()


class Rate(Callback):
    """Changes the learning rate, as a schedule outside of Lightning."""

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        trainer.optimizers[0].param_groups[0]["lr"] *= 0.9


# Same bits on any number of processes.
WORKS: dict[str, Options] = {
    "gradient_clip_algorithm": {"gradient_clip_algorithm": "value", "gradient_clip_val": 0.01},
    "gradient_clip_val": {"gradient_clip_val": 0.1},
    "configure_gradient_clipping": {"module": ValueClipping, "gradient_clip_val": None},
    "precision bf16-true": {"precision": "bf16-true"},
    "precision 64-true": {"precision": "64-true"},
    "EarlyStopping": {"callbacks": lambda: [EarlyStopping("val_loss", patience=0, min_delta=9.0)], "max_epochs": 4},
    "StochasticWeightAveraging": {
        "module": WithoutStatistics,
        "callbacks": lambda: [StochasticWeightAveraging(0.01, 0.5)],
        "max_epochs": 3,
    },
    "BackboneFinetuning": {"module": Backbone, "callbacks": lambda: [BackboneFinetuning(1)], "max_epochs": 2},
    "learning rate": {"callbacks": lambda: [Rate(), Timer()]},
    "overfit_batches": {"overfit_batches": 3, "max_epochs": 2},
    "limit_train_batches": {"limit_train_batches": 0.5, "limit_val_batches": 1},
    "val_check_interval": {"val_check_interval": 2},
    "val_check_interval 0.5": {"val_check_interval": 0.5},
    "reload_dataloaders": {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 2},
    "use_distributed_sampler": {"use_distributed_sampler": False},
    "fast_dev_run": {"fast_dev_run": 2},
    "inference_mode": {"inference_mode": False, "check_val_every_n_epoch": 2, "max_epochs": 2},
    "detect_anomaly": {"detect_anomaly": True, "limit_train_batches": 2},
    "deterministic": {"deterministic": True, "benchmark": False, "limit_train_batches": 2},
    "min_steps": {"max_epochs": 1, "min_steps": 7},
    "on_train_batch_start": {"module": Skipping, "max_epochs": 2},
    "two validation loaders": {"module": TwoLoaders, "val_loaders": 2},
    "two predefined loaders": {"module": TwoLoaders, "val_loaders": CombinedLoader},
}
if hasattr(callbacks, "EMAWeightAveraging"):  # since 2.6
    WORKS["EMAWeightAveraging"] = {"callbacks": lambda: [callbacks.EMAWeightAveraging(decay=0.5)]}


def _loaders(options: Options) -> tuple[Any, Any]:
    train = DataLoader(dataset(212), batch_size=BATCH // 2, shuffle=True)
    sizes = [41, 23][: 2 if "val_loaders" in options else 1]
    tests = [DataLoader(dataset(size), batch_size=20) for size in sizes]
    return train, CombinedLoader(tests, "sequential") if options.get("val_loaders") is CombinedLoader else tests


def _fit(options: Options) -> Any:
    module = options.get("module", Module)()
    loaders = _loaders(options)
    others = {key: value for key, value in options.items() if key not in ("module", "val_loaders")}
    if "callbacks" in others:
        others["callbacks"] = others["callbacks"]()
    trainer = _trainer(**{"max_epochs": 1, **others})
    trainer.fit(module, *loaders)
    return trainer, module


def works(folder: str) -> dict[str, list[Any]]:
    """Return weights, number of steps and last values of each supported option."""
    results = {}
    for name, options in WORKS.items():
        trainer, module = _fit(options)
        values = {key: float(value) for key, value in sorted(trainer.callback_metrics.items())}
        results[name] = [digest(module.net.float()), trainer.global_step, values]
    return results


def tuned(folder: str) -> list[Any]:
    """Return the learning rate that Lightning's tuner suggests, and the weights of a training afterwards."""
    trainer, module = _trainer(max_epochs=1, default_root_dir=folder), Module()
    module.lr = 0.01  # type: ignore[assignment]
    finder = Tuner(trainer).lr_find(module, _loaders({})[0], num_training=40, early_stop_threshold=None)
    trainer.fit(module, _loaders({})[0])
    assert finder is not None
    return [finder.suggestion(), digest(module.net)]


def best(folder: str) -> list[Any]:
    """Return the values of a test with the best checkpoint of a training."""
    checkpoint = ModelCheckpoint(folder, monitor="val_loss")
    trainer, module = _trainer(max_epochs=2, callbacks=[checkpoint], enable_checkpointing=True), Module()
    train, tests = _loaders({})
    trainer.fit(module, train, tests)
    return [Path(checkpoint.best_model_path).name, trainer.test(module, tests, ckpt_path="best", verbose=False)]
